//! This server in etcd: its lease, its row, and the beat that shows that it still follows etcd.
//!
//! ```text
//!   absent ── row written, own beat seen ──▶ present(ID) ── no beat seen for 10 s ──▶ absent ── a beat seen ──▶ present(ID)
//!                                                       └── lease lost ──▶ absent, a new ID
//!   present(ID) ── etcd's database is full, and answers a read ──▶ present(ID)
//!   present(ID) ── etcd has values of a version that this server does not know ──▶ closed ── it knows them again, a beat seen ──▶ present(ID)
//! ```
//!
//! A lease says that a server is there. It never says what the server may do: each write compares the row.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use csid::error::cut;
use csid_etcd::{EtcdError, EtcdRegistry, Expected, Guard, RowKey, RowStore, Write, Written};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::edges;
use crate::failure::{Result, ServerError};
use crate::random;
use crate::rows::{self, RowError, ServerRow};

const LEASE: i64 = 10;
const BEAT: Duration = Duration::from_secs(3);
/// The shortest and the longest pause after a beat that has failed.
const AGAIN: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(1));
/// How long this server serves without having seen a beat of its own.
const PATIENCE: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(500);

/// This server as etcd has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Here {
    /// Random, another one after each lost lease.
    pub id: String,
    pub lease: i64,
    /// The revision at which the row was created.
    created: u64,
}

impl Here {
    /// Returns the guard of each write: a server whose row is gone writes nothing.
    pub fn guard(&self) -> Guard {
        Guard { key: RowKey::Server(self.id.clone()), is: Expected::Created(self.created) }
    }
}

/// Whether this server follows etcd. Copies share it.
#[derive(Clone)]
pub struct Presence {
    here: watch::Sender<Option<Here>>,
    lag: Arc<Mutex<Lag>>,
    /// Why this server does not serve though it follows etcd. `None`: it serves. Who needs both locks takes that of `here` first.
    closed: Arc<Mutex<Option<String>>>,
    /// Whether this server stops by an administrator's order.
    stops: watch::Sender<bool>,
    /// Whether etcd has refused the last beat because its database is full.
    full: Arc<AtomicBool>,
}

/// How far this server is behind etcd.
#[derive(Default)]
struct Lag {
    /// The time of the last beat that has come round.
    last: Duration,
    /// The beginning of the first beat since then. `None`: there is none.
    since: Option<Instant>,
}

