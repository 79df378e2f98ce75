//! The sources of volumes that are created: snapshots, and volumes to clone. A source belongs to the caller and to the new volume's
//! namespace (CVE-2019-11255).

use csi_proto::cluster::v1::{CreateAsk, ListExternal, VolumeRow};
use csi_proto::identity::Identity;
use csid::store::registry::{Record, RecordFilter, Registration, Registry, Standing, VolumeName};
use csid::volume::rules;
use csid::{Error, Kind};
use csid_etcd::{EtcdError, Expected, Guard, RowKey};

use crate::cluster::Cluster;
use crate::failure::{Result, ServerError};
use crate::grants::May;
use crate::service::Service;
use crate::volumes::another_owner;

impl Service {
    /// Has a plugin create a volume from a snapshot or as a clone, and registers it for the caller. The same call joins a creation that
    /// goes on.
    pub async fn create_from(&self, caller: &Identity, ask: CreateAsk) -> Result<VolumeRow> {
        let (name, plugin, new) = self.cluster.creation(caller, ask)?;
        if !new.spec.has_source() {
            let text = "a call that creates a volume from a source has no snapshot and no clone";
            return Err(Error::invalid(text).into());
        }
        if !new.spec.clone.is_empty() {
            return self.cluster.reach_creation(caller, &name, (plugin, new), true).await;
        }
        self.cluster.presence.here()?;
        self.cluster.require_unblocked(caller).await?;
        // A creation that goes on has its source.
        let is_new = self.cluster.registry.record(name.clone()).await?.registration.is_none();
        if is_new {
            // A recovering cluster creates nothing, so no plugin is asked for that.
            self.cluster.normal().await?;
            self.check_snapshot(caller, &name.namespace, &plugin, &new.spec.snapshot).await?;
        }
        self.cluster.reach_creation(caller, &name, (plugin, new), is_new).await
    }

    /// Refuses a snapshot that is of no volume of the caller in this namespace. A grant `snapshot` for all namespaces is for each snapshot,
    /// also for those of volumes that are deleted.
    async fn check_snapshot(
        &self,
        caller: &Identity,
        namespace: &str,
        plugin: &str,
        snapshot: &str,
    ) -> Result<()> {
        rules::check_page("", snapshot, "")?;
        if self.cluster.config.grants.allow_everywhere(caller, May::Snapshot) {
            return Ok(());
        }
        let list = ListExternal {
            snapshots: true,
            snapshot: snapshot.to_owned(),
            max: 1,
            ..ListExternal::default()
        };
        // A controller of another namespace could call any snapshot the caller's.
        let listed = self.listed(caller, plugin, list, Some(namespace)).await?;
        let found = listed.snapshots.into_iter().find(|found| found.id == snapshot);
        let is_of_own = match found {
            None => false,
            Some(found) => {
                let filter = RecordFilter {
                    namespace: Some(namespace.to_owned()),
                    plugin: Some(plugin.to_owned()),
                    external_id: Some(found.external_id),
                    ..RecordFilter::default()
                };
                let (records, _) = self.cluster.registry.records(filter).await?;
                records.iter().any(|record| is_own(record, caller))
            }
        };
        match is_of_own {
            true => Ok(()),
            // Which snapshots there are is not the business of a caller without the grant.
            false => {
                let text =
                    format!("the snapshot is of no volume that {caller} has registered in {namespace}");
                Err(ServerError::denied(text))
            }
        }
    }
}

impl Cluster {
    /// Enters the volume to clone into a creation, after a check that the caller may use it. Returns the guard of its record, for the change that
    /// writes the creation's intent. A deletion of the source that was begun before fails by it.
    pub(crate) async fn enter_clone(
        &self,
        caller: &Identity,
        name: &VolumeName,
        plugin: &str,
        new: &mut Registration,
    ) -> Result<Guard> {
        let source = rules::volume_name(&name.namespace, &new.spec.clone)?;
        if source == *name {
            return Err(Error::invalid(format!("{name} is to be a clone of itself")).into());
        }
        let record = self.registry.record(source).await?;
        rules::registered(&record)?;
        if !is_own(&record, caller) {
            return Err(another_owner(&record.name));
        }
        if record.volume.plugin != plugin {
            let text = format!(
                "{} is of plugin {}, and {plugin} cannot clone it",
                record.name, record.volume.plugin
            );
            return Err(Error::invalid(text).into());
        }
        if let Standing::Creating(creation) = &mut new.standing {
            creation.source = Some(record.volume.handle.to_string());
        }
        Ok(Guard { key: RowKey::Volume(record.name), is: Expected::Touched(record.revision) })
    }

    /// Refuses to delete a volume while another one is made from it. The intent of a creation writes the record of its source, so a record that
    /// has changed since then is not deleted. The volume may have another name by then. A volume that cannot be read may be made from it, too.
    pub(crate) async fn refuse_copied(&self, caller: &Identity, record: &Record) -> Result<()> {
        if record.registration.as_ref().is_none_or(|of| of.standing != Standing::Registered) {
            return Ok(());
        }
        self.registry.reached(record.revision).await?;
        let records = self.registry.all_restless().await.map_err(|error| match error {
            // The key has the name of a volume, which may be of another namespace.
            EtcdError::Unreadable { key, why: _ } => {
                tracing::warn!(key, volume = %record.name, "a deletion is refused: a value in etcd cannot be read");
                Error::internal("a volume's record in etcd cannot be read, and may be that of a copy").into()
            }
            error => ServerError::from(error),
        })?;
        let id = record.volume.handle.text();
        let is_copy = |other: &&Record| {
            other.volume.plugin == record.volume.plugin
                && other.volume.handle.is_creating()
                && matches!(other.registration.as_ref().map(|of| &of.standing),
                    Some(Standing::Creating(creation)) if creation.source.as_deref() == Some(&*id))
        };
        match records.iter().find(is_copy) {
            None => Ok(()),
            Some(copy) => {
                // Its name is another namespace's business, unless the caller sees that.
                let shown = self.sees(caller, &copy.name.namespace).then(|| copy.name.to_string());
                let shown = shown.unwrap_or_else(|| "a volume of another namespace".to_owned());
                let text = format!("{shown} is being created from {}", record.name);
                Err(Error::new(Kind::Busy, text).into())
            }
        }
    }
}

fn is_own(record: &Record, caller: &Identity) -> bool {
    record.registration.as_ref().is_some_and(|of| of.owner == caller.to_string())
}
