//! A TCP proxy between a client and a member, which loses what it is set to lose.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Losses {
    /// What the client sends is taken, and does not reach the member.
    pub requests: bool,
    pub answers: bool,
    /// New connections are closed at once.
    pub connections: bool,
}

pub struct Proxy {
    pub address: SocketAddr,
    state: Arc<State>,
    accepting: JoinHandle<()>,
}

struct State {
    losses: watch::Sender<Losses>,
    /// Each number ends the connections of the one before.
    cuts: watch::Sender<usize>,
    lost_requests: AtomicUsize,
}

impl Proxy {
    pub async fn start(to: SocketAddr) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let state = Arc::new(State {
            losses: watch::channel(Losses::default()).0,
            cuts: watch::channel(0).0,
            lost_requests: AtomicUsize::new(0),
        });
        let shared = state.clone();
        let accepting = tokio::spawn(async move {
            loop {
                let (client, _) = listener.accept().await.unwrap();
                if shared.losses.borrow().connections {
                    continue;
                }
                if let Ok(member) = TcpStream::connect(to).await {
                    tokio::spawn(pass(client, member, shared.clone()));
                }
            }
        });
        Proxy { address, state, accepting }
    }

    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    pub fn lose(&self, losses: Losses) {
        self.state.losses.send_replace(losses);
    }

    /// Ends all connections.
    pub fn cut(&self) {
        self.state.cuts.send_modify(|cuts| *cuts += 1);
    }

    /// Waits until this many bytes of requests were lost.
    pub async fn has_lost(&self, bytes: usize) {
        while self.state.lost_requests.load(Ordering::SeqCst) < bytes {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.accepting.abort();
        self.cut();
    }
}

async fn pass(client: TcpStream, member: TcpStream, state: Arc<State>) {
    let mut cuts = state.cuts.subscribe();
    let ((from_client, to_client), (from_member, to_member)) = (client.into_split(), member.into_split());
    let requests = copy(from_client, to_member, &state, |losses| losses.requests, Some(&state.lost_requests));
    let answers = copy(from_member, to_client, &state, |losses| losses.answers, None);
    tokio::select! {
        _ = cuts.changed() => {}
        () = requests => {}
        () = answers => {}
    }
}

async fn copy(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    state: &State,
    loses: fn(&Losses) -> bool,
    lost: Option<&AtomicUsize>,
) {
    let mut buffer = vec![0; 64 * 1024];
    while let Ok(read @ 1..) = from.read(&mut buffer).await {
        if loses(&state.losses.borrow()) {
            if let Some(lost) = lost {
                lost.fetch_add(read, Ordering::SeqCst);
            }
        } else if to.write_all(&buffer[..read]).await.is_err() {
            return;
        }
    }
}
