//! The members of etcd, and which of them is asked next.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tonic::transport::{Channel, Endpoint};

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
    /// `http://HOST:PORT` of each member. TLS is not supported yet.
    pub endpoints: Vec<String>,
    /// Begins and ends with a slash.
    pub prefix: String,
    pub timing: Timing,
}

#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// How long one member has to answer.
    pub answer: Duration,
    /// How long a request is repeated, at one member after the other.
    pub request: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Timing { answer: Duration::from_secs(5), request: Duration::from_secs(30) }
    }
}

pub(crate) struct Members {
    members: Vec<Member>,
    /// The member that answered last. All requests use it until it fails.
    current: AtomicUsize,
}

pub(crate) struct Member {
    pub endpoint: String,
    pub channel: Channel,
}

impl Members {
    pub fn new(endpoints: &[String]) -> Result<Self, EtcdError> {
        let members: Vec<Member> =
            endpoints.iter().map(|endpoint| member(endpoint)).collect::<Result<_, _>>()?;
        match members.is_empty() {
            true => {
                Err(EtcdError::Endpoint { endpoint: String::new(), why: "no endpoint is configured".into() })
            }
            false => Ok(Members { members, current: AtomicUsize::new(0) }),
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

    /// Has the next member asked in place of the one at `at`.
    pub fn leave(&self, at: usize) {
        let next = (at + 1) % self.members.len();
        // Another request may have left it already.
        let _ = self.current.compare_exchange(at, next, Ordering::Relaxed, Ordering::Relaxed);
    }
}

/// The one place that knows how a member is reached.
fn member(endpoint: &str) -> Result<Member, EtcdError> {
    let refused = |why: String| EtcdError::Endpoint { endpoint: endpoint.to_owned(), why };
    if !endpoint.starts_with("http://") {
        return Err(refused("only http:// is supported".into()));
    }
    let channel = Endpoint::from_shared(endpoint.to_owned())
        .map_err(|error| refused(error.to_string()))?
        .connect_timeout(CONNECT)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(PING)
        .keep_alive_timeout(PING_ANSWER)
        .keep_alive_while_idle(true)
        .connect_lazy();
    Ok(Member { endpoint: endpoint.to_owned(), channel })
}
