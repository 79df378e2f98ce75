//! Where each volume's rows are: at rest here, or with the task that works on them. Also which volume a name means.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::mpsc;

use crate::error::{Error, Kind, Result};
use crate::store::registry::VolumeName;
use crate::store::rows::{MountKey, VolumeKey};
use crate::volume::journalled::Journalled;
use crate::volume::state::Volume;
use crate::volume::task::{Message, Task};
use crate::volume::work::{Waiter, Work};
use crate::volume::{Shared, paths};

/// (namespace, volume)
type Name = (String, String);

enum Slot {
    Rest(Volume),
    /// The names and targets are those of its rows and of the work asked for since the task began.
    Running {
        task: mpsc::UnboundedSender<Message>,
        taken: Taken,
    },
}

/// What a volume has of what can be had once.
#[derive(Default)]
struct Taken {
    names: Vec<Name>,
    targets: Vec<String>,
}

impl Taken {
    fn by(volume: &Volume) -> Self {
        let mut taken = Taken::default();
        if !volume.mounts.is_empty() {
            taken.names.push((volume.row.namespace.clone(), volume.row.volume.clone()));
        }
        taken.targets = volume.mounts.iter().filter_map(|mount| mount.spec.target.clone()).collect();
        taken
    }
}

#[derive(Default)]
struct Table {
    slots: HashMap<VolumeKey, Slot>,
    names: HashMap<Name, VolumeKey>,
    /// Whose mount a target shows: one target, one mount.
    targets: HashMap<String, MountKey>,
}

#[derive(Default)]
pub(super) struct Directory(Mutex<Table>);

