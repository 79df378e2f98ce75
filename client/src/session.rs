//! A connection that outlives csid. State: the connection of now.

use std::{
    fs::File,
    io::{self, Read},
    time::{Duration, Instant},
};

use tokio::sync::Mutex;

use crate::{
    client::{Client, Target},
    error::{Error, Result},
};

/// The pauses between two tries to reach a csid that is away: the first and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));
/// The limit of lost connections during one call. The call may be the cause, so it is not repeated after that.
const ENOUGH: u32 = 5;
/// How long after a call's deadline csid's own answer is waited for. A csid that hangs does not answer.
const GRACE: Duration = Duration::from_secs(1);

/// Returns a random name for an operation of `program`, the same for each try of one call: see [`Session::ask`].
///
/// # Errors
///
/// Those of reading `/dev/urandom`.
pub fn operation_id(program: &str) -> io::Result<String> {
    let mut random = [0; 8];
    File::open("/dev/urandom")?.read_exact(&mut random)?;
    Ok(format!("{program}-{:016x}", u64::from_ne_bytes(random)))
}

/// Returns the time until `deadline`, in microseconds.
fn left(deadline: Instant) -> u64 {
    u64::try_from(deadline.saturating_duration_since(Instant::now()).as_micros()).unwrap_or(u64::MAX)
}

/// A connection to csid that outlives csid's restarts.
pub struct Session {
    target: Target,
    current: Mutex<Option<Client>>,
}

impl Session {
    /// Connects to csid. Later calls wait for an absent csid until their deadlines.
    ///
    /// # Errors
    ///
    /// [`Error::Connect`] if csid cannot be reached now.
    pub async fn open(target: Target) -> Result<Self> {
        let client = Client::connect(&target).await?;
        Ok(Self { target, current: Mutex::new(Some(client)) })
    }

    /// Calls `ask`, and again whenever csid went away before its answer. `ask` gets the time left until the
    /// deadline, in microseconds, and has to give csid the same operation ID each time. `None`: no deadline.
    ///
    /// # Errors
    ///
    /// Those of `ask`, and [`Error::NoAnswer`] if csid did not answer until a second after the deadline.
    pub async fn ask<R, F>(
        &self,
        deadline: Option<Instant>,
        mut ask: impl FnMut(Client, Option<u64>) -> F,
    ) -> Result<R>
    where
        F: Future<Output = Result<R>>,
    {
        let mut last = None;
        let asking = async {
            let (mut pause, mut asked) = (PAUSES.0, 0);
            loop {
                let (lost, error) = match self.client().await {
                    Ok(client) => match ask(client.clone(), deadline.map(left)).await {
                        // The call is not the cause.
                        Err(error) if error.is_of_a_stop() => (Some(client), error),
                        Err(error) if error.lost() && asked < ENOUGH => {
                            asked += 1;
                            (Some(client), error)
                        }
                        answer => return answer,
                    },
                    Err(error) => (None, error),
                };
                if let Some(client) = lost {
                    self.forget(&client).await;
                }
                last = Some(Box::new(error));
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(PAUSES.1);
            }
        };
        let Some(end) = deadline.and_then(|deadline| deadline.checked_add(GRACE)) else {
            return asking.await;
        };
        match tokio::time::timeout_at(end.into(), asking).await {
            Ok(answer) => answer,
            Err(_) => Err(Error::NoAnswer { last }),
        }
    }

    /// Returns the current connection, or makes a new one if the last one ended.
    ///
    /// # Errors
    ///
    /// [`Error::Connect`] if csid cannot be reached.
    pub async fn client(&self) -> Result<Client> {
        let mut current = self.current.lock().await;
        if let Some(client) = &*current {
            return Ok(client.clone());
        }
        let client = Client::connect(&self.target).await?;
        *current = Some(client.clone());
        Ok(client)
    }

    /// Drops a connection that was lost, so that the next caller gets a new one.
    pub async fn forget(&self, lost: &Client) {
        let mut current = self.current.lock().await;
        if current.as_ref().is_some_and(|client| client.is(lost)) {
            *current = None;
        }
    }
}
