//! A relay in front of a socket, which keeps all that passes. It runs in a thread of its own: a test may wait for a program that talks through it.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::oneshot;

/// The relay ends with this value, and its connections with it.
pub struct Relay {
    kept: Arc<Kept>,
    _ends: oneshot::Sender<()>,
}

/// What clients have sent and what they were answered, each connection by itself.
type Kept = Mutex<[Vec<Vec<u8>>; 2]>;

impl Relay {
    /// Starts a relay at a Unix socket, in front of another one.
    pub fn unix(at: &Path, to: &Path) -> Relay {
        let to = to.to_owned();
        let listener = std::os::unix::net::UnixListener::bind(at).expect("the relay's socket");
        listener.set_nonblocking(true).expect("a listener that does not block");
        Relay::start(async move |kept| {
            let listener = UnixListener::from_std(listener).expect("a listener");
            loop {
                let (client, _) = listener.accept().await.expect("a client");
                if let Ok(server) = UnixStream::connect(&to).await {
                    tokio::spawn(pass(client, server, kept.clone()));
                }
            }
        })
    }

    /// Starts a relay in front of an address. Returns its own address, too.
    pub fn tcp(to: SocketAddr) -> (Relay, SocketAddr) {
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("the relay's socket");
        listener.set_nonblocking(true).expect("a listener that does not block");
        let address = listener.local_addr().expect("an address");
        let relay = Relay::start(async move |kept| {
            let listener = TcpListener::from_std(listener).expect("a listener");
            loop {
                let (client, _) = listener.accept().await.expect("a client");
                if let Ok(server) = TcpStream::connect(to).await {
                    tokio::spawn(pass(client, server, kept.clone()));
                }
            }
        });
        (relay, address)
    }

    fn start<F>(relays: F) -> Relay
    where
        F: AsyncFnOnce(Arc<Kept>) + Send + 'static,
    {
        let kept = Arc::new(Kept::default());
        let (ends, ended) = oneshot::channel::<()>();
        let shared = kept.clone();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime").block_on(async {
                tokio::select! {
                    _ = ended => {}
                    () = relays(shared) => {}
                }
            });
        });
        Relay { kept, _ends: ends }
    }

    /// Returns what clients have sent, and what they were answered.
    pub fn seen(&self) -> [Vec<u8>; 2] {
        let kept = self.kept.lock().expect("the relay works");
        kept.each_ref().map(|connections| connections.join(&b"\0"[..]))
    }
}

async fn pass(client: impl AsyncRead + AsyncWrite, server: impl AsyncRead + AsyncWrite, kept: Arc<Kept>) {
    let (from_client, to_client) = tokio::io::split(client);
    let (from_server, to_server) = tokio::io::split(server);
    let place = {
        let mut kept = kept.lock().expect("the relay works");
        kept.iter_mut().for_each(|connections| connections.push(Vec::new()));
        kept[0].len() - 1
    };
    let keep = |way: usize| {
        let kept = &kept;
        move |bytes: &[u8]| kept.lock().expect("the relay works")[way][place].extend(bytes)
    };
    // A connection whose one side has ended has no use for the other.
    tokio::select! {
        () = copy(from_client, to_server, keep(0)) => {}
        () = copy(from_server, to_client, keep(1)) => {}
    }
}

async fn copy(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    mut keep: impl FnMut(&[u8]),
) {
    let mut buffer = vec![0; 64 * 1024];
    while let Ok(read @ 1..) = from.read(&mut buffer).await {
        keep(&buffer[..read]);
        if to.write_all(&buffer[..read]).await.is_err() {
            return;
        }
    }
}
