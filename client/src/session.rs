//! A connection that outlives csid. State: the connection of now.

use std::time::{Duration, Instant};

use tokio::sync::Mutex;

use crate::{
    client::{Client, Target},
    error::{Error, Result},
};

/// Between two tries to reach a csid that is away.
const PAUSES: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));
/// A call that so many connections ended under is not asked again: it may be what ends them.
const ENOUGH: u32 = 5;
/// csid answers at a call's deadline by itself; one that hangs does not.
const GRACE: Duration = Duration::from_secs(1);

/// csid, through its restarts.
pub struct Session {
    target: Target,
    current: Mutex<Option<Client>>,
}

impl Session {
    /// Fails when csid cannot be reached now: later it is waited for, as long as a call may take.
    pub async fn open(target: Target) -> Result<Self> {
        let client = Client::connect(&target).await?;
        Ok(Self { target, current: Mutex::new(Some(client)) })
    }

    /// Ask, and ask again whenever csid went away before its answer. `ask` gets what is left until the deadline, in
    /// microseconds, and gives csid the same operation-id each time.
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
                let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
                let left = left.map(|left| u64::try_from(left.as_micros()).unwrap_or(u64::MAX));
                let (lost, error) = match self.client().await {
                    Ok(client) => match ask(client.clone(), left).await {
                        // On the bus there is none now: it was not asked.
                        Err(error @ Error::NotRunning(_)) => (Some(client), error),
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

    /// The connection of now, made anew where the last one ended.
    pub async fn client(&self) -> Result<Client> {
        let mut current = self.current.lock().await;
        if let Some(client) = &*current {
            return Ok(client.clone());
        }
        let client = Client::connect(&self.target).await?;
        *current = Some(client.clone());
        Ok(client)
    }

    /// The next caller shall have a new connection, unless another has made one already.
    pub async fn forget(&self, lost: &Client) {
        let mut current = self.current.lock().await;
        if current.as_ref().is_some_and(|client| client.is(lost)) {
            *current = None;
        }
    }
}
