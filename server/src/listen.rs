//! Connections of nodes and operators, and their limits.

use std::collections::HashMap;
use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::{Stream, stream};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tonic::transport::server::Connected;

use crate::access::Peer;

/// How long the listener waits when there are no descriptors left.
const PAUSE: Duration = Duration::from_millis(100);

/// A connection, with its place among all.
pub struct Connection {
    stream: TcpStream,
    peer: Peer,
    _place: OwnedSemaphorePermit,
    _place_of_address: AddressPlace,
}

/// How many connections each address has.
type Addresses = Arc<Mutex<HashMap<IpAddr, usize>>>;

/// A connection's place among those of its address.
struct AddressPlace {
    addresses: Addresses,
    address: IpAddr,
}

impl AddressPlace {
    /// Returns `None` if the address has `most` connections.
    fn enter(addresses: &Addresses, address: IpAddr, most: usize) -> Option<AddressPlace> {
        let mut counts = addresses.lock().unwrap_or_else(PoisonError::into_inner);
        let count = counts.entry(address).or_default();
        if *count >= most {
            return None;
        }
        *count += 1;
        Some(AddressPlace { addresses: Arc::clone(addresses), address })
    }
}

impl Drop for AddressPlace {
    fn drop(&mut self) {
        let mut counts = self.addresses.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = counts.get_mut(&self.address) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.address);
            }
        }
    }
}

impl Connected for Connection {
    type ConnectInfo = Peer;

    fn connect_info(&self) -> Peer {
        self.peer.clone()
    }
}

/// Accepts at most `most` connections at the same time. Later ones wait in the kernel. One address has half of them at most: its
/// others are closed at once.
pub fn accept(listener: TcpListener, most: usize) -> impl Stream<Item = io::Result<Connection>> {
    let places = Arc::new(Semaphore::new(most.min(Semaphore::MAX_PERMITS)));
    let of_address = most.div_ceil(2);
    let state = (listener, places, Addresses::default());
    stream::unfold(state, move |(listener, places, addresses)| async move {
        let place = places.clone().acquire_owned().await.ok()?;
        loop {
            match next(&listener).await {
                Ok((stream, address)) => {
                    let Some(of_address) = AddressPlace::enter(&addresses, address.ip(), of_address) else {
                        continue;
                    };
                    let peer = Peer { address };
                    let connection =
                        Connection { stream, peer, _place: place, _place_of_address: of_address };
                    return Some((Ok(connection), (listener, places, addresses)));
                }
                Err(error) => {
                    tracing::warn!(%error, "a connection was not accepted");
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
    })
}

async fn next(listener: &TcpListener) -> io::Result<(TcpStream, std::net::SocketAddr)> {
    let (stream, address) = listener.accept().await?;
    stream.set_nodelay(true)?;
    Ok((stream, address))
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_has_its_places_alone() {
        let addresses = Addresses::default();
        let enter = |last: u8| AddressPlace::enter(&addresses, IpAddr::from([127, 0, 0, last]), 2);
        let (first, second) = (enter(1), enter(1));
        assert!(first.is_some() && second.is_some() && enter(1).is_none());
        assert!(enter(2).is_some(), "the other address has places");
        drop(first);
        assert!(enter(1).is_some());
        drop(second);
        assert!(addresses.lock().unwrap().is_empty());
    }
}
