//! The tasks in which this server acts for volumes: one for each at most. A volume without a task rests.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use csid::store::registry::VolumeName;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use crate::cluster::Cluster;
use crate::pace::Memory;

/// Tasks at the same time.
const TASKS: usize = 1000;
/// How long a volume rests whose task has panicked.
const PANICKED: Duration = Duration::from_secs(30);
/// The time between two looks whether all tasks have ended.
const STOP: Duration = Duration::from_millis(50);

/// The tasks of this server's volumes.
pub struct Tasks {
    cluster: Arc<Cluster>,
    table: Mutex<HashMap<VolumeName, Place>>,
    /// A permit for each task.
    permits: Arc<Semaphore>,
    /// Whether this server stops: no task begins.
    stops: AtomicBool,
}

enum Place {
    /// A task acts for the volume. `again`: it is to look once more at its end.
    Runs { again: bool },
    /// A task may begin soon. `again`: something has come meanwhile.
    Reserved { again: bool },
    /// Nothing can be done here before this time, unless the record changes, a caller asks, or a controller comes.
    Rests(Instant, Memory),
}

/// A volume without a task, as it was when its place was taken.
struct Rested {
    until: Instant,
    memory: Memory,
    permit: OwnedSemaphorePermit,
}

/// The task of a volume. If it panics, the volume rests, and a later task gives up what this one has left.
pub(crate) struct VolumeTask {
    tasks: Arc<Tasks>,
    name: VolumeName,
    /// `None`: it was given back.
    permit: Option<OwnedSemaphorePermit>,
}

/// The place of a volume whose task may begin soon. Its drop gives the place back.
pub(crate) struct Reserved {
    tasks: Arc<Tasks>,
    name: VolumeName,
    until: Instant,
    pub memory: Memory,
    /// `None`: the task has it.
    permit: Option<OwnedSemaphorePermit>,
}

impl Tasks {
    pub fn new(cluster: Arc<Cluster>) -> Tasks {
        let permits = Arc::new(Semaphore::new(TASKS));
        Tasks { cluster, table: Mutex::default(), permits, stops: AtomicBool::new(false) }
    }

    fn table(&self) -> MutexGuard<'_, HashMap<VolumeName, Place>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of volumes that this server acts for now.
    pub fn running(&self) -> usize {
        self.table().values().filter(|place| !matches!(place, Place::Rests(..))).count()
    }

    /// Returns whether this server stops.
    pub fn have_stopped(&self) -> bool {
        self.stops.load(Ordering::Acquire)
    }

    /// Begins no more tasks, and waits until those that run have ended. The caller bounds the wait.
    pub async fn stop(&self) {
        self.stops.store(true, Ordering::Release);
        while self.running() > 0 {
            tokio::time::sleep(STOP).await;
        }
    }

    /// Ends the rest of all volumes.
    pub fn end_rests(&self) {
        let now = Instant::now();
        for place in self.table().values_mut() {
            match place {
                Place::Rests(until, _) => *until = now,
                Place::Reserved { again } => *again = true,
                Place::Runs { .. } => {}
            }
        }
    }

    /// Forgets the volumes whose rest is over, unless `is_due` names them. Returns when the next rest ends. `None`: no volume rests.
    pub fn forget_rested(&self, is_due: impl Fn(&VolumeName) -> bool) -> Option<Instant> {
        let now = Instant::now();
        let mut next = None;
        self.table().retain(|name, place| match place {
            Place::Rests(until, _) if *until > now => {
                next = Some(next.map_or(*until, |next: Instant| next.min(*until)));
                true
            }
            Place::Rests(..) => is_due(name),
            Place::Runs { .. } | Place::Reserved { .. } => true,
        });
        next
    }

