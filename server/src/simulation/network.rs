//! What is between the processes: partitions, late, lost and doubled messages.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use csid_etcd::double::{Fate, Passage, Way};
use tokio::time::Instant;
use tonic::Status;

use super::dice::Dice;
use super::faults::{Fault, Faults};

/// A watch notices within this time that its member is away, by pings.
const PINGS: Duration = Duration::from_secs(15);
/// How often a message that cannot pass is tried again.
const AGAIN: Duration = Duration::from_millis(250);

/// A process: a server, a node or etcd.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    Server(usize),
    Node(usize),
    Etcd,
}

/// The network of a scene.
pub struct Network {
    pub dice: Dice,
    /// One message in so many has a fault. 0: none has.
    pub faults: AtomicU64,
    /// From where no message comes to where.
    cut: Mutex<BTreeSet<(Place, Place)>>,
    /// Raised when all watches of etcd end.
    watches: AtomicU64,
    /// What has gone wrong.
    pub seen: Arc<Faults>,
}

impl Network {
    /// Makes a network without faults.
    pub fn new(dice: Dice, seen: Arc<Faults>) -> Network {
        let (faults, watches) = (AtomicU64::new(0), AtomicU64::new(0));
        Network { dice, faults, cut: Mutex::default(), watches, seen }
    }

    fn cut(&self) -> MutexGuard<'_, BTreeSet<(Place, Place)>> {
        self.cut.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets no message pass from one to the other.
    pub fn part(&self, from: Place, to: Place) {
        self.cut().insert((from, to));
    }

    pub fn heal(&self, from: Place, to: Place) {
        self.cut().remove(&(from, to));
    }

    pub fn passes(&self, from: Place, to: Place) -> bool {
        !self.cut().contains(&(from, to))
    }

    /// Returns whether a call and its answer pass.
    pub fn is_open(&self, one: Place, other: Place) -> bool {
        self.passes(one, other) && self.passes(other, one)
    }

    pub fn cut_watches(&self) {
        self.seen.count(Fault::WatchesEnded);
        self.watches.fetch_add(1, Ordering::Relaxed);
    }

    /// Ends faults and partitions.
    pub fn calm(&self) {
        self.faults.store(0, Ordering::Relaxed);
        self.cut().clear();
    }

    /// Returns whether this message has a fault.
    pub fn fails(&self) -> bool {
        self.dice.once_in(self.faults.load(Ordering::Relaxed))
    }

    /// Returns how long a message is on its way.
    pub fn delay(&self) -> Duration {
        let dice = &self.dice;
        match self.faults.load(Ordering::Relaxed) {
            0 => Duration::from_millis(1),
            _ if dice.once_in(20) => {
                self.seen.count(Fault::MessageSlow);
                dice.time(20, 800)
            }
            _ => dice.time(0, 5),
        }
    }
}

/// The way of one server to etcd. It ends with the server.
pub struct ToEtcd {
    pub network: Arc<Network>,
    pub server: usize,
    /// Whether the server was killed: no message of it passes any more.
    pub is_dead: Arc<AtomicBool>,
}

impl ToEtcd {
    fn is_dead(&self) -> bool {
        self.is_dead.load(Ordering::Relaxed)
    }
}

#[tonic::async_trait]
impl Way for ToEtcd {
    fn passage(&self, changes: bool) -> Passage {
        let (network, own) = (&self.network, Place::Server(self.server));
        let dice = &network.dice;
        let delays = (network.delay(), network.delay());
        let fate = if self.is_dead() || !network.passes(own, Place::Etcd) {
            Fate::Lost
        } else if !network.passes(Place::Etcd, own) {
            Fate::Silent
        } else if !network.fails() {
            Fate::Answered
        } else {
            match dice.roll(if changes { 7 } else { 4 }) {
                0 => Fate::Refused(Status::resource_exhausted("etcdserver: too many requests")),
                1 => Fate::Refused(Status::unavailable("etcdserver: leader changed")),
                2 => Fate::Lost,
                3 => Fate::Failed(Status::unavailable("etcdserver: request timed out")),
                4 => Fate::Failed(Status::unavailable("transport error")),
                5 => Fate::Silent,
                _ => Fate::Twice(dice.time(0, 9_000)),
            }
        };
        // A proposal that its client has given up may be committed later.
        let is_late = matches!(fate, Fate::Silent) && changes && dice.once_in(2);
        let fault = match &fate {
            Fate::Answered => None,
            Fate::Refused(_) => Some(Fault::EtcdRefused),
            Fate::Failed(_) => Some(Fault::EtcdFailed),
            // A dead server's calls are none.
            Fate::Lost => (!self.is_dead()).then_some(Fault::EtcdLost),
            Fate::Silent if is_late => Some(Fault::EtcdLate),
            Fate::Silent => Some(Fault::EtcdSilent),
            Fate::Twice(_) => Some(Fault::EtcdTwice),
        };
        fault.into_iter().for_each(|fault| network.seen.count(fault));
        let before = if is_late { dice.time(0, 12_000) } else { delays.0 };
        Passage { before, fate, after: delays.1 }
    }

    async fn message(&self) -> Result<(), Status> {
        let own = Place::Server(self.server);
        let watches = self.network.watches.load(Ordering::Relaxed);
        let begun = Instant::now();
        tokio::time::sleep(self.network.delay()).await;
        loop {
            if self.is_dead() {
                std::future::pending::<()>().await;
            }
            let fails = self.network.fails();
            if fails {
                self.network.seen.count(Fault::WatchEnded);
            }
            if fails || watches != self.network.watches.load(Ordering::Relaxed) {
                return Err(Status::unavailable("the watch was cut"));
            }
            if self.network.is_open(own, Place::Etcd) {
                return Ok(());
            }
            if begun.elapsed() >= PINGS {
                return Err(Status::unavailable("the member is away"));
            }
            tokio::time::sleep(AGAIN).await;
        }
    }
}
