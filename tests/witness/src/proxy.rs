//! The wire. Each connection of the CO has one of its own to the plugin, and the end of one ends the other, so both sides
//! see what they would see without a witness. Unary RPCs of CSI are taken whole, recorded, and forwarded as the bytes they
//! came as; everything else streams through.

use std::error::Error;
use std::os::unix::net::UnixListener as StdListener;
use std::path::{Path, PathBuf};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request, Response};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::{Body, Frame, Incoming};
use hyper::client::conn::http2 as client;
use hyper::server::conn::http2 as server;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::Value;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Notify;
use tokio::task::JoinSet;

use crate::message::{self, Mask, Method};
use crate::record::{Event, Log};
use crate::script::{Act, Code, Script};

/// How long a connection of the CO waits for a plugin that starts again.
const RESTART: Duration = Duration::from_secs(1);

type Payload = UnsyncBoxBody<Bytes, hyper::Error>;

/// The state that all connections share.
pub(crate) struct Shared {
    pub(crate) log: Log,
    pub(crate) script: Script,
    pub(crate) mask: Mask,
}

/// A way to the plugin: the listener for the CO, and the plugin's own socket.
pub(crate) struct Way {
    pub(crate) listener: StdListener,
    pub(crate) plugin: PathBuf,
}

/// Serve until dropped.
pub(crate) async fn serve(ways: Vec<Way>, shared: Arc<Shared>) -> std::io::Result<()> {
    let mut accepting = JoinSet::new();
    for (socket, Way { listener, plugin }) in ways.into_iter().enumerate() {
        listener.set_nonblocking(true)?;
        accepting.spawn(accept(
            UnixListener::from_std(listener)?,
            socket,
            plugin.into(),
            Arc::clone(&shared),
        ));
    }
    accepting.join_next().await.map_or(Ok(()), |end| Ok(end?))
}

async fn accept(listener: UnixListener, socket: usize, plugin: Arc<Path>, shared: Arc<Shared>) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                drop(tokio::spawn(converse(stream, socket, Arc::clone(&plugin), Arc::clone(&shared))));
            }
            // Out of descriptors, or the CO is gone already.
            Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
        }
    }
}

/// Forwards a connection of the CO, from its first byte to its last.
async fn converse(co: UnixStream, socket: usize, plugin: Arc<Path>, shared: Arc<Shared>) {
    let pid = |stream: &UnixStream| stream.peer_cred().ok().and_then(|peer| peer.pid()).unwrap_or(0);
    let Some(plugin) = connected(&plugin).await else { return };
    let number = shared.log.connected(socket, pid(&co), pid(&plugin));
    let closed = Arc::new(AtomicBool::new(false));
    if let Ok((sender, upstream)) = client::handshake(TokioExecutor::new(), TokioIo::new(plugin)).await {
        let (broken, closed) = (Notify::new(), Arc::clone(&closed));
        let connection = Arc::new(Connection { shared: Arc::clone(&shared), number, sender, broken, closed });
        let service = service_fn(|request| Arc::clone(&connection).forward(request));
        let mut server = server::Builder::new(TokioExecutor::new());
        // How many calls may be open is the plugin's to say.
        server.max_concurrent_streams(None);
        let downstream = server.serve_connection(TokioIo::new(co), service);
        let (mut upstream, mut downstream) = (Some(Box::pin(upstream)), pin!(downstream));
        loop {
            tokio::select! {
                _ = &mut downstream => break,
                () = connection.broken.notified() => break,
                // Earlier answers still go out.
                () = ended(upstream.as_mut()) => {
                    // With it go the calls that it has queued and not sent.
                    upstream = None;
                    downstream.as_mut().graceful_shutdown();
                }
            }
        }
    }
    closed.store(true, Ordering::Relaxed);
    shared.log.write(Event::Closed { connection: number });
}

/// Waits for the end of a connection. Never returns for one that has ended.
async fn ended(connection: Option<impl Future>) {
    match connection {
        Some(connection) => drop(connection.await),
        None => std::future::pending().await,
    }
}

