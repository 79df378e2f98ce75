//! The servers, asked one after the other.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use csid_link::Far;
use hyper_util::rt::TokioIo;
use serde_json::json;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status, Streaming};

use super::connection::{Broken, Connection};
use super::failure::{Failed, OperatorError, Skipped, read, with_sources};
use super::file;
use crate::output::{json_line, plain};

/// How long a server may take to answer a call, and to send the next page of a list. It gives up a call of its own after it was without etcd for 10 s.
pub const ANSWER: Duration = Duration::from_secs(20);

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
    pub async fn call<T>(
        &self,
        what: Option<&str>,
        call: impl AsyncFn(Channel) -> Result<T, Status>,
    ) -> anyhow::Result<T> {
        self.call_within(ANSWER, what, call).await
    }

    /// Asks the servers as [`Servers::call`] does, with another limit of time for each.
    pub async fn call_within<T>(
        &self,
        limit: Duration,
        what: Option<&str>,
        call: impl AsyncFn(Channel) -> Result<T, Status>,
    ) -> anyhow::Result<T> {
        let (mut skipped, mut unknown) = (Vec::new(), false);
        for server in &self.servers {
            let why = match ask_one(server, limit, &call).await {
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

    /// Reads the next page of a list. `None`: there are no more.
    pub async fn page<P>(pages: &mut Streaming<P>) -> Result<Option<P>, Status> {
        let late = |_| {
            let text = format!("no page of the list came within {} s", ANSWER.as_secs());
            Status::new(Code::DeadlineExceeded, text)
        };
        tokio::time::timeout(ANSWER, pages.message()).await.map_err(late)?
    }

    /// Warns of what a list does not have.
    pub fn warn_of_list(&self, text: &str) {
        match self.json {
            true => eprintln!("{}", json_line(&json!({ "warning": text }))),
            false => eprintln!("csictl: {}", plain(text)),
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

/// The volumes that a list should have, and that the servers cannot read.
#[derive(Default)]
pub struct LeftOut {
    count: u64,
    /// NAMESPACE/VOLUME of the first one.
    first: String,
}

impl LeftOut {
    /// Adds what a page leaves out.
    pub fn add(&mut self, count: u64, first: String) {
        if self.first.is_empty() {
            self.first = first;
        }
        self.count = self.count.saturating_add(count);
    }

    pub fn warn(&self, servers: &Servers) {
        let LeftOut { count, first } = self;
        let more = match count {
            0 => return,
            1 => String::new(),
            count => format!(" and {} more", count - 1),
        };
        servers.warn_of_list(&format!(
            "volumes that the servers cannot read in etcd are left out: {first}{more}"
        ));
    }
}

async fn ask_one<T>(
    server: &Far,
    limit: Duration,
    call: &impl AsyncFn(Channel) -> Result<T, Status>,
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
        call(channel).await.map_err(|status| read(&status, broken.get().map(String::as_str)))
    };
    let late = || Failed::Unknown(format!("no answer within {} s", limit.as_secs()));
    tokio::time::timeout(limit, answering).await.map_err(|_| late())?
}
