//! Snapshots of volumes, as callers ask for them. A wanted snapshot is in the volume's registration, before its plugin is called. Any server
//! goes on with it. The answer stays there until another snapshot of the volume is made or deleted.

use csi_proto::cluster::v1::{DeleteSnapshotAsk, ExternalSnapshot, ListExternal, SnapshotAsk, VolumeRow};
use csi_proto::identity::Identity;
use csid::error::Step;
use csid::store::registry::{
    MadeSnapshot, Record, RecordFilter, Registry, SnapshotTask, SnapshotWish, VolumeName,
};
use csid::volume::rules;
use csid::{Error, Kind};
use tokio::time::Instant;

use crate::cluster::Cluster;
use crate::failure::{Result, ServerError};
use crate::grants::May;
use crate::records::{TRIES, busy};
use crate::service::Service;
use crate::view;
use crate::volumes::another_owner;
use crate::wanted::CONTROLLER;

impl Service {
    /// Has a plugin delete a snapshot of a volume that is the caller's own. The plugin says which volume that is. A snapshot that is not there
    /// is deleted already.
    pub async fn delete_snapshot(&self, caller: &Identity, ask: DeleteSnapshotAsk) -> Result<VolumeRow> {
        rules::check_name("plugin", &ask.plugin)?;
        rules::check_name("call", &ask.call)?;
        rules::check_page("", &ask.snapshot, "")?;
        // A plugin without an ID to look for lists all that it has.
        if ask.snapshot.is_empty() {
            return Err(Error::invalid("snapshot is missing").into());
        }
        if !self.cluster.config.grants.allow_anywhere(caller, May::Snapshot) {
            return Err(ServerError::denied(format!("{caller} has no grant for snapshot")));
        }
        self.cluster.presence.here()?;
        self.cluster.require_unblocked(caller).await?;
        // A recovering cluster deletes nothing, so no plugin is asked for that.
        self.cluster.normal().await?;
        let list = ListExternal {
            snapshots: true,
            snapshot: ask.snapshot.clone(),
            max: 1,
            ..ListExternal::default()
        };
        let listed = self.listed(caller, &ask.plugin, list, None).await?;
        // Only an empty list proves that it is not there.
        let is_empty = listed.snapshots.is_empty() && listed.next.is_empty();
        let found = match listed.snapshots.into_iter().find(|found| found.id == ask.snapshot) {
            Some(found) => found,
            None if is_empty => return Ok(VolumeRow::default()),
            None => {
                let DeleteSnapshotAsk { plugin, snapshot, .. } = &ask;
                let text =
                    format!("{plugin} was asked for the snapshot {snapshot} alone, and it lists others");
                return Err(Error::new(Kind::PluginError, text).into());
            }
        };
        let filter = RecordFilter {
            plugin: Some(ask.plugin.clone()),
            external_id: Some(found.external_id),
            ..RecordFilter::default()
        };
        let (records, _) = self.cluster.registry.records(filter).await?;
        // Which volumes there are is not the business of a caller without the grant.
        let may = |record: &&Record| {
            self.cluster.config.grants.allow(caller, &record.name.namespace, May::Snapshot)
                && record.registration.as_ref().is_some_and(|of| of.owner == caller.to_string())
        };
        let Some(record) = records.iter().find(may) else {
            let text = format!("the snapshot is of no volume that {caller} has registered");
            return Err(ServerError::denied(text));
        };
        let what = SnapshotWish::Delete { snapshot: ask.snapshot };
        self.cluster.reach_snapshot(caller, &record.name, wanted(caller, ask.call, what), true).await
    }
}

fn wanted(caller: &Identity, call: String, what: SnapshotWish) -> SnapshotTask {
    SnapshotTask {
        call: format!("{caller}/{call}"),
        what,
        unasked: true,
        made: None,
        error: None,
        is_over: false,
    }
}

impl Cluster {
    /// Has a plugin make a snapshot of a volume that is the caller's own.
    pub async fn snapshot(&self, caller: &Identity, ask: SnapshotAsk) -> Result<VolumeRow> {
        let name = rules::volume_name(&ask.namespace, &ask.volume)?;
        self.require(caller, &name.namespace, May::Snapshot)?;
        rules::check_snapshot(&ask.name, &ask.parameters)?;
        rules::check_name("call", &ask.call)?;
        let what = SnapshotWish::Create { name: ask.name, parameters: ask.parameters };
        self.reach_snapshot(caller, &name, wanted(caller, ask.call, what), !ask.no_wait).await
    }