/// The CO's connection cannot be refused any more, only ended, and a CO may take that for more than a plugin that is not
/// there yet. So one that comes soon is waited for.
async fn connected(plugin: &Path) -> Option<UnixStream> {
    let end = Instant::now() + RESTART;
    loop {
        match UnixStream::connect(plugin).await {
            Ok(stream) => return Some(stream),
            Err(_) if Instant::now() < end => tokio::time::sleep(Duration::from_millis(5)).await,
            Err(_) => return None,
        }
    }
}

struct Connection {
    shared: Arc<Shared>,
    number: u64,
    sender: client::SendRequest<Payload>,
    broken: Notify,
    /// Whether the log has the connection's end. All connections share one thread, so no call is written after it.
    closed: Arc<AtomicBool>,
}

impl Connection {
    async fn forward(self: Arc<Self>, request: Request<Incoming>) -> hyper::Result<Response<Payload>> {
        let method = message::method(request.uri().path());
        match method {
            Some(method) if !method.streams => self.unary(method, request).await,
            known => {
                let rpc = known.map_or(request.uri().path(), |method| &method.name);
                let call = self.called(rpc, Value::Null).await;
                let (parts, body) = self.send(request.map(BodyExt::boxed_unsync)).await?.into_parts();
                let code = parts.headers.get("grpc-status").cloned();
                Ok(Response::from_parts(parts, Watched { body, code, call: Some(call) }.boxed_unsync()))
            }
        }
    }

    async fn unary(&self, method: &Method, request: Request<Incoming>) -> hyper::Result<Response<Payload>> {
        let (parts, body) = request.into_parts();
        let (body, trailers) = whole(body).await?;
        let shown = message::decode(&method.input, body.clone());
        let shown = shown.map_or(Value::Null, |message| self.shared.mask.show(&message));
        let mut call = self.called(&method.name, shown).await;

        let plan = self.shared.script.plan(&method.name);
        if let Some(code) = self.play(&plan.before, &mut call).await {
            return Ok(call.refuse(code));
        }
        let (parts, body) =
            self.send(Request::from_parts(parts, payload(body, trailers))).await?.into_parts();
        let (mut body, trailers) = match whole(body).await {
            Ok(answer) => answer,
            Err(error) => return self.failed(error).await,
        };
        if let Some(code) = self.play(&plan.after, &mut call).await {
            return Ok(call.refuse(code));
        }

        let status = trailers.as_ref().and_then(|trailers| trailers.get("grpc-status"));
        let code = code_of(status.or_else(|| parts.headers.get("grpc-status")));
        let mut answer = message::decode(&method.output, body.clone());
        for act in &plan.after {
            if let (Act::Alter(alteration), Some(message)) = (act, &mut answer) {
                alteration.apply(message);
                body = message::encode(message);
                call.fault = Some(format!("{alteration:?}"));
            }
        }
        let shown = answer.map_or(Value::Null, |message| self.shared.mask.show(&message));
        call.end(Some(code), shown);
        Ok(Response::from_parts(parts, payload(body, trailers)))
    }

    /// Do what the script wants done at this point; a code is to be answered.
    async fn play(&self, acts: &[Act], call: &mut Call) -> Option<Code> {
        for act in acts {
            call.fault = Some(format!("{act:?}"));
            match act {
                Act::Code(code) => return Some(*code),
                Act::DelayMs(milliseconds) => tokio::time::sleep(Duration::from_millis(*milliseconds)).await,
                Act::Hang => std::future::pending().await,
                Act::Drop => self.break_off().await,
                Act::Alter(_) => {}
            }
        }
        None
    }

    async fn send(&self, request: Request<Payload>) -> hyper::Result<Response<Incoming>> {
        match self.sender.clone().send_request(request).await {
            Ok(response) => Ok(response),
            Err(error) => self.failed(error).await,
        }
    }

    /// A reset of this one call is passed on; anything else means that the plugin is gone, and the CO's connection with it.
    async fn failed<T>(&self, error: hyper::Error) -> hyper::Result<T> {
        let cause = error.source().and_then(|cause| cause.downcast_ref::<h2::Error>());
        match cause.is_some_and(|cause| cause.is_reset() && cause.is_remote()) {
            true => Err(error),
            false => self.break_off().await,
        }
    }

