//! The channel of one RPC. It limits the answer, and keeps the status that the plugin sent.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::task::{Context, Poll, ready};

use csi_proto::csi::v1::controller_client::ControllerClient;
use csi_proto::csi::v1::identity_client::IdentityClient;
use csi_proto::csi::v1::node_client::NodeClient;
use http::HeaderMap;
use hyper::body::{Bytes, Frame, SizeHint};
use tonic::body::Body;
use tonic::transport::Channel;
use tonic::{Code, Status};
use tower::Service;

/// The longest answer that csid reads. A driver without paging lists 50,000 volumes in it. gRPC's usual limit is 4 MiB. One answer may
/// take this much memory, so it is no larger.
const ANSWER_BYTES: usize = 16 << 20;

/// No status has come.
const NONE: i32 = -1;

/// The status that the plugin sent for one RPC.
///
/// tonic makes statuses of its own for an answer that it cannot read: OUT_OF_RANGE for one that is too long, UNIMPLEMENTED for an
/// unknown encoding. They have neither a source nor a mark. So csid looks for `grpc-status` in the headers and trailers itself.
#[derive(Clone)]
pub(super) struct SentStatus(Arc<AtomicI32>);

impl SentStatus {
    /// Returns whether the plugin sent this status.
    pub fn is(&self, status: &Status) -> bool {
        self.0.load(Ordering::Acquire) == i32::from(status.code())
    }

    fn note(&self, headers: &HeaderMap) {
        if let Some(code) = headers.get("grpc-status") {
            self.0.store(Code::from_bytes(code.as_bytes()).into(), Ordering::Release);
        }
    }
}

/// The channel of one RPC to a plugin.
#[derive(Clone)]
pub(super) struct Wire {
    channel: Channel,
    sent: SentStatus,
}

impl Wire {
    pub fn of(channel: Channel) -> Self {
        Wire { channel, sent: SentStatus(Arc::new(AtomicI32::new(NONE))) }
    }

    /// Returns the status that the plugin sends for the RPC.
    pub fn sent_status(&self) -> SentStatus {
        self.sent.clone()
    }

    pub fn identity(self) -> IdentityClient<Self> {
        IdentityClient::new(self).max_decoding_message_size(ANSWER_BYTES)
    }

    pub fn node(self) -> NodeClient<Self> {
        NodeClient::new(self).max_decoding_message_size(ANSWER_BYTES)
    }

    pub fn controller(self) -> ControllerClient<Self> {
        ControllerClient::new(self).max_decoding_message_size(ANSWER_BYTES)
    }
}

impl Service<http::Request<Body>> for Wire {
    type Response = http::Response<AnswerBody>;
    type Error = tonic::transport::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.channel.poll_ready(cx)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let (answering, sent) = (self.channel.call(request), self.sent.clone());
        Box::pin(async move {
            let response = answering.await?;
            sent.note(response.headers());
            Ok(response.map(|body| AnswerBody { body, sent }))
        })
    }
}

/// The body of an answer, whose trailers have the status.
pub(super) struct AnswerBody {
    body: Body,
    sent: SentStatus,
}

impl hyper::body::Body for AnswerBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        if let Some(Ok(frame)) = &frame
            && let Some(trailers) = frame.trailers_ref()
        {
            self.sent.note(trailers);
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
