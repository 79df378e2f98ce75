//! Registrations, and lists of volumes.

use csi_proto::cluster::v1::{ListAsk, Register, VolumeAsk, VolumePage, VolumeRow};
use csi_proto::identity::Identity;
use csid::cluster::rows::read_spec;
use csid::store::registry::{Conflict, RecordFilter, Registry, RegistryError, VolumeName};
use csid::store::rows::VolumeKey;
use csid::volume::rules;
use csid::{Error, Kind};
use prost::Message;

use crate::cluster::{Cluster, meta_guard};
use crate::failure::{Result, ServerError};
use crate::grants::May;
use crate::view;

const TRIES: usize = 64;
/// The limits of a page: rows that are read together, and bytes that are sent together.
const ROWS: usize = 500;
const BYTES: usize = 1024 * 1024;

/// The volumes of a list.
pub struct List {
    /// `None`: all that the caller may see.
    namespace: Option<String>,
    /// Only volumes with a claim of this node. `None`: all.
    node: Option<String>,
}

impl Cluster {
    /// Registers a volume, or changes its registration.
    pub async fn register(&self, caller: &Identity, ask: Register) -> Result<VolumeRow> {
        let name = rules::volume_name(&ask.namespace, &ask.volume)?;
        self.require(caller, &name.namespace, May::Register)?;
        let spec = read_spec(ask.spec.unwrap_or_default())?;
        rules::check_volume(&ask.plugin, &ask.external_id, &spec)?;
        // The volume's context says which storage gets the secrets.
        if let Some(credential) = &spec.credential {
            rules::check_credential(&name.namespace, credential)?;
        }
        let volume = VolumeKey::new(ask.plugin, ask.external_id);
        let new = rules::new_registration(&caller.to_string(), spec);
        for _ in 0..TRIES {
            let here = self.presence.here()?;
            let meta = self.normal().await?;
            let mut guards = vec![meta_guard(&meta), here.guard()];
            guards.extend(self.unblocked_guard(caller).await?);
            let record = self.registry.record(name.clone()).await?;
            if record.registration.as_ref().is_some_and(|present| present.owner != new.owner) {
                return Err(ServerError::denied(format!("{name} was registered by another identity")));
            }
            let mut after = record.clone();
            if rules::put_registration(&mut after, &volume, &new)?.is_none() {
                return Ok(view::row(&record, caller));
            }
            match self.swap(&record, after, guards).await {
                Ok(Some(after)) => {
                    tracing::info!(%caller, volume = %name, "a volume was registered or changed");
                    return Ok(view::row(&after, caller));
                }
                Ok(None) => {}
                Err(error) => return Err(self.hide_name(caller, error)),
            }
        }
        Err(Error::new(Kind::Busy, format!("the record of {name} changed {TRIES} times meanwhile")).into())
    }

    pub async fn volume(&self, caller: &Identity, ask: VolumeAsk) -> Result<VolumeRow> {
        let name = rules::volume_name(&ask.namespace, &ask.volume)?;
        self.require_sight(caller, &name.namespace)?;
        self.presence.here()?;
        self.require_unblocked(caller).await?;
        let record = self.registry.record(name).await?;
        if record.is_empty() {
            // The error of a volume that is not registered.
            rules::registered(&record)?;
        }
        Ok(view::row(&record, caller))
    }

    /// Returns the pages of volumes after a name. `None` for the name: there are no more.
    pub async fn pages(
        &self,
        caller: &Identity,
        of: &List,
        after: Option<VolumeName>,
    ) -> Result<(Vec<VolumePage>, Option<VolumeName>)> {
        self.presence.here()?;
        self.require_unblocked(caller).await?;
        let filter = RecordFilter {
            namespace: of.namespace.clone(),
            node: of.node.clone(),
            after,
            most: ROWS,
            ..RecordFilter::default()
        };
        let (records, revision) = self.registry.records(filter).await?;
        let last = records.last().filter(|_| records.len() == ROWS).map(|record| record.name.clone());
        let mut pages = Vec::new();
        let (mut page, mut size) = (VolumePage { volumes: Vec::new(), revision }, 0);
        for record in records.iter().filter(|record| self.sees(caller, &record.name.namespace)) {
            let row = view::row(record, caller);
            let bytes = row.encoded_len();
            if size + bytes > BYTES && !page.volumes.is_empty() {
                pages.push(std::mem::replace(&mut page, VolumePage { volumes: Vec::new(), revision }));
                size = 0;
            }
            size += bytes;
            page.volumes.push(row);
        }
        // How many volumes the caller does not see is none of its business.
        if !page.volumes.is_empty() || last.is_none() {
            pages.push(page);
        }
        Ok((pages, last))
    }

    /// Checks what a list asks for. Returns what it is of, and the name to begin after.
    pub fn list_of(&self, caller: &Identity, ask: ListAsk) -> Result<(List, Option<VolumeName>)> {
        if ask.own {
            self.require_node(caller)?;
        }
        let node = ask.own.then(|| caller.name.clone());
        let after = match (ask.after_namespace.is_empty(), ask.after_volume.is_empty()) {
            (true, true) => None,
            _ => Some(rules::volume_name(&ask.after_namespace, &ask.after_volume)?),
        };
        if ask.namespace.is_empty() {
            let sees = [May::Read, May::Mount].map(|may| self.config.grants.allow_anywhere(caller, may));
            return match sees.contains(&true) {
                true => Ok((List { namespace: None, node }, after)),
                false => Err(ServerError::denied(format!("{caller} has no grant for read in any namespace"))),
            };
        }
        rules::check_name("namespace", &ask.namespace)?;
        self.require_sight(caller, &ask.namespace)?;
        Ok((List { namespace: Some(ask.namespace), node }, after))
    }

    /// Returns the error of a registration whose plugin's volume has another name. The name is another namespace's business, unless the
    /// caller sees that.
    fn hide_name(&self, caller: &Identity, error: RegistryError) -> ServerError {
        match error {
            RegistryError::Conflict(Conflict::Taken(name)) if !self.sees(caller, &name.namespace) => {
                Error::new(Kind::AlreadyExists, "the plugin's volume is known under another name already")
                    .into()
            }
            error => error.into(),
        }
    }
}
