//! The rows of each volume: kept here while it has no work, else owned by its actor. Also which volume has a name, and which mount
//! has a target.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::mpsc;

use crate::error::{Error, Kind, Obstacle, Result, shown};
use crate::store::registry::VolumeName;
use crate::store::rows::{MountKey, VolumeKey};
use crate::volume::model::subject::Subject;
use crate::volume::model::volume::Volume;
use crate::volume::operation::journal::JournaledVolume;
use crate::volume::operation::message::Message;
use crate::volume::operation::request::{OperationRequest, Waiter};
use crate::volume::operation::table::Recovering;

enum Slot {
    /// Boxed, because a table has many empty places.
    Rest(Box<Volume>),
    Running(Box<Actor>),
}

/// An actor. The names and targets are those of its rows, and of the requests since its start.
struct Actor {
    task: mpsc::UnboundedSender<Message>,
    taken: Taken,
}

/// The names and targets of a volume; each can be taken once.
#[derive(Default)]
struct Taken {
    names: Vec<VolumeName>,
    targets: Vec<String>,
}

impl Taken {
    fn by(volume: &Volume) -> Self {
        let mut taken = Taken::default();
        if !volume.mounts.is_empty() {
            taken.names.push(name_of(volume));
        }
        taken.targets = volume.mounts.iter().filter_map(|mount| mount.spec.target.clone()).collect();
        taken
    }

    /// Adds the name and the target of a request that has no row yet.
    fn add(&mut self, work: &OperationRequest) {
        self.names.push(work.subject().volume());
        self.targets.extend(work.target().map(str::to_owned));
    }
}

#[derive(Default)]
struct Table {
    slots: HashMap<Arc<VolumeKey>, Slot>,
    names: HashMap<VolumeName, Arc<VolumeKey>>,
    /// The mount of each target. A target has one mount.
    targets: HashMap<String, MountKey>,
}

/// A function that starts the actor of a volume. The actor owns the rows and reads the inbox until it returns the rows.
pub(in crate::volume) type Spawn = Box<dyn Fn(Volume, mpsc::UnboundedReceiver<Message>) + Send + Sync>;

pub(in crate::volume) struct Directory {
    table: Mutex<Table>,
    spawn: Spawn,
}