impl Directory {
    fn lock(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The volume that (namespace, volume) names now.
    pub(super) fn find(&self, key: &MountKey) -> Option<VolumeKey> {
        self.lock().names.get(&(key.namespace.clone(), key.volume.clone())).cloned()
    }

    /// What is in the way of this name for this volume, if it is in use under another one.
    pub(super) fn in_use(&self, name: &VolumeName, key: &VolumeKey) -> Option<String> {
        let table = self.lock();
        let own = (name.namespace.clone(), name.volume.clone());
        match table.names.get(&own) {
            Some(other) if other != key => {
                return Some(format!(
                    "{name} is external id `{}` of plugin {}",
                    other.external_id, other.plugin
                ));
            }
            _ => {}
        }
        let other = table.names.iter().find(|(other, volume)| *volume == key && **other != own)?;
        Some(format!(
            "external id `{}` of plugin {} is {}/{}",
            key.external_id, key.plugin, other.0.0, other.0.1
        ))
    }

    /// Give work to a volume's task, which is started when there is none. A name means one volume while it is in use.
    pub(super) fn ask(
        &self,
        shared: &Arc<Shared>,
        key: &VolumeKey,
        work: Work,
        waiter: Waiter,
    ) -> Result<()> {
        let name = (work.key().namespace.clone(), work.key().volume.clone());
        let mut table = self.lock();
        match table.names.get(&name) {
            Some(other) if other != key && !paths::is_unborn(key) => {
                let text = format!(
                    "{}/{} is external id `{}` of plugin {} as long as it is in use",
                    name.0, name.1, other.external_id, other.plugin
                );
                return Err(Error::new(Kind::AlreadyExists, text));
            }
            _ => {}
        }
        let target = work.target();
        if let Some(target) = target
            && table.targets.get(target).is_some_and(|holder| holder != work.key())
        {
            let text =
                format!("target {target} shows another mount; unmount that first, or choose another target");
            return Err(Error::new(Kind::ClaimConflict, text));
        }
        if let Some(target) = target {
            table.targets.insert(target.to_owned(), work.key().clone());
        }
        table.name(&name, key);
        let (task, taken) = table.task(shared, key, &name);
        taken.names.push(name);
        taken.targets.extend(target.map(str::to_owned));
        // The task leaves its slot before its inbox, under this lock: the message is read.
        let _ = task.send(Message::Ask(work, waiter));
        Ok(())
    }

    /// Have a volume's task go on with a claim.
    pub(super) fn go_on(&self, shared: &Arc<Shared>, key: &VolumeKey, claim: MountKey, uid: u32) {
        self.send(shared, key, &claim.clone(), Message::Continue(claim, uid));
    }

    /// Have a volume's task do what nobody waits for, about `claim`.
    pub(super) fn send(&self, shared: &Arc<Shared>, key: &VolumeKey, claim: &MountKey, message: Message) {
        let mut table = self.lock();
        let name = (claim.namespace.clone(), claim.volume.clone());
        if !table.names.contains_key(&name) {
            table.name(&name, key);
        }
        let (task, taken) = table.task(shared, key, &name);
        taken.names.push(name);
        let _ = task.send(message);
    }

    /// The rows of a volume at rest.
    pub(super) fn at_rest(&self, key: &VolumeKey) -> Option<Volume> {
        match self.lock().slots.get(key) {
            Some(Slot::Rest(volume)) => Some(volume.clone()),
            _ => None,
        }
    }

    /// A volume that rested without its id has it now.
    pub(super) fn identify(&self, nameless: &VolumeKey, volume: Volume) {
        let mut table = self.lock();
        if table.slots.remove(nameless).is_some() {
            let name = (volume.row.namespace.clone(), volume.row.volume.clone());
            table.names.insert(name, volume.row.key.clone());
            table.slots.insert(volume.row.key.clone(), Slot::Rest(volume));
        }
    }

    /// Tell a task that runs; a volume at rest has nobody to be told.
    pub(super) fn tell(&self, key: &VolumeKey, message: Message) {
        if let Some(Slot::Running { task, .. }) = self.lock().slots.get(key) {
            let _ = task.send(message);
        }
    }

    /// Tell the tasks of a plugin's volumes.
    pub(super) fn tell_plugin(&self, plugin: &str, message: impl Fn() -> Message) {
        for (key, slot) in &self.lock().slots {
            if let Slot::Running { task, .. } = slot
                && key.plugin == plugin
            {
                let _ = task.send(message());
            }
        }
    }

    /// Tell every task that runs.
    pub(super) fn tell_all(&self, message: impl Fn() -> Message) {
        for slot in self.lock().slots.values() {
            if let Slot::Running { task, .. } = slot {
                let _ = task.send(message());
            }
        }
    }

    /// Enter a volume that the journal holds; `work`: its rows want something at once.
    pub(super) fn enter(&self, shared: &Arc<Shared>, volume: Volume, work: bool) {
        let mut table = self.lock();
        let key = volume.row.key.clone();
        let name = (volume.row.namespace.clone(), volume.row.volume.clone());
        table.names.insert(name.clone(), key.clone());
        for mount in &volume.mounts {
            table.targets.extend(mount.spec.target.clone().map(|target| (target, mount.key.clone())));
        }
        table.slots.insert(key.clone(), Slot::Rest(volume));
        if work {
            let _ = table.task(shared, &key, &name).0.send(Message::Wake);
        }
    }

    /// A task only waits for its own rows: what they no longer have is anybody's, unless something came in meanwhile.
    pub(super) fn release(&self, key: &VolumeKey, volume: &Volume, inbox: &mpsc::UnboundedReceiver<Message>) {
        let mut table = self.lock();
        if inbox.is_empty() {
            table.release(key, Taken::by(volume));
        }
    }

    /// A task has nothing to do: its rows rest, unless something came in meanwhile.
    pub(super) fn rest(
        &self,
        key: &VolumeKey,
        rows: Journalled,
        inbox: &mpsc::UnboundedReceiver<Message>,
    ) -> Option<Journalled> {
        let mut table = self.lock();
        if !inbox.is_empty() {
            return Some(rows);
        }
        let volume = rows.into_volume();
        table.release(key, Taken::by(&volume));
        table.slots.remove(key);
        if !volume.mounts.is_empty() {
            table.slots.insert(key.clone(), Slot::Rest(volume));
        }
        None
    }
}

impl Table {
    /// From now on the name means this volume. One that is not there yet means nothing: nobody can use it, and its task is
    /// another one than the volume's.
    fn name(&mut self, name: &Name, key: &VolumeKey) {
        if !paths::is_unborn(key) {
            self.names.insert(name.clone(), key.clone());
        }
    }

    /// Give back the names and targets that a running volume took and does not keep.
    fn release(&mut self, key: &VolumeKey, kept: Taken) {
        let Some(Slot::Running { taken, .. }) = self.slots.get_mut(key) else { return };
        for name in taken.names.iter().filter(|name| !kept.names.contains(name)) {
            if self.names.get(name) == Some(key) {
                self.names.remove(name);
            }
        }
        for target in taken.targets.iter().filter(|target| !kept.targets.contains(target)) {
            self.targets.remove(target);
        }
        *taken = kept;
    }

    /// The running task of a volume, started with its rows when there is none.
    fn task(
        &mut self,
        shared: &Arc<Shared>,
        key: &VolumeKey,
        name: &Name,
    ) -> (&mpsc::UnboundedSender<Message>, &mut Taken) {
        let slot = self.slots.remove(key);
        let slot = match slot {
            Some(running @ Slot::Running { .. }) => running,
            Some(Slot::Rest(volume)) => start(shared, volume),
            None => start(shared, Volume::new(key.clone(), &name.0, &name.1)),
        };
        match self.slots.entry(key.clone()).insert_entry(slot).into_mut() {
            Slot::Running { task, taken } => (task, taken),
            Slot::Rest(_) => unreachable!("the slot was made running just now"),
        }
    }
}

fn start(shared: &Arc<Shared>, volume: Volume) -> Slot {
    let (task, inbox) = mpsc::unbounded_channel();
    let taken = Taken::by(&volume);
    tokio::spawn(Task::run(shared.clone(), volume, inbox));
    Slot::Running { task, taken }
}
