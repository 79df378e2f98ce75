//! The members of etcd, and which of them is asked next.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use tonic::transport::{Certificate, ClientTlsConfig, Endpoint, Identity};

use crate::connection::{self, Connection};
use crate::error::EtcdError;

/// The time in which a connection to a member is made.
const CONNECT: Duration = Duration::from_secs(2);
/// The interval of pings on a connection, so that a watch notices a member that has stopped. etcd ends a connection with more than
/// one ping in 5 s.
const PING: Duration = Duration::from_secs(10);
const PING_ANSWER: Duration = Duration::from_secs(5);

/// The members of etcd and the keys that csid has there.
#[derive(Clone, Debug)]
pub struct EtcdConfig {
    /// `https://HOST:PORT` of each member, or `http://HOST:PORT` without `tls`.
    pub endpoints: Vec<String>,
    /// `None`: the members have no TLS.
    pub tls: Option<EtcdTls>,
    /// Begins and ends with a slash.
    pub prefix: String,
    pub timing: Timing,
}

/// The files of a client of etcd, as PEM.
#[derive(Clone)]
pub struct EtcdTls {
    /// The authority of the members' certificates.
    pub ca: Vec<u8>,
    pub certificate: Vec<u8>,
    pub key: Vec<u8>,
}

/// Shows no key.
impl fmt::Debug for EtcdTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("EtcdTls")
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// How long each member has to answer a transaction or a short read when it is asked first. A member that loses its leader drops a
    /// request without a word, and answers it 7 s later.
    pub first_answer: Duration,
    /// How long a member has to answer anything else. Also what each member has when none has answered in the first time, until a write is fast.
    pub answer: Duration,
    /// How long a request is repeated, at one member after the other.
    pub request: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Timing {
            first_answer: Duration::from_secs(3),
            answer: Duration::from_secs(5),
            request: Duration::from_secs(30),
        }
    }
}

pub(crate) struct Members {
    members: Vec<Member>,
    /// The member that answered last. All requests use it until it fails.
    current: AtomicUsize,
    /// Whether no member answered a request in the short time, and no write was fast since.
    slow: AtomicBool,
}

pub(crate) struct Member {
    pub endpoint: String,
    pub channel: Connection,
}

impl Members {
    pub fn new(config: &EtcdConfig) -> Result<Self, EtcdError> {
        let member = |endpoint: &String| member(endpoint, config.tls.as_ref());
        let members: Vec<Member> = config.endpoints.iter().map(member).collect::<Result<_, _>>()?;
        match members.is_empty() {
            true => {
                Err(EtcdError::Endpoint { endpoint: String::new(), why: "no endpoint is configured".into() })
            }
            false => Ok(Members { members, current: AtomicUsize::new(0), slow: AtomicBool::new(false) }),
        }
    }

    /// Takes connections that are there.
    #[cfg(feature = "double")]
    pub fn at(connections: Vec<Connection>) -> Self {
        let member = |(n, channel)| Member { endpoint: format!("double {n}"), channel };
        Members {
            members: connections.into_iter().enumerate().map(member).collect(),
            current: AtomicUsize::new(0),
            slow: AtomicBool::new(false),
        }
    }

    pub fn count(&self) -> usize {
        self.members.len()
    }

    /// Returns the member to ask, and its place.
    pub fn current(&self) -> (usize, &Member) {
        let at = self.current.load(Ordering::Relaxed);
        (at, &self.members[at])
    }

    /// Returns the member at a place.
    pub fn member(&self, at: usize) -> &Member {
        &self.members[at]
    }

    /// Has the member at `at` asked first from now on.
    pub fn turn_to(&self, at: usize) {
        self.current.store(at, Ordering::Relaxed);
    }

    pub fn are_slow(&self) -> bool {
        self.slow.load(Ordering::Relaxed)
    }

    pub fn set_slow(&self, slow: bool) {
        self.slow.store(slow, Ordering::Relaxed);
    }

    /// Has the next member asked in place of the one at `at`.
    pub fn leave(&self, at: usize) {
        let next = (at + 1) % self.members.len();
        // Another request may have left it already.
        let _ = self.current.compare_exchange(at, next, Ordering::Relaxed, Ordering::Relaxed);
    }
}

/// The one place that knows how a member is reached.
fn member(endpoint: &str, tls: Option<&EtcdTls>) -> Result<Member, EtcdError> {
    let refused = |why: String| EtcdError::Endpoint { endpoint: endpoint.to_owned(), why };
    let scheme = if tls.is_some() { "https://" } else { "http://" };
    if !endpoint.starts_with(scheme) {
        let has = if tls.is_some() { "with" } else { "without" };
        return Err(refused(format!("{has} a certificate it has to begin with {scheme}")));
    }
    let mut new = Endpoint::from_shared(endpoint.to_owned()).map_err(|error| refused(error.to_string()))?;
    if let Some(EtcdTls { ca, certificate, key }) = tls {
        let tls = ClientTlsConfig::new()
            .ca_certificate(Certificate::from_pem(ca))
            .identity(Identity::from_pem(certificate, key));
        new = new.tls_config(tls).map_err(|error| refused(error.to_string()))?;
    }
    let channel = new
        .connect_timeout(CONNECT)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(PING)
        .keep_alive_timeout(PING_ANSWER)
        .keep_alive_while_idle(true)
        .connect_lazy();
    Ok(Member { endpoint: endpoint.to_owned(), channel: connection::of(channel) })
}
