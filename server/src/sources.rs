//! The sources of volumes that are created: snapshots, and volumes to clone. A source belongs to the caller and to the new volume's
//! namespace (CVE-2019-11255).

use csi_proto::cluster::v1::{CreateAsk, ListExternal, VolumeRow};
use csi_proto::identity::Identity;
use csid::Error;
use csid::store::registry::{Record, RecordFilter, Registry, Standing, VolumeName, VolumeSpec};
use csid::volume::rules;

use crate::failure::{Result, ServerError};
use crate::grants::May;
use crate::service::Service;
use crate::volumes::another_owner;

impl Service {
    /// Has a plugin create a volume from a snapshot or as a clone, and registers it for the caller. The same call joins a creation that
    /// goes on.
    pub async fn create_from(&self, caller: &Identity, ask: CreateAsk) -> Result<VolumeRow> {
        let (name, plugin, mut new) = self.cluster.creation(caller, ask)?;
        if !new.spec.has_source() {
            let text = "a call that creates a volume from a source has no snapshot and no clone";
            return Err(Error::invalid(text).into());
        }
        self.cluster.presence.here()?;
        self.cluster.require_unblocked(caller).await?;
        // A creation that goes on has its source.
        let is_new = self.cluster.registry.record(name.clone()).await?.registration.is_none();
        if is_new {
            // A recovering cluster creates nothing, so no plugin is asked for that.
            self.cluster.normal().await?;
            let source = self.find_source(caller, &name, &plugin, &new.spec).await?;
            if let Standing::Creating(creation) = &mut new.standing {
                creation.source = source;
            }
        }
        self.cluster.reach_creation(caller, &name, (plugin, new), is_new).await
    }

    /// Returns the plugin's ID of the volume to clone, after a check that the source may be used. `None`: the source is a snapshot.
    async fn find_source(
        &self,
        caller: &Identity,
        name: &VolumeName,
        plugin: &str,
        spec: &VolumeSpec,
    ) -> Result<Option<String>> {
        if spec.clone.is_empty() {
            return self.check_snapshot(caller, &name.namespace, plugin, &spec.snapshot).await.map(|()| None);
        }
        let source = rules::volume_name(&name.namespace, &spec.clone)?;
        let record = self.cluster.registry.record(source).await?;
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
        Ok(Some(record.volume.handle.to_string()))
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

fn is_own(record: &Record, caller: &Identity) -> bool {
    record.registration.as_ref().is_some_and(|of| of.owner == caller.to_string())
}