impl Directory {
    /// Makes an empty directory, which starts actors with `spawn`.
    pub(in crate::volume) fn new(spawn: Spawn) -> Self {
        Directory { table: Mutex::default(), spawn }
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the volume that has this (namespace, volume) now.
    pub(in crate::volume) fn find(&self, key: &MountKey) -> Option<VolumeKey> {
        self.lock().names.get(&VolumeName::of(key)).map(|volume| VolumeKey::clone(volume))
    }

    /// Returns why this volume cannot have this name: the volume or the name is in use with another one. `None`: it can.
    pub(in crate::volume) fn in_use(&self, name: &VolumeName, key: &VolumeKey) -> Option<String> {
        let table = self.lock();
        match table.names.get(name) {
            Some(other) if **other != *key => {
                return Some(format!("{name} is external id `{}` of plugin {}", other.handle, other.plugin));
            }
            _ => {}
        }
        let other = table.names.iter().find(|(other, volume)| ***volume == *key && *other != name)?;
        Some(format!("external id `{}` of plugin {} is {}", key.handle, key.plugin, other.0))
    }

    /// Sends a request to the actor of a volume, and starts the actor if there is none. A name means one volume while it is in
    /// use.
    pub(in crate::volume) fn ask(
        &self,
        key: &VolumeKey,
        work: OperationRequest,
        waiter: Waiter,
    ) -> Result<()> {
        let subject = work.subject();
        let name = subject.volume();
        let mut table = self.lock();
        match table.names.get(&name) {
            Some(other) if **other != *key && !key.handle.is_creating() => {
                let text = format!(
                    "{name} is external id `{}` of plugin {} as long as it is in use",
                    other.handle, other.plugin
                );
                return Err(Error::new(Kind::AlreadyExists, text));
            }
            _ => {}
        }
        let target = work.target();
        if let Some(target) = target
            && table.targets.get(target).is_some_and(|holder| Some(holder) != subject.mount())
        {
            let text = format!("target {} shows another mount", shown(target));
            return Err(Error::new(Kind::ClaimConflict, text).obstructed_by(Obstacle::Target));
        }
        if let (Some(target), Some(mount)) = (target, subject.mount()) {
            table.targets.insert(target.to_owned(), mount.clone());
        }
        let key = table.shared(key);
        table.name(&name, &key);
        let actor = table.actor(&self.spawn, key, &name);
        actor.taken.names.push(name);
        actor.taken.targets.extend(target.map(str::to_owned));
        // An actor gives up its slot under this lock, and only if its inbox is empty, so it reads this message.
        let _ = actor.task.send(Message::Ask(work, waiter));
        Ok(())
    }

    /// Has the actor of a volume continue unfinished work.
    pub(in crate::volume) fn go_on(&self, key: &VolumeKey, subject: Subject, uid: u32) {
        self.send(key, subject.volume(), Message::Continue(subject, uid));
    }

    /// Sends a message without a caller, about the volume `name`, to the actor of a volume. Starts the actor if there is none.
    pub(in crate::volume) fn send(&self, key: &VolumeKey, name: VolumeName, message: Message) {
        let mut table = self.lock();
        let key = table.shared(key);
        if !table.names.contains_key(&name) {
            table.name(&name, &key);
        }
        let actor = table.actor(&self.spawn, key, &name);
        actor.taken.names.push(name);
        let _ = actor.task.send(message);
    }

    /// Returns the mount that has `path` as its target.
    pub(in crate::volume) fn holder(&self, path: &str) -> Option<MountKey> {
        self.lock().targets.get(path).cloned()
    }

    /// Returns the rows of a volume at rest.
    pub(in crate::volume) fn at_rest(&self, key: &VolumeKey) -> Option<Volume> {
        match self.lock().slots.get(key) {
            Some(Slot::Rest(volume)) => Some(Volume::clone(volume)),
            _ => None,
        }
    }

    /// Replaces the entry `nameless` of a volume at rest by `volume`, whose external id is known.
    pub(in crate::volume) fn identify(&self, nameless: &VolumeKey, volume: Volume) {
        let mut table = self.lock();
        if table.slots.remove(nameless).is_some() {
            let key = Arc::new(volume.row.key.clone());
            table.names.insert(name_of(&volume), Arc::clone(&key));
            table.slots.insert(key, Slot::Rest(volume.into()));
        }
    }

    /// Sends a message to an actor that runs. A volume at rest gets none.
    pub(in crate::volume) fn tell(&self, key: &VolumeKey, message: Message) {
        if let Some(Slot::Running(actor)) = self.lock().slots.get(key) {
            let _ = actor.task.send(message);
        }
    }

    /// Sends a message to the actors of all volumes of a plugin.
    pub(in crate::volume) fn tell_plugin(&self, plugin: &str, message: impl Fn() -> Message) {
        for (key, slot) in &self.lock().slots {
            if let Slot::Running(actor) = slot
                && key.plugin == plugin
            {
                let _ = actor.task.send(message());
            }
        }
    }

    /// Sends a message to every actor.
    pub(in crate::volume) fn tell_all(&self, message: impl Fn() -> Message) {
        for slot in self.lock().slots.values() {
            if let Slot::Running(actor) = slot {
                let _ = actor.task.send(message());
            }
        }
    }

    /// Enters a volume of the journal. With `recovering` its rows need work at once, so its actor is started.
    pub(in crate::volume) fn enter(&self, volume: Volume, recovering: Option<Recovering>) {
        let mut table = self.lock();
        let key = Arc::new(volume.row.key.clone());
        let name = name_of(&volume);
        table.names.insert(name.clone(), Arc::clone(&key));
        for mount in &volume.mounts {
            table.targets.extend(mount.spec.target.clone().map(|target| (target, mount.key.clone())));
        }
        table.slots.insert(Arc::clone(&key), Slot::Rest(volume.into()));
        if let Some(recovering) = recovering {
            let _ = table.actor(&self.spawn, key, &name).task.send(Message::Recover(recovering));
        }
    }

    /// Releases the names and targets that neither an actor's rows nor its `waiting` requests have, unless its inbox has a message.
    pub(in crate::volume) fn release<'a>(
        &self,
        key: &VolumeKey,
        volume: &Volume,
        waiting: impl Iterator<Item = &'a OperationRequest>,
        inbox: &mpsc::UnboundedReceiver<Message>,
    ) {
        let mut table = self.lock();
        if inbox.is_empty() {
            let mut kept = Taken::by(volume);
            waiting.for_each(|work| kept.add(work));
            table.release(key, kept);
        }
    }

