//! What each call passes before its message is read: who calls, and whether the caller has a place.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::time::Instant;
use tonic::body::Body;
use tonic::codegen::http::{Request, Response};
use tonic::{Code, Status};
use tower::{Layer, Service};

use crate::cluster::Cluster;
use crate::metrics::Metrics;
use crate::places::{Kept, Places};

/// Makes the gate of a server.
#[derive(Clone)]
pub struct GateLayer {
    pub cluster: Arc<Cluster>,
    pub places: Arc<Places>,
}

impl<S> Layer<S> for GateLayer {
    type Service = Gate<S>;

    fn layer(&self, inner: S) -> Gate<S> {
        Gate { of: self.clone(), inner }
    }
}

/// The calls behind the gate.
#[derive(Clone)]
pub struct Gate<S> {
    of: GateLayer,
    inner: S,
}

impl<S> Service<Request<Body>> for Gate<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        let GateLayer { cluster, places } = &self.of;
        let counted = Counted::new(cluster.metrics.clone(), request.uri().path());
        let entered = cluster
            .caller_by(request.extensions())
            .inspect_err(|_| cluster.metrics.refused_by("certificate"))
            .and_then(|caller| Ok((places.enter(&caller, Kept::Call)?, caller)));
        match entered {
            Ok((place, caller)) => {
                request.extensions_mut().insert(caller);
                // The one that is ready makes the call.
                let inner = self.inner.clone();
                let mut ready = std::mem::replace(&mut self.inner, inner);
                Box::pin(async move {
                    let answered = ready.call(request).await;
                    drop(place);
                    counted.end(answered.as_ref().map_or(Code::Internal, code_of));
                    answered
                })
            }
            Err(error) => {
                let status = Status::from(error);
                counted.end(status.code());
                Box::pin(std::future::ready(Ok(status.into_http())))
            }
        }
    }
}

/// A call that is counted when it has ended. Its caller may give it up before that.
struct Counted {
    metrics: Metrics,
    path: String,
    code: Code,
    begun: Instant,
}

impl Counted {
    fn new(metrics: Metrics, path: &str) -> Counted {
        Counted { metrics, path: path.to_owned(), code: Code::Cancelled, begun: Instant::now() }
    }

    /// Counts the call, which has ended with this code.
    fn end(mut self, code: Code) {
        self.code = code;
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.metrics.requested(&self.path, self.code, self.begun.elapsed());
    }
}

/// Returns the code of an answer. The answer to a stream has none yet, and counts as OK.
fn code_of(answer: &Response<Body>) -> Code {
    match answer.extensions().get::<Status>() {
        Some(status) => status.code(),
        None => Status::from_header_map(answer.headers()).map_or(Code::Ok, |status| status.code()),
    }
}