    /// Returns a new task for a volume whose record has this revision, and what is remembered of the volume. `revision`, `None`: a caller waits, so the task
    /// begins also if the volume rests. Returns `None` if no task begins: the volume has one or rests, this server stops, or it has as many tasks as it may.
    pub fn begin(self: &Arc<Self>, name: &VolumeName, revision: Option<u64>) -> Option<(VolumeTask, Memory)> {
        let mut table = self.table();
        if self.have_stopped() {
            return None;
        }
        match table.get_mut(name) {
            Some(Place::Runs { again }) => {
                *again |= revision.is_none();
                return None;
            }
            Some(Place::Reserved { again }) => {
                *again = true;
                return None;
            }
            Some(Place::Rests(until, memory))
                if *until > Instant::now() && revision.is_some_and(|revision| revision <= memory.seen) =>
            {
                return None;
            }
            Some(Place::Rests(..)) | None => {}
        }
        let Rested { memory, permit, .. } = self.take(&mut table, name, Place::Runs { again: false })?;
        Some((VolumeTask { tasks: self.clone(), name: name.clone(), permit: Some(permit) }, memory))
    }

    /// Takes the place of a volume for a task that may begin soon. `None`: it has one, or this server begins none.
    pub fn reserve(self: &Arc<Self>, name: &VolumeName) -> Option<Reserved> {
        let mut table = self.table();
        if self.have_stopped() {
            return None;
        }
        if let Some(Place::Runs { .. } | Place::Reserved { .. }) = table.get(name) {
            return None;
        }
        let Rested { until, memory, permit } =
            self.take(&mut table, name, Place::Reserved { again: false })?;
        Some(Reserved { tasks: self.clone(), name: name.clone(), until, memory, permit: Some(permit) })
    }

    /// Takes the place of a volume that has no task. `None`: this server has as many tasks as it may.
    fn take(
        &self,
        table: &mut HashMap<VolumeName, Place>,
        name: &VolumeName,
        place: Place,
    ) -> Option<Rested> {
        let permit = self.permits.clone().try_acquire_owned().ok()?;
        let (until, memory) = match table.insert(name.clone(), place) {
            Some(Place::Rests(until, memory)) => (until, memory),
            Some(Place::Runs { .. } | Place::Reserved { .. }) | None => (Instant::now(), Memory::default()),
        };
        Some(Rested { until, memory, permit })
    }

    /// Has a volume rest. What has come meanwhile begins a task.
    fn give_back(
        &self,
        name: &VolumeName,
        permit: Option<OwnedSemaphorePermit>,
        until: Instant,
        memory: Memory,
    ) {
        let before = self.table().insert(name.clone(), Place::Rests(until, memory));
        // The new task needs a permit.
        drop(permit);
        if let Some(Place::Runs { again: true } | Place::Reserved { again: true }) = before {
            self.cluster.wake(name);
        }
    }
}

impl VolumeTask {
    pub fn name(&self) -> &VolumeName {
        &self.name
    }

    /// Ends the task, unless it is to look again. `rest`: how long the volume rests.
    pub fn is_over(&self, rest: Duration, memory: &mut Memory) -> bool {
        let mut table = self.tasks.table();
        if let Some(Place::Runs { again }) = table.get_mut(&self.name)
            && *again
        {
            *again = false;
            return false;
        }
        table.insert(self.name.clone(), Place::Rests(Instant::now() + rest, std::mem::take(memory)));
        true
    }

    /// Ends the task, and forgets its volume.
    pub fn forget(self) {
        self.tasks.table().remove(&self.name);
    }
}

impl Drop for VolumeTask {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // The record may be as it was.
            let memory = Memory { seen: u64::MAX, ..Memory::default() };
            self.tasks.give_back(&self.name, self.permit.take(), Instant::now() + PANICKED, memory);
        }
    }
}

impl Reserved {
    /// Begins the task.
    pub fn begin(mut self) -> Option<(VolumeTask, Memory)> {
        let permit = self.permit.take()?;
        if let Some(taken) = self.tasks.table().get_mut(&self.name) {
            *taken = Place::Runs { again: matches!(taken, Place::Reserved { again: true }) };
        }
        let task = VolumeTask { tasks: self.tasks.clone(), name: self.name.clone(), permit: Some(permit) };
        Some((task, std::mem::take(&mut self.memory)))
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        let Some(permit) = self.permit.take() else { return };
        self.tasks.give_back(&self.name, Some(permit), self.until, std::mem::take(&mut self.memory));
    }
}
