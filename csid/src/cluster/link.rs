//! Clients of servers: HTTP/2 over the sockets of csid-link.

use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::time::Duration;

use csi_proto::cluster::CALL;
use csi_proto::cluster::v1::cluster_client::ClusterClient;
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint, Uri};

/// How often a quiet connection is probed, and how long the answer may take.
const PROBE: Duration = Duration::from_secs(10);
/// The limit of an answer's headers, in bytes. An error has 2 KiB of text, and 16 holders.
const HEADERS: u32 = 32 * 1024;
/// The limit of a server's message, in bytes. csid refuses a controller call above [`CALL`], and the session goes on. A message of rows
/// without content needs about 100 times its size in memory.
const MESSAGE: usize = 2 * CALL;
/// The most servers, as csid-link has it.
const SERVERS: usize = 16;

/// Returns a client of the server of this socket. It connects at the first call.
pub(super) fn open(socket: &Path) -> ClusterClient<Channel> {
    let socket = socket.to_owned();
    let connector = tower::service_fn(move |_: Uri| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    });
    let channel = Endpoint::from_static("http://csid-link")
        .http2_max_header_list_size(HEADERS)
        .http2_keep_alive_interval(PROBE)
        .keep_alive_timeout(PROBE)
        .keep_alive_while_idle(true)
        .connect_with_connector_lazy(connector);
    ClusterClient::new(channel).max_decoding_message_size(MESSAGE)
}

/// Returns the names of the sockets in a directory, each of which is HOST:PORT of a server. Each node has an order of its own, so
/// that the nodes of a cluster are spread over its servers.
pub(super) fn servers(directory: &Path, node: &str) -> std::io::Result<Vec<String>> {
    let mut servers = Vec::new();
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        if let Ok(name) = entry.file_name().into_string()
            && is_server(&name)
            && entry.file_type()?.is_socket()
        {
            servers.push(name);
        }
    }
    let place = |server: &String| BuildHasherDefault::<DefaultHasher>::default().hash_one((node, server));
    servers.sort_by_key(place);
    servers.truncate(SERVERS);
    Ok(servers)
}

/// Returns whether a name of a socket is HOST:PORT, as csid-link makes them.
fn is_server(name: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-.:[]".contains(&byte);
    name.contains(':') && name.len() <= 80 && name.bytes().all(is_plain)
}
