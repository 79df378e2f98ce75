//! HTTP on a Unix socket, as the engines speak it: one request a connection.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderValue, Method, Response, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;

use crate::driver::Driver;
use crate::protocol::{Answer, Body, Request};

const CONTENT: &str = "application/vnd.docker.plugins.v1.1+json";
/// Requests at once. Further connections wait in the socket's queue.
pub const AT_ONCE: u32 = 64;
/// The limit of a body in bytes.
const BYTES: usize = 64 * 1024;
/// The time limit of a request's header, and of its body.
const TO_ASK: Duration = Duration::from_secs(10);

/// Answers each connection. Each one that is open holds a place.
pub async fn serve(listener: &UnixListener, driver: Arc<Driver>, places: Arc<Semaphore>) {
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, _)) => {
                let driver = Arc::clone(&driver);
                tokio::spawn(async move {
                    // A peer that goes away is no error.
                    let _ = connection(stream, driver).await;
                    drop(place);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "a connection of an engine was not accepted");
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        }
    }
}

async fn connection(stream: UnixStream, driver: Arc<Driver>) -> hyper::Result<()> {
    let answer = service_fn(move |request| {
        let driver = Arc::clone(&driver);
        async move { Ok::<_, Infallible>(answer(request, &driver).await) }
    });
    // An engine that reuses a connection could send Mount while this end closes it.
    http1::Builder::new()
        .keep_alive(false)
        .timer(TokioTimer::new())
        .header_read_timeout(TO_ASK)
        .serve_connection(TokioIo::new(stream), answer)
        .await
}

async fn answer(asked: http::Request<Incoming>, driver: &Arc<Driver>) -> Response<Full<Bytes>> {
    let path = asked.uri().path().to_owned();
    let Some(request) = Request::at(&path) else {
        return response(StatusCode::NOT_FOUND, &Answer::error(format!("there is no {path}")));
    };
    if asked.method() != Method::POST {
        return response(StatusCode::METHOD_NOT_ALLOWED, &Answer::error("requests are POST".to_owned()));
    }
    let body = tokio::time::timeout(TO_ASK, Limited::new(asked.into_body(), BYTES).collect()).await;
    let text = match body {
        Ok(Ok(body)) => body.to_bytes(),
        Ok(Err(error)) => return bad_request(format!("the body cannot be read: {error}")),
        Err(_) => return bad_request(format!("the body did not arrive within {} s", TO_ASK.as_secs())),
    };
    let body = match text.is_empty() {
        true => Body::default(),
        false => match serde_json::from_slice(&text) {
            Ok(body) => body,
            Err(error) => return bad_request(format!("the body is not a request: {error}")),
        },
    };
    if request.needs_name() && body.name.is_empty() {
        return bad_request("the body names no volume".to_owned());
    }
    let name = body.name.clone();
    match driver.answer(request, body).await {
        Ok(answer) => response(StatusCode::OK, &answer),
        // With 200 Podman regards an error as a success.
        Err(failure) => {
            tracing::info!(path, volume = name, %failure, "refused");
            response(StatusCode::INTERNAL_SERVER_ERROR, &Answer::error(failure.to_string()))
        }
    }
}

fn bad_request(text: String) -> Response<Full<Bytes>> {
    response(StatusCode::BAD_REQUEST, &Answer::error(text))
}

fn response(status: StatusCode, answer: &Answer) -> Response<Full<Bytes>> {
    let text = serde_json::to_vec(answer).unwrap_or_else(|_| br#"{"Err":"the answer is not JSON"}"#.to_vec());
    let mut response = Response::new(Full::new(text.into()));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(CONTENT));
    response
}
