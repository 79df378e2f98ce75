//! What the witness does not know goes through as it comes: a service that is not CSI's, an RPC of CSI that streams, bytes
//! that are no message.

use std::convert::Infallible;

use bytes::Bytes;
use http::{HeaderMap, Request, Response};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use crate::world::World;

/// Gives back what comes, while it comes, and ends it with trailers; resets the calls of one path.
async fn echo(
    request: Request<Incoming>,
) -> Result<Response<impl hyper::body::Body<Data = Bytes, Error = hyper::Error>>, Refused> {
    if request.uri().path() == RESET {
        return Err(Refused);
    }
    let mut response = Response::builder();
    response.headers_mut().unwrap().clone_from(request.headers());
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", "15".parse().unwrap());
    trailers.insert("x-end", "yes".parse().unwrap());
    Ok(response.body(request.into_body().with_trailers(async { Some(Ok(trailers)) })).unwrap())
}

const RESET: &str = "/example.Echo/Reset";

#[derive(Debug)]
struct Refused;

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("no")
    }
}

impl std::error::Error for Refused {}

#[tokio::test]
async fn unknown_and_streaming_calls_pass_through() {
    let mut world = World::new("");
    world.kill_plugin();
    let listener = UnixListener::bind(world.at("csi.sock")).unwrap();
    tokio::spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        let server = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
        server.serve_connection(TokioIo::new(stream), service_fn(echo)).await
    });
    let stream = TokioIo::new(UnixStream::connect(world.at("co.sock")).await.unwrap());
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), stream).await.unwrap();
    tokio::spawn(connection);

    // A reset of one call is that, and not the end of the connection.
    let request = Request::post(format!("http://localhost{RESET}"));
    let body = StreamBody::new(ReceiverStream::new(mpsc::channel(1).1));
    let error = sender.send_request(request.body(body).unwrap()).await.unwrap_err();
    let cause = std::error::Error::source(&error).and_then(|cause| cause.downcast_ref::<h2::Error>());
    assert!(cause.is_some_and(h2::Error::is_reset), "{error:?}");

    for (path, rpc) in [
        ("/example.Echo/Any", "/example.Echo/Any"),
        ("/csi.v1.SnapshotMetadata/GetMetadataDelta", "GetMetadataDelta"),
    ] {
        let (send, sent) = mpsc::channel(1);
        let body = StreamBody::new(ReceiverStream::new(sent));
        let request = Request::post(format!("http://localhost{path}")).header("x-asks", "me");
        let answer = tokio::spawn(sender.send_request(request.body(body).unwrap()));
        let data = |bytes: &'static [u8]| Ok::<_, Infallible>(Frame::data(Bytes::from_static(bytes)));
        send.send(data(b"\xff\x00 no message")).await.unwrap();
        let answer = answer.await.unwrap().unwrap();
        assert_eq!(answer.headers()["x-asks"], "me");
        let mut body = answer.into_body();
        // The answer to the first bytes is there before the next are sent.
        assert_eq!(*body.frame().await.unwrap().unwrap().data_ref().unwrap(), b"\xff\x00 no message"[..]);
        send.send(data(b"more")).await.unwrap();
        assert_eq!(*body.frame().await.unwrap().unwrap().data_ref().unwrap(), b"more"[..]);
        drop(send);
        let trailers = body.frame().await.unwrap().unwrap().into_trailers().unwrap();
        assert_eq!(
            (&trailers["grpc-status"], &trailers["x-end"]),
            (&"15".parse().unwrap(), &"yes".parse().unwrap())
        );
        world.until_log(&format!(r#""rpc":"{rpc}"}}"#)).await;
    }
    let ends = world.log().matches(r#""code":"DATA_LOSS""#).count();
    assert_eq!(ends, 2, "{}", world.log());
}
