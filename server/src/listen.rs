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
use crate::metrics::Metrics;

/// How long the listener waits when there are no descriptors left.
const PAUSE: Duration = Duration::from_millis(100);

/// The connections that one IPv6 network leaves to others at most. It leaves a quarter of all where that is less.
const RESERVE: usize = 500;

/// A connection, with its place among all.
pub struct Connection {
    stream: TcpStream,
    peer: Peer,
    _place: OwnedSemaphorePermit,
    _places_of_origin: OriginPlaces,
}

/// What connections are counted by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Origin {
    Address(IpAddr),
    /// The first half of an IPv6 address. A host may have each address that begins with it.
    Network([u16; 4]),
}

impl Origin {
    /// Returns what a connection from an address counts for. An IPv4 address that an IPv6 socket shows is an IPv4 address here.
    fn of(address: IpAddr) -> impl Iterator<Item = Origin> {
        let address = address.to_canonical();
        let network = match address {
            IpAddr::V4(_) => None,
            IpAddr::V6(of) => {
                let [first, second, third, fourth, ..] = of.segments();
                Some(Origin::Network([first, second, third, fourth]))
            }
        };
        std::iter::once(Origin::Address(address)).chain(network)
    }

    /// Returns the most connections of this origin where there are at most `all`.
    fn most(self, all: usize) -> usize {
        match self {
            Origin::Address(_) => all.div_ceil(2),
            Origin::Network(_) => all - (all / 4).min(RESERVE),
        }
    }
}

/// How many connections each origin has.
type Counts = Arc<Mutex<HashMap<Origin, usize>>>;

/// A connection's places among those of its address and of its network.
struct OriginPlaces {
    counts: Counts,
    address: IpAddr,
}

impl OriginPlaces {
    /// Returns `None` if the address or its network has its most connections. `all`: the most connections of all.
    fn enter(counts: &Counts, address: IpAddr, all: usize) -> Option<OriginPlaces> {
        let mut table = counts.lock().unwrap_or_else(PoisonError::into_inner);
        let is_full = |of: Origin| table.get(&of).is_some_and(|count| *count >= of.most(all));
        if Origin::of(address).any(is_full) {
            return None;
        }
        for of in Origin::of(address) {
            *table.entry(of).or_default() += 1;
        }
        Some(OriginPlaces { counts: Arc::clone(counts), address })
    }
}

impl Drop for OriginPlaces {
    fn drop(&mut self) {
        let mut table = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        for of in Origin::of(self.address) {
            if let Some(count) = table.get_mut(&of) {
                *count -= 1;
                if *count == 0 {
                    table.remove(&of);
                }
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

/// Accepts at most `most` connections at the same time. Later ones wait in the kernel. One address has half of them at most, and one IPv6 network
/// (/64) leaves [`RESERVE`] to others. Connections above that are closed at once, and counted.
pub fn accept(
    listener: TcpListener,
    most: usize,
    metrics: Metrics,
) -> impl Stream<Item = io::Result<Connection>> {
    let places = Arc::new(Semaphore::new(most.min(Semaphore::MAX_PERMITS)));
    let state = (listener, places, Counts::default(), metrics);
    stream::unfold(state, move |(listener, places, counts, metrics)| async move {
        let place = places.clone().acquire_owned().await.ok()?;
        loop {
            match next(&listener).await {
                Ok((stream, address)) => {
                    let Some(of_origin) = OriginPlaces::enter(&counts, address.ip(), most) else {
                        metrics.refused_by("connections");
                        continue;
                    };
                    let peer = Peer { address };
                    let connection = Connection { stream, peer, _place: place, _places_of_origin: of_origin };
                    return Some((Ok(connection), (listener, places, counts, metrics)));
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

    /// Enters connections from these addresses, where there are eight in all. Returns which were accepted, with their places.
    fn entered(counts: &Counts, addresses: &[&str]) -> (Vec<bool>, Vec<Option<OriginPlaces>>) {
        let enter = |of: &&str| OriginPlaces::enter(counts, of.parse().unwrap(), 8);
        let places: Vec<_> = addresses.iter().map(enter).collect();
        (places.iter().map(Option::is_some).collect(), places)
    }

    #[test]
    fn address_has_half_of_the_connections() {
        let counts = Counts::default();
        // The second is the first, at a socket for IPv6.
        let one = ["127.0.0.1", "::ffff:127.0.0.1", "127.0.0.1", "127.0.0.1", "127.0.0.1"];
        let (accepted, mut places) = entered(&counts, &one);
        assert_eq!(accepted, [true, true, true, true, false]);
        // IPv4 has no networks here.
        let (accepted, others) = entered(&counts, &["127.0.0.2", "::ffff:127.0.0.3"]);
        assert_eq!(accepted, [true, true]);
        places.pop();
        places.pop();
        assert_eq!(entered(&counts, &["127.0.0.1"]).0, [true]);
        drop((places, others));
        assert!(counts.lock().unwrap().is_empty());
    }

    #[test]
    fn ipv6_network_leaves_places_to_others() {
        let counts = Counts::default();
        let (accepted, places) =
            entered(&counts, &["fd00::1", "fd00::1", "fd00::1", "fd00::1", "fd00::1", "fd00::2", "fd00::3"]);
        assert_eq!(accepted, [true, true, true, true, false, true, true]);
        assert_eq!(entered(&counts, &["fd00::4", "fd00:0:0:1::4"]).0, [false, true]);
        assert_eq!(Origin::Network([0; 4]).most(6000), 5500, "sessions of a large cluster have their places");
        drop(places);
        assert!(counts.lock().unwrap().is_empty());
    }
}
