//! A TCP proxy between a client and a member, which loses or delays what it is set to.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Mutex, watch};
use tokio::task::JoinHandle;

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Losses {
    /// What the client sends is taken and kept back from the member.
    pub requests: bool,
    pub answers: bool,
    /// An answer is replaced by the error that the database is full.
    pub full: bool,
    /// Losing begins with the first request of at least so many bytes. What comes before it passes.
    pub from: usize,
    /// Answers with this text are lost, and no others.
    pub with: Option<&'static str>,
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
    /// Each number ends the clients' connections of the one before.
    cuts: watch::Sender<usize>,
    kept: Mutex<Vec<Kept>>,
    kept_bytes: watch::Sender<usize>,
}

/// A connection to the member, and the requests that have not got there.
struct Kept {
    requests: Vec<u8>,
    to_member: OwnedWriteHalf,
    from_member: OwnedReadHalf,
}

impl Proxy {
    pub async fn start(to: SocketAddr) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let state = Arc::new(State {
            losses: watch::channel(Losses::default()).0,
            cuts: watch::channel(0).0,
            kept: Mutex::default(),
            kept_bytes: watch::channel(0).0,
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

    /// Ends all connections of clients. Those to the member stay.
    pub fn cut(&self) {
        self.state.cuts.send_modify(|cuts| *cuts += 1);
    }

    /// Waits until a request is kept back, and forgets that there is one.
    pub async fn keeps(&self) {
        self.state.kept_bytes.subscribe().wait_for(|kept| *kept > 0).await.unwrap();
        self.state.kept_bytes.send_replace(0);
    }

    /// Gives the member what was kept back of its one cut connection, and waits until it has answered a request of it.
    pub async fn deliver(&self) {
        let mut kept = loop {
            let kept = self.state.kept.lock().await.pop();
            match kept {
                Some(kept) if !kept.requests.is_empty() => break kept,
                _ => tokio::time::sleep(Duration::from_millis(5)).await,
            }
        };
        kept.to_member.write_all(&kept.requests).await.unwrap();
        let mut answers = Vec::new();
        while !has_trailers(&answers) {
            let mut buffer = [0; 4096];
            let read = kept.from_member.read(&mut buffer).await.unwrap();
            assert!(read > 0, "the member closed the connection");
            answers.extend(&buffer[..read]);
        }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.accepting.abort();
        self.cut();
    }
}

/// Returns whether HTTP/2 frames have one that ends a call: HEADERS with END_STREAM.
fn has_trailers(mut frames: &[u8]) -> bool {
    while let Some((frame, rest)) = first_frame(frames) {
        if frame[3] == 1 && frame[4] & 1 == 1 {
            return true;
        }
        frames = rest;
    }
    false
}

/// Returns the first HTTP/2 frame, and what follows it. `None`: it is not whole.
fn first_frame(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let [high, middle, low, ..] = bytes else { return None };
    let length = usize::from(*high) << 16 | usize::from(*middle) << 8 | usize::from(*low);
    bytes.split_at_checked(9 + length)
}

/// Returns the frames without those that carry this text.
fn without(mut frames: &[u8], text: &str) -> Vec<u8> {
    let mut left = Vec::new();
    while let Some((frame, rest)) = first_frame(frames) {
        if !frame.windows(text.len()).any(|part| part == text.as_bytes()) {
            left.extend(frame);
        }
        frames = rest;
    }
    left.extend(frames);
    left
}

/// Returns the error of a full database for each call that is answered in these frames, without the answers.
fn refused(mut frames: &[u8]) -> Vec<u8> {
    // `:status: 200`, and names and values as they are.
    let mut headers = vec![0x88];
    for text in [
        ["content-type", "application/grpc"],
        ["grpc-status", "8"],
        ["grpc-message", "etcdserver: mvcc: database space exceeded"],
    ] {
        headers.push(0);
        for text in text {
            headers.push(text.len() as u8);
            headers.extend(text.as_bytes());
        }
    }
    let mut left = Vec::new();
    while let Some((frame, rest)) = first_frame(frames) {
        match (frame[3], frame[4] & 1) {
            // HEADERS that begin an answer: in their place come such that end it.
            (1, 0) => {
                left.extend([0, 0, headers.len() as u8, 1, 5]);
                left.extend(&frame[5..9]);
                left.extend(&headers);
            }
            // The rest of it.
            (0 | 1, _) => {}
            _ => left.extend(frame),
        }
        frames = rest;
    }
    left.extend(frames);
    left
}

async fn pass(client: TcpStream, member: TcpStream, state: Arc<State>) {
    let mut cuts = state.cuts.subscribe();
    let ((mut from_client, mut to_client), (mut from_member, mut to_member)) =
        (client.into_split(), member.into_split());
    let mut requests = Vec::new();
    let begun = AtomicBool::new(false);
    let both = async {
        tokio::join!(
            async {
                let mut buffer = vec![0; 64 * 1024];
                while let Ok(read @ 1..) = from_client.read(&mut buffer).await {
                    let losses = *state.losses.borrow();
                    let loses = (losses.requests || losses.answers || losses.full)
                        && (begun.load(Ordering::SeqCst) || read >= losses.from);
                    begun.store(loses, Ordering::SeqCst);
                    if loses && losses.requests {
                        requests.extend(&buffer[..read]);
                        state.kept_bytes.send_modify(|kept| *kept += read);
                    } else if to_member.write_all(&buffer[..read]).await.is_err() {
                        return;
                    }
                }
            },
            async {
                let mut buffer = vec![0; 64 * 1024];
                // What has come of a frame.
                let mut part = Vec::new();
                while let Ok(read @ 1..) = from_member.read(&mut buffer).await {
                    let losses = *state.losses.borrow();
                    if losses.answers && begun.load(Ordering::SeqCst) {
                        continue;
                    }
                    part.extend(&buffer[..read]);
                    let mut length = 0;
                    while let Some((frame, _)) = first_frame(&part[length..]) {
                        length += frame.len();
                    }
                    let mut frames: Vec<u8> = part.drain(..length).collect();
                    if losses.full && begun.load(Ordering::SeqCst) {
                        frames = refused(&frames);
                    }
                    if let Some(text) = losses.with {
                        frames = without(&frames, text);
                    }
                    if to_client.write_all(&frames).await.is_err() {
                        return;
                    }
                }
            }
        )
    };
    tokio::select! {
        _ = cuts.changed() => {}
        _ = both => {}
    }
    state.kept.lock().await.push(Kept { requests, to_member, from_member });
}
