//! What a plugin has, and could have: asked of a controller straight away, for csid keeps nothing of it. The lists are no
//! consistent views (CSI rule 40).

use std::collections::BTreeMap;
use std::time::Instant;

use tonic::Code;

use crate::error::{Error, Kind, Result};
use crate::fault;
use crate::plugin::{Class, Controller, External, Request, RpcError, Snapshot};
use crate::secret::Secrets;
use crate::store::registry::{Capability, Origin, RecordFilter, VolumeSpec};
use crate::store::rows::Usage;
use crate::volume::control::Backoff;
use crate::volume::registering::new_registration;
use crate::volume::{Shared, Volumes, claim_words as words, say};

/// Where a list goes on, and how much of it at most; 0: as much as the plugin likes.
pub struct Page {
    pub token: String,
    pub max: u32,
}

/// An empty id stands for any.
pub struct ListSnapshots {
    pub snapshot: String,
    pub external_id: String,
    pub page: Page,
    pub uid: u32,
    pub secrets: Option<Secrets>,
    /// The name of a credential with the secrets.
    pub credential: Option<String>,
}

pub struct DeleteSnapshot {
    pub snapshot: String,
    pub uid: u32,
    pub secrets: Option<Secrets>,
    pub credential: Option<String>,
}

impl Volumes {
    /// How many bytes volumes that are used so could have.
    pub async fn capacity(
        &self,
        plugin: &str,
        capabilities: Vec<Capability>,
        parameters: BTreeMap<String, String>,
        topology: BTreeMap<String, String>,
    ) -> Result<u64> {
        let any = new_registration(0, VolumeSpec::default(), Origin::Bus);
        let usages: Vec<Usage> = capabilities.into_iter().map(|of| any.usage(of)).collect();
        let (controller, request) = self.shared.asked(plugin, 0, None, None).await?;
        Ok(controller.capacity(&usages, &parameters, &topology, request).await?)
    }

    /// A page of the plugin's volumes, and the token of the next.
    pub async fn external_volumes(&self, plugin: &str, page: Page) -> Result<(Vec<External>, String)> {
        let (controller, request) = self.shared.asked(plugin, 0, None, None).await?;
        let listed = controller.volumes(&page.token, page.max, request).await;
        listed.map_err(|error| of_list(error, &page))
    }

    /// A page of the plugin's snapshots, and the token of the next.
    pub async fn snapshots(&self, plugin: &str, request: ListSnapshots) -> Result<(Vec<Snapshot>, String)> {
        let ListSnapshots { snapshot, external_id, page, uid, secrets, credential } = request;
        let secrets = self.shared.given(secrets, credential, None).await?;
        let (controller, request) = self.shared.asked(plugin, uid, secrets.as_ref(), None).await?;
        let listed = controller.snapshots(&snapshot, &external_id, &page.token, page.max, request).await;
        listed.map_err(|error| of_list(error, &page))
    }

    /// One that is not there is deleted. It is repeated until the plugin has answered, or csid's patience ends.
    pub async fn delete_snapshot(&self, plugin: &str, request: DeleteSnapshot) -> Result<()> {
        self.shared.changeable()?;
        let DeleteSnapshot { snapshot, uid, secrets, credential } = request;
        let secrets = self.shared.given(secrets, credential, None).await?;
        let secrets = secrets.as_ref();
        let give_up = Instant::now() + self.shared.config.borrow().deadlines.operation;
        if !self.shared.is_own_snapshot(plugin, None, &snapshot, uid, secrets, give_up).await? {
            return Ok(());
        }
        let mut delay = Backoff::new();
        let mut unknown = false;
        loop {
            let (controller, request) = self.shared.asked(plugin, uid, secrets, Some(give_up)).await?;
            let deleted = controller.delete_snapshot(&snapshot, request);
            let Err(error) = fault::around("DeleteSnapshot", deleted).await else { return Ok(()) };
            unknown |= error.class == Class::Unknown;
            let wait = delay.next();
            let again = matches!(error.class, Class::NotSent | Class::Transient | Class::Unknown);
            if !again || Instant::now() + wait >= give_up {
                let error = Error::from(error);
                let kind = if unknown && again { Kind::Uncertain } else { error.kind };
                return Err(Error { kind, ..error });
            }
            tokio::time::sleep(wait).await;
        }
    }
}

impl Shared {
    /// A controller of the plugin, waited for, and what it is asked with; by `deadline` it is its turn.
    async fn asked<'a>(
        &self,
        plugin: &str,
        uid: u32,
        secrets: Option<&'a Secrets>,
        deadline: Option<Instant>,
    ) -> Result<(Controller, Request<'a>)> {
        if self.plugins.view(plugin).is_none() {
            return Err(say::unknown_plugin(plugin));
        }
        let operation = self.config.borrow().deadlines.operation;
        let latest = Instant::now() + operation;
        let controller =
            self.plugins.controller(plugin, deadline.map_or(latest, |deadline| deadline.min(latest))).await?;
        let secrets_forgotten = controller.had_secrets(|| self.rows_tell_of_secrets(plugin)).await?;
        let left = |deadline: Instant| deadline.saturating_duration_since(Instant::now()).min(operation);
        let patience = deadline.map_or(operation, left);
        Ok((controller, Request { uid, secrets, secrets_forgotten, patience }))
    }

    /// Whether there is such a snapshot; an error where it is another's. It is whose volume it is of (CVE-2019-11255), as long
    /// as that is registered. Root may use any, and is not looked for.
    pub(super) async fn is_own_snapshot(
        &self,
        plugin: &str,
        namespace: Option<&str>,
        snapshot: &str,
        uid: u32,
        secrets: Option<&Secrets>,
        deadline: Instant,
    ) -> Result<bool> {
        if uid == 0 {
            return Ok(true);
        }
        let (controller, request) = self.asked(plugin, uid, secrets, Some(deadline)).await?;
        let (found, _) = controller.snapshots(snapshot, "", "", 1, request).await?;
        let Some(found) = found.into_iter().find(|found| found.id == snapshot) else { return Ok(false) };
        let filter = RecordFilter {
            namespace: namespace.map(str::to_owned),
            plugin: Some(plugin.to_owned()),
            external_id: Some(found.external_id),
            ..RecordFilter::default()
        };
        let (volumes, _) = self.registry.records(filter).await?;
        match volumes.iter().flat_map(|record| &record.registration).any(|of| of.uid == uid) {
            true => Ok(true),
            false => Err(words::not_own_snapshot(snapshot)),
        }
    }
}

/// CSI rule 40: a list whose token the plugin does not go on with begins anew.
fn of_list(error: RpcError, page: &Page) -> Error {
    let stale = error.code == Code::Aborted && !page.token.is_empty();
    let error = Error::from(error);
    match stale {
        true => {
            Error { message: format!("{}; begin the list again, without a token", error.message), ..error }
        }
        false => error,
    }
}
