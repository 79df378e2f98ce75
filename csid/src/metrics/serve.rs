//! The metrics' socket: HTTP, one question a connection, few at once and none for long.

use std::convert::Infallible;
use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use http::header::{ALLOW, CONTENT_TYPE};
use http::{HeaderValue, Method, Request, Response, StatusCode};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use rustix::net::{AddressFamily, getsockname};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::Semaphore;

/// What a program's metrics are read from.
pub trait Scrape: Clone + Send + Sync + 'static {
    /// Returns all metrics as text that ends with `# EOF`.
    fn text(&self) -> impl Future<Output = Result<String, fmt::Error>> + Send;
}

const PATH: &str = "/metrics";
const CONTENT: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// Connections at once; more wait to be taken.
const AT_ONCE: usize = 8;
/// The time limit of reading a request, and of the request with its answer.
const TO_ASK: Duration = Duration::from_secs(2);
const IN_ALL: Duration = Duration::from_secs(10);
/// The limit of a request in bytes, and of its number of headers.
const BYTES: usize = 8192;
const HEADERS: usize = 32;

/// systemd's socket: a Unix one, or what an administrator's drop-in has made of it.
pub enum Listener {
    Unix(UnixListener),
    Tcp(TcpListener),
}

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

impl Listener {
    /// Makes a listener of a listening socket.
    pub fn new(socket: OwnedFd) -> std::io::Result<Listener> {
        rustix::io::ioctl_fionbio(&socket, true)?;
        match getsockname(&socket)?.address_family() {
            AddressFamily::UNIX => UnixListener::from_std(socket.into()).map(Listener::Unix),
            _ => TcpListener::from_std(socket.into()).map(Listener::Tcp),
        }
    }

    async fn accept(&self) -> std::io::Result<Box<dyn Stream>> {
        Ok(match self {
            Listener::Unix(listener) => Box::new(listener.accept().await?.0),
            Listener::Tcp(listener) => Box::new(listener.accept().await?.0),
        })
    }
}

/// Answers each connection, until this is dropped.
pub async fn serve(listener: Listener, sources: impl Scrape) {
    let places = Arc::new(Semaphore::new(AT_ONCE));
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
        match listener.accept().await {
            Ok(stream) => {
                let sources = sources.clone();
                tokio::spawn(async move {
                    // A peer that goes away, or asks for too much, is no error.
                    let _ = tokio::time::timeout(IN_ALL, connection(stream, sources)).await;
                    drop(place);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "the metrics' socket");
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        }
    }
}

async fn connection(stream: Box<dyn Stream>, sources: impl Scrape) -> hyper::Result<()> {
    let answer = service_fn(move |request: Request<Incoming>| {
        let sources = sources.clone();
        async move { Ok::<_, Infallible>(answer(&request, &sources).await) }
    });
    http1::Builder::new()
        .keep_alive(false)
        .timer(TokioTimer::new())
        .header_read_timeout(TO_ASK)
        .max_headers(HEADERS)
        .max_buf_size(BYTES)
        .serve_connection(TokioIo::new(stream), answer)
        .await
}

async fn answer(request: &Request<Incoming>, sources: &impl Scrape) -> Response<String> {
    let plain = |status: StatusCode, text: &str| {
        let mut answer = Response::new(text.to_owned());
        *answer.status_mut() = status;
        answer
    };
    if request.uri().path() != PATH {
        return plain(StatusCode::NOT_FOUND, "the metrics are at /metrics\n");
    }
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        let mut answer = plain(StatusCode::METHOD_NOT_ALLOWED, "metrics are read\n");
        answer.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
        return answer;
    }
    match sources.text().await {
        Ok(text) => {
            let mut answer = Response::new(text);
            answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(CONTENT));
            answer
        }
        Err(error) => {
            tracing::error!(%error, "the metrics cannot be written");
            plain(StatusCode::INTERNAL_SERVER_ERROR, "the log says why\n")
        }
    }
}