#[derive(Debug, thiserror::Error)]
enum BeatError {
    #[error(transparent)]
    Etcd(#[from] EtcdError),
    #[error(transparent)]
    Row(#[from] RowError),
    #[error("the lease has ended")]
    Lost,
    #[error("no beat has come for {} s", PATIENCE.as_secs())]
    Late,
}

impl Presence {
    pub fn new() -> Self {
        let (here, stops) = (watch::channel(None).0, watch::channel(false).0);
        Presence { here, lag: Arc::default(), closed: Arc::default(), stops, full: Arc::default() }
    }

    /// Returns whether etcd's database is full, by the last beat. etcd answers reads then, and refuses changes.
    pub fn is_full(&self) -> bool {
        self.full.load(Ordering::Relaxed)
    }

    /// Notes whether etcd's database is full.
    fn set_full(&self, full: bool) {
        match (self.full.swap(full, Ordering::Relaxed), full) {
            (false, true) => {
                tracing::error!("etcd's database has reached its quota: no claim begins or ends")
            }
            (true, false) => tracing::info!("etcd has space again"),
            _ => {}
        }
    }

    fn lag_now(&self) -> MutexGuard<'_, Lag> {
        self.lag.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn closed_now(&self) -> MutexGuard<'_, Option<String>> {
        self.closed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has this server serve nothing, for a reason, though it follows etcd. Its sessions end. `None`: it serves again from its next beat on.
    pub fn close(&self, why: Option<String>) {
        self.here.send_if_modified(|present| {
            let ends = why.is_some() && present.is_some();
            if why.is_some() {
                *present = None;
            }
            *self.closed_now() = why;
            ends
        });
    }

    /// Returns why this server does not serve though it follows etcd. `None`: it serves.
    pub fn closed(&self) -> Option<String> {
        self.closed_now().clone()
    }

    /// Notes that this server follows etcd.
    fn enter(&self, here: &Here) {
        self.here.send_if_modified(|present| {
            let is_new = self.closed_now().is_none() && present.as_ref() != Some(here);
            if is_new {
                *present = Some(here.clone());
            }
            is_new
        });
    }

    /// Returns how long the last beat has taken to come round, or for how long one has not.
    pub fn lag(&self) -> Duration {
        let lag = self.lag_now();
        lag.since.map_or(lag.last, |since| since.elapsed().max(lag.last))
    }

    /// Notes that a beat is written.
    fn begin_beat(&self) {
        self.lag_now().since.get_or_insert_with(Instant::now);
    }

    /// Notes that a beat has come round.
    fn end_beat(&self) {
        let mut lag = self.lag_now();
        if let Some(since) = lag.since.take() {
            lag.last = since.elapsed();
        }
    }

    /// Returns this server's row, or an error while it does not follow etcd.
    pub fn here(&self) -> Result<Here> {
        let away = || self.closed().unwrap_or_else(|| "this server does not follow etcd now".to_owned());
        self.here.borrow().clone().ok_or_else(|| ServerError::Away(away()))
    }

    pub fn subscribe(&self) -> watch::Receiver<Option<Here>> {
        self.here.subscribe()
    }

    /// Returns the error of what ends with the presence.
    pub fn cut_off(&self) -> ServerError {
        self.closed().map_or_else(ServerError::cut_off, ServerError::Away)
    }

    /// Waits until this server stops by an administrator's order.
    pub async fn stopped(&self) {
        // The sender lives as long as this.
        let _ = self.stops.subscribe().wait_for(|stops| *stops).await;
    }

    /// Ends what waits here, because this server stops by an administrator's order. Returns its row, if it has one.
    pub fn stop(&self) -> Option<Here> {
        let here = self.leave();
        self.stops.send_replace(true);
        here
    }

    /// Notes that this server does not follow etcd any more. Returns its row, if it had one.
    pub fn leave(&self) -> Option<Here> {
        self.here.send_replace(None)
    }

    /// Keeps the lease and the row until the task is aborted. `seen` is called after each beat that has come round.
    /// `row` returns what the row says now.
    pub async fn keep(&self, registry: &EtcdRegistry, row: impl Fn() -> ServerRow, seen: impl Fn()) {
        loop {
            match self.once(registry, &row, &seen).await {
                BeatError::Lost => {
                    tracing::warn!("the lease in etcd was lost; this server takes another name")
                }
                error => {
                    tracing::warn!(error = %cut(&error.to_string(), 1024), "this server is not in etcd");
                }
            }
            self.here.send_replace(None);
            // An etcd without space refuses at once.
            tokio::time::sleep(if self.is_full() { BEAT } else { PAUSE }).await;
        }
    }

    /// Keeps one lease until it is lost.
    async fn once(
        &self,
        registry: &EtcdRegistry,
        row: &impl Fn() -> ServerRow,
        seen: &impl Fn(),
    ) -> BeatError {
        let store = registry.rows();
        self.begin_beat();
        let begun = tokio::time::timeout(PATIENCE, begin(&store, registry, &row())).await;
        let here = match begun {
            Ok(Ok(here)) => here,
            Ok(Err(error)) => {
                if let BeatError::Etcd(EtcdError::Full) = &error {
                    self.set_full(true);
                }
                return error;
            }
            Err(_) => return BeatError::Late,
        };
        tracing::info!(id = here.id, "this server is in etcd");
        self.set_full(false);
        self.end_beat();
        let mut last = Instant::now();
        self.enter(&here);
        seen();
        let (mut number, mut pause) = (0, BEAT);
        loop {
            tokio::time::sleep(pause).await;
            number += 1;
            self.begin_beat();
            let beat = self.beat(&store, registry, &here, ServerRow { beat: number, ..row() });
            let begun = Instant::now();
            match tokio::time::timeout_at(last + PATIENCE, beat).await {
                Ok(Ok(())) => {
                    self.end_beat();
                    last = Instant::now();
                    self.enter(&here);
                    seen();
                    pause = BEAT;
                }
                Ok(Err(BeatError::Lost)) => return BeatError::Lost,
                late => {
                    let error = late.unwrap_or(Err(BeatError::Late)).err();
                    tracing::warn!(error = error.map(|error| error.to_string()), "a beat has failed");
                    if last.elapsed() >= PATIENCE {
                        self.here.send_replace(None);
                        // The next try has its own time.
                        last = Instant::now();
                    }
                    // Claims wait for this server. The servers of a cluster do not ask etcd at the same moment. An etcd that refuses at once is not
                    // asked more often than one that answers.
                    pause = match begun.elapsed() < AGAIN.1 {
                        true => BEAT,
                        false => AGAIN.0 + (AGAIN.1 - AGAIN.0).mul_f64(random::share()),
                    };
                }
            }
        }
    }

    /// Renews the lease, writes the row, and waits until the row comes with the watch. An etcd whose database is full refuses the row. A read of the
    /// row is enough then: etcd refuses all changes of this server, whatever it knows.
    async fn beat(
        &self,
        store: &RowStore,
        registry: &EtcdRegistry,
        here: &Here,
        row: ServerRow,
    ) -> Result<(), BeatError> {
        if !store.keep_lease(here.lease).await? {
            return Err(BeatError::Lost);
        }
        let key = RowKey::Server(here.id.clone());
        let write = Write { value: Some(rows::write(&key, &row)?), key: key.clone(), lease: here.lease };
        let revision = match edges::write(store, &[here.guard()], vec![write]).await {
            Ok(Written::Done { revision }) => {
                self.set_full(false);
                revision
            }
            Ok(Written::Refused(_)) => return Err(BeatError::Lost),
            Ok(Written::Unknown) => match store.read(&key).await? {
                Some(row) => row.revision,
                None => return Err(BeatError::Lost),
            },
            Err(EtcdError::Full) => {
                self.set_full(true);
                let is_there = store.read(&key).await?.is_some();
                return if is_there { Ok(()) } else { Err(BeatError::Lost) };
            }
            Err(error) => return Err(error.into()),
        };
        Ok(registry.reached(revision).await?)
    }
}

/// Takes a lease, writes the row, and waits until it comes with the watch.
async fn begin(store: &RowStore, registry: &EtcdRegistry, row: &ServerRow) -> Result<Here, BeatError> {
    let id = random::name();
    let key = RowKey::Server(id.clone());
    let lease = store.grant_lease(LEASE).await?;
    let guard = Guard { key: key.clone(), is: Expected::Absent };
    let write = Write { value: Some(rows::write(&key, row)?), key, lease };
    match edges::write(store, &[guard], vec![write]).await? {
        Written::Done { revision } => {
            registry.reached(revision).await?;
            Ok(Here { id, lease, created: revision })
        }
        // The name is random, so another try with another name does no harm. The lease ends by itself.
        Written::Refused(_) | Written::Unknown => Err(BeatError::Lost),
    }
}