    async fn break_off<T>(&self) -> T {
        self.broken.notify_one();
        std::future::pending().await
    }

    /// Writes down a call that is to be forwarded. Never returns if the connection has ended: the plugin does not get the call.
    async fn called(&self, rpc: &str, request: Value) -> Call {
        if self.closed.load(Ordering::Relaxed) {
            return self.break_off().await;
        }
        let call = self.shared.log.called(self.number, rpc, request);
        Call { shared: Arc::clone(&self.shared), call, fault: None, ended: false }
    }
}

/// A call in flight. It is dropped when the CO gives up or a connection breaks: then it ends without a code.
struct Call {
    shared: Arc<Shared>,
    call: u64,
    fault: Option<String>,
    ended: bool,
}

impl Call {
    fn end(mut self, code: Option<Code>, response: Value) {
        self.write(code, response);
    }

    fn refuse(self, code: Code) -> Response<Payload> {
        let mut response = Response::new(payload(Bytes::new(), None));
        let headers = response.headers_mut();
        headers.insert("content-type", HeaderValue::from_static("application/grpc"));
        headers.insert("grpc-status", HeaderValue::from(code.0));
        headers.insert("grpc-message", HeaderValue::from_static("as%20the%20witness'%20script%20says"));
        self.end(Some(code), Value::Null);
        response
    }

    fn write(&mut self, code: Option<Code>, response: Value) {
        self.ended = true;
        let code = code.map(|code| code.name().to_owned());
        self.shared.log.write(Event::Ended { call: self.call, code, response, fault: self.fault.take() });
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        if !self.ended {
            self.write(None, Value::Null);
        }
    }
}

/// An answer that streams through; its end is the call's end.
struct Watched {
    body: Incoming,
    /// From the headers, where there are no trailers.
    code: Option<HeaderValue>,
    call: Option<Call>,
}

impl Body for Watched {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<hyper::Result<Frame<Bytes>>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        let end = match &frame {
            None => Some(code_of(self.code.as_ref())),
            Some(Ok(frame)) => frame.trailers_ref().map(|trailers| code_of(trailers.get("grpc-status"))),
            Some(Err(_)) => None,
        };
        if let (Some(code), Some(call)) = (end, end.and_then(|_| self.call.take())) {
            call.end(Some(code), Value::Null);
        }
        Poll::Ready(frame)
    }
}

fn code_of(status: Option<&HeaderValue>) -> Code {
    Code::from_wire(status.map_or(b"", HeaderValue::as_bytes))
}

async fn whole(body: Incoming) -> hyper::Result<(Bytes, Option<HeaderMap>)> {
    let collected = body.collect().await?;
    let trailers = collected.trailers().cloned();
    Ok((collected.to_bytes(), trailers))
}

fn payload(body: Bytes, trailers: Option<HeaderMap>) -> Payload {
    let body = Full::new(body).map_err(|never| match never {});
    match trailers {
        Some(trailers) => body.with_trailers(std::future::ready(Some(Ok(trailers)))).boxed_unsync(),
        None => body.boxed_unsync(),
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use super::*;

    /// The report would take the call for one of a CO that it does not know.
    #[tokio::test]
    async fn call_after_the_end_is_not_logged() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("log.jsonl");
        let log = Log::create(&path).unwrap();
        let shared = Arc::new(Shared { log, script: Script::default(), mask: Mask::default() });
        let (near, _far) = tokio::io::duplex(1 << 16);
        let handshake = client::handshake::<_, _, Payload>(TokioExecutor::new(), TokioIo::new(near));
        let (sender, _upstream) = handshake.await.unwrap();
        let closed = Arc::new(AtomicBool::new(true));
        let broken = Notify::new();
        let connection = Connection { shared, number: 1, sender, broken, closed: Arc::clone(&closed) };
        let mut context = Context::from_waker(Waker::noop());
        assert!(pin!(connection.called("Probe", Value::Null)).poll(&mut context).is_pending());
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "");
        closed.store(false, Ordering::Relaxed);
        drop(connection.called("Probe", Value::Null).await);
        assert_eq!(std::fs::read_to_string(&path).unwrap().lines().count(), 2, "begun and ended");
    }
}
