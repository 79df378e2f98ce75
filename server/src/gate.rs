//! What each call passes before its message is read: who calls, and whether the caller has a place.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tonic::Status;
use tonic::body::Body;
use tonic::codegen::http::{Request, Response};
use tower::{Layer, Service};

use crate::cluster::Cluster;
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
        let entered = cluster
            .caller_by(request.extensions())
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
                    answered
                })
            }
            Err(error) => Box::pin(std::future::ready(Ok(Status::from(error).into_http()))),
        }
    }
}
