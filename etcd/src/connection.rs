//! The connection to a member: a channel, or for tests a member in memory.

use tonic::transport::Channel;

/// Calls of a member.
pub type Connection = tower::util::BoxCloneSyncService<
    tonic::codegen::http::Request<tonic::body::Body>,
    tonic::codegen::http::Response<tonic::body::Body>,
    tonic::Status,
>;

/// Returns the connection of a channel.
pub fn of(channel: Channel) -> Connection {
    let status = |error: tonic::transport::Error| tonic::Status::from_error(error.into());
    let service = tower::ServiceBuilder::new().map_err(status).service(channel);
    Connection::new(service)
}