    /// Takes back the rows of an actor without work. Returns them if its inbox has a message.
    pub(in crate::volume) fn rest(
        &self,
        key: &VolumeKey,
        rows: JournaledVolume,
        inbox: &mpsc::UnboundedReceiver<Message>,
    ) -> Option<JournaledVolume> {
        let mut table = self.lock();
        if !inbox.is_empty() {
            return Some(rows);
        }
        let volume = rows.into_volume();
        table.release(key, Taken::by(&volume));
        let key = table.shared(key);
        table.slots.remove(&key);
        if !volume.mounts.is_empty() {
            table.slots.insert(key, Slot::Rest(volume.into()));
        }
        None
    }
}

impl Table {
    /// Returns the key that the table has of a volume, or a new one.
    fn shared(&self, key: &VolumeKey) -> Arc<VolumeKey> {
        match self.slots.get_key_value(key) {
            Some((key, _)) => Arc::clone(key),
            None => Arc::new(key.clone()),
        }
    }

    /// Binds a name to a volume. A volume in creation gets no name: it cannot be used yet, and its actor is not the one of the
    /// created volume.
    fn name(&mut self, name: &VolumeName, key: &Arc<VolumeKey>) {
        if !key.handle.is_creating() {
            self.names.insert(name.clone(), Arc::clone(key));
        }
    }

    /// Releases the names and targets that a running volume took and does not keep.
    fn release(&mut self, key: &VolumeKey, kept: Taken) {
        let Some(Slot::Running(actor)) = self.slots.get_mut(key) else { return };
        let taken = &mut actor.taken;
        let names: HashSet<&VolumeName> = kept.names.iter().collect();
        let targets: HashSet<&String> = kept.targets.iter().collect();
        for name in taken.names.iter().filter(|name| !names.contains(name)) {
            if self.names.get(name).is_some_and(|named| **named == *key) {
                self.names.remove(name);
            }
        }
        for target in taken.targets.iter().filter(|target| !targets.contains(target)) {
            self.targets.remove(target);
        }
        *taken = kept;
    }

    /// Returns the actor of a volume, started with its rows if there is none.
    fn actor(&mut self, spawn: &Spawn, key: Arc<VolumeKey>, name: &VolumeName) -> &mut Actor {
        let slot = match self.slots.remove(&key) {
            Some(running @ Slot::Running(_)) => running,
            Some(Slot::Rest(volume)) => start(spawn, *volume),
            None => start(spawn, Volume::new(VolumeKey::clone(&key), &name.namespace, &name.volume)),
        };
        match self.slots.entry(key).insert_entry(slot).into_mut() {
            Slot::Running(actor) => actor,
            Slot::Rest(_) => unreachable!("the slot was made running just now"),
        }
    }
}

fn name_of(volume: &Volume) -> VolumeName {
    VolumeName { namespace: volume.row.namespace.clone(), volume: volume.row.volume.clone() }
}

fn start(spawn: &Spawn, volume: Volume) -> Slot {
    let (task, inbox) = mpsc::unbounded_channel();
    let taken = Taken::by(&volume);
    spawn(volume, inbox);
    Slot::Running(Box::new(Actor { task, taken }))
}