    /// Writes what is wanted, and waits until it is so. When that takes too long it goes on, and the same call joins it. `until_ready`: the
    /// caller waits until the snapshot can be used.
    async fn reach_snapshot(
        &self,
        caller: &Identity,
        name: &VolumeName,
        mut task: SnapshotTask,
        until_ready: bool,
    ) -> Result<VolumeRow> {
        let begun = Instant::now();
        let mut driven = self.subscribe_driven(name);
        let (mut tries, mut has_begun) = (0, false);
        while tries < TRIES {
            driven.borrow_and_update();
            let record = match has_begun {
                // A call that is replaced does not replace the other one in turn.
                true => self.own_snapshot(name, &task).await?,
                false => match self.begin_snapshot(caller, name, &task).await? {
                    Some((record, call)) => {
                        task.call = call;
                        record
                    }
                    None => {
                        tries += 1;
                        continue;
                    }
                },
            };
            has_begun = true;
            let present = record.registration.as_ref().and_then(|of| of.snapshot.as_deref());
            let present = present.ok_or_else(|| Error::internal("a snapshot is not in its record"))?;
            if let Some(error) = present.error.as_ref().filter(|_| present.is_over) {
                let kind = Kind::read(&error.kind).unwrap_or(Kind::PluginError);
                let error = Error::new(kind, error.message.clone());
                return Err(error.with(|details| details.step = Some(Step::Snapshot)).into());
            }
            if present.is_over || (!until_ready && present.made.is_some()) {
                let snapshot = present.made.as_ref().map(shown);
                return Ok(VolumeRow { snapshot, ..view::row(&record, caller) });
            }
            if begun.elapsed() >= CONTROLLER {
                return Err(not_yet(name, present));
            }
            self.wake(name);
            tokio::select! {
                _ = driven.changed() => {}
                // Another server may call the controller.
                changed = self.changed_elsewhere(name, record.revision) => changed?,
                () = self.presence.stopped() => return Err(self.presence.cut_off()),
                () = tokio::time::sleep_until(begun + CONTROLLER) => {}
            }
        }
        Err(busy(name))
    }

    /// Returns the record with a call's intent. Fails with Busy if another call has taken its place.
    async fn own_snapshot(&self, name: &VolumeName, task: &SnapshotTask) -> Result<Record> {
        let record = self.registry.record(name.clone()).await?;
        let present = rules::registered(&record)?.snapshot.as_deref();
        match present.is_some_and(|present| present.call == task.call) {
            true => Ok(record),
            false => {
                let text = format!("another call for a snapshot of {name} has taken the place of this one");
                Err(Error::new(Kind::Busy, text).into())
            }
        }
    }

    /// Writes the intent, or joins a call that goes on. Returns the record with it, and the name of the call that goes on. `None`: the record or
    /// a row has changed meanwhile.
    async fn begin_snapshot(
        &self,
        caller: &Identity,
        name: &VolumeName,
        task: &SnapshotTask,
    ) -> Result<Option<(Record, String)>> {
        let guards = self.guards_of(caller).await?;
        let record = self.registry.record(name.clone()).await?;
        if record.registration.as_ref().is_some_and(|present| present.owner != caller.to_string()) {
            return Err(another_owner(name));
        }
        let mut after = record.clone();
        let call = rules::begin_snapshot(&mut after, task)?;
        if after == record {
            return Ok(Some((record, call)));
        }
        if !rules::is_unfinished(&record) {
            self.refuse_more_unfinished(caller).await?;
        }
        let swapped = self.swap(&record, after, guards).await?;
        if swapped.is_some() {
            tracing::info!(%caller, volume = %name, "a snapshot is to be made or deleted");
        }
        Ok(swapped.map(|record| (record, call)))
    }
}

fn shown(made: &MadeSnapshot) -> ExternalSnapshot {
    ExternalSnapshot {
        id: made.id.clone(),
        external_id: made.external_id.clone(),
        size: made.size,
        created_usec: made.created_usec,
        ready: made.ready,
    }
}

/// Returns the error of a snapshot that takes longer than its caller may wait. It goes on.
fn not_yet(name: &VolumeName, task: &SnapshotTask) -> ServerError {
    let last = task.error.as_ref().map(|error| format!("; the last try: {}", error.message));
    let text = match (&task.what, &task.made) {
        (SnapshotWish::Delete { .. }, _) => format!("a snapshot of {name} is not deleted yet"),
        (SnapshotWish::Create { .. }, None) => format!("a snapshot of {name} is not made yet"),
        (SnapshotWish::Create { .. }, Some(_)) => format!("a snapshot of {name} is not ready yet"),
    };
    let text = format!("{text}, and the servers go on{}", last.unwrap_or_default());
    Error::new(Kind::TimedOut, text).with(|details| details.step = Some(Step::Snapshot)).into()
}
