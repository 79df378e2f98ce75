//! A server's errors as csid has them.

use csi_proto::cluster::TRAILER;
use csi_proto::cluster::v1::Failure;
use prost::Message;
use tonic::{Code, Status};

use crate::cluster::rpcs;
use crate::error::{Error, Kind, presentable};
use crate::volume::servers::ServerFailure;

/// The limit of a server's message, in bytes.
const MESSAGE: usize = 2048;
/// The limits of holders: their number, and the bytes of each.
const HOLDERS: usize = 16;
const HOLDER: usize = 256;

/// Returns what a failed call says of its effect.
pub(super) fn read(status: &Status) -> ServerFailure {
    let trailer = status.metadata().get_bin(TRAILER).and_then(|value| value.to_bytes().ok());
    let failure = trailer.and_then(|bytes| Failure::decode(bytes).ok());
    let Some(Failure { kind, message, retryable, holders, queued, changed, rpc, code, .. }) = failure else {
        let message = presentable(status.message(), MESSAGE);
        return match status.code() {
            Code::Unimplemented => {
                let text = format!("this cluster's server does not know the call: {message}");
                ServerFailure::Refused(Error::new(Kind::NotSupported, text))
            }
            _ => ServerFailure::Unknown(unavailable(format!(
                "the call to the cluster's server failed: {message}"
            ))),
        };
    };
    let kind = Kind::read(&kind).unwrap_or(Kind::Internal);
    let error = Error::new(kind, presentable(&message, MESSAGE)).with(|details| {
        details.retryable = retryable;
        details.rpc = rpcs::ALL.into_iter().find(|known| *known == rpc);
        details.grpc_code = code.filter(|_| details.rpc.is_some());
        details.holders = holders.iter().take(HOLDERS).map(|holder| presentable(holder, HOLDER)).collect();
    });
    match kind {
        // The server may have lost etcd after it sent the change, or goes on with what it was asked for.
        Kind::Unavailable | Kind::TimedOut => ServerFailure::Unknown(error),
        Kind::ClaimConflict if queued => ServerFailure::Queued(error),
        _ if changed => ServerFailure::Changed(error),
        _ => ServerFailure::Refused(error),
    }
}

/// Makes the error of a call for which there is no server now.
pub(super) fn unavailable(text: impl Into<String>) -> Error {
    Error::new(Kind::Unavailable, text)
}
