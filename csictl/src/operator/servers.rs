//! The servers, asked one after the other.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use csi_proto::cluster::v1::admin_client::AdminClient;
use csid_link::Far;
use hyper_util::rt::TokioIo;
use serde_json::json;
use tonic::Status;
use tonic::transport::{Channel, Endpoint};

use super::connection::{Broken, Connection};
use super::failure::{Failed, OperatorError, Skipped, read, with_sources};
use super::file;
use crate::output::{json_line, plain};

/// How long a server may take to answer a call. It gives up a call of its own after it was without etcd for 10 s.
const ANSWER: Duration = Duration::from_secs(20);

/// The servers of an operator's cluster.
pub struct Servers {
    cluster: String,
    servers: Vec<Far>,
    /// Whether warnings are JSON.
    json: bool,
}

impl Servers {
    /// Reads the operator's file: the given one, or that of the environment, or the default.
    pub fn open(given: Option<PathBuf>, json: bool) -> anyhow::Result<Servers> {
        let operator = file::read(&file::place(given)?)?;
        let cluster = operator.client.identity.cluster;
        let config = Arc::new(operator.client.config);
        let servers: Result<Vec<Far>, _> =
            operator.servers.iter().map(|server| Far::new(server, config.clone())).collect();
        Ok(Servers { cluster, servers: servers?, json })
    }

    /// Asks one server after the other until one decides the call, and warns of those that did not. `what` says what a call changes.
    /// `None`: it changes nothing.
    pub async fn ask<T>(
        &self,
        what: Option<&str>,
        call: impl AsyncFn(AdminClient<Channel>) -> Result<T, Status>,
    ) -> anyhow::Result<T> {
        let (mut skipped, mut unknown) = (Vec::new(), false);
        for server in &self.servers {
            let why = match ask_one(server, &call).await {
                Ok(answer) => {
                    self.warn(&skipped);
                    return Ok(answer);
                }
                Err(Failed::Refused(error)) => {
                    self.warn(&skipped);
                    return Err(error.into());
                }
                Err(Failed::NotDone(why)) => why,
                Err(Failed::Unknown(why)) => {
                    unknown = true;
                    why
                }
            };
            skipped.push(Skipped { server: server.server().to_owned(), why });
        }
        match what {
            Some(what) if unknown => Err(OperatorError::Unknown { what: what.to_owned(), skipped }.into()),
            _ => Err(OperatorError::NoServer { cluster: self.cluster.clone(), skipped }.into()),
        }
    }

    fn warn(&self, skipped: &[Skipped]) {
        for Skipped { server, why } in skipped {
            match self.json {
                true => eprintln!("{}", json_line(&json!({ "warning": why, "server": server }))),
                false => eprintln!("csictl: {}: {}", plain(server), plain(why)),
            }
        }
    }
}

async fn ask_one<T>(
    server: &Far,
    call: &impl AsyncFn(AdminClient<Channel>) -> Result<T, Status>,
) -> Result<T, Failed> {
    let not_reached = |error: &dyn std::error::Error| {
        Failed::NotDone(format!("the server was not reached: {}", with_sources(error.to_string(), error)))
    };
    let stream = server.connect().await.map_err(|error| not_reached(&error))?;
    let broken = Broken::default();
    // One connection is enough for a command. The one call of it is sent on it, or not at all.
    let mut stream = Some(TokioIo::new(Connection::new(stream, broken.clone())));
    let connector = tower::service_fn(move |_| {
        let stream = stream.take().ok_or_else(|| io::Error::other("the connection has ended"));
        async move { stream }
    });
    let answering = async {
        let endpoint = Endpoint::from_static("http://csid-server");
        let channel =
            endpoint.connect_with_connector(connector).await.map_err(|error| not_reached(&error))?;
        call(AdminClient::new(channel))
            .await
            .map_err(|status| read(&status, broken.get().map(String::as_str)))
    };
    let late = || Failed::Unknown(format!("no answer within {} s", ANSWER.as_secs()));
    tokio::time::timeout(ANSWER, answering).await.map_err(|_| late())?
}
