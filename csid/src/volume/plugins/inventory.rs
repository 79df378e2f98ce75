//! Lists what a plugin has and could have. The controller is asked each time, csid keeps nothing. The lists are no consistent
//! snapshots (CSI rule 40).

use std::collections::BTreeMap;
use std::time::Instant;

use crate::backoff::Backoff;
use crate::error::{Error, Kind, Result};
use crate::fault;
use crate::plugin::{
    CallContext, Can, Controller, External, RpcError, RpcKind, RpcOutcome, Snapshot, restarts_list,
};
use crate::secret::Secrets;
use crate::store::registry::{Capability, Origin, RecordFilter, VolumeSpec};
use crate::store::rows::Usage;
use crate::volume::api::requests::{DeleteSnapshot, ListSnapshots, Page};
use crate::volume::context::Context;
use crate::volume::errors::volume::VolumeError;
use crate::volume::lifecycle::new_registration;
use crate::volume::manager::Volumes;

impl Volumes {
    /// Returns the available capacity in bytes for volumes with these capabilities, parameters and topology.
    pub async fn capacity(
        &self,
        plugin: &str,
        capabilities: Vec<Capability>,
        parameters: BTreeMap<String, String>,
        topology: BTreeMap<String, String>,
    ) -> Result<u64> {
        let any = new_registration(0, VolumeSpec::default(), Origin::Bus);
        let usages: Vec<Usage> = capabilities.into_iter().map(|of| any.usage(of)).collect();
        let (controller, request) = self.shared.asked(plugin, "GetCapacity", 0, None, None).await?;
        Ok(controller.capacity(&usages, &parameters, &topology, request).await?)
    }

    /// Returns a page of the plugin's volumes, and the token of the next page.
    pub async fn external_volumes(&self, plugin: &str, page: Page) -> Result<(Vec<External>, String)> {
        let (controller, request) = self.shared.asked(plugin, "ListVolumes", 0, None, None).await?;
        let listed = controller.volumes(&page.token, page.max, request).await;
        listed.map_err(|error| of_list(error, &page))
    }

    /// Returns a page of the plugin's snapshots, and the token of the next page.
    pub async fn snapshots(&self, plugin: &str, request: ListSnapshots) -> Result<(Vec<Snapshot>, String)> {
        let ListSnapshots { snapshot, external_id, page, uid, secrets, credential } = request;
        let secrets = self.shared.given(secrets, credential, None).await?;
        let (controller, request) =
            self.shared.asked(plugin, "ListSnapshots", uid, secrets.as_ref(), None).await?;
        let listed = controller.snapshots(&snapshot, &external_id, &page.token, page.max, request).await;
        listed.map_err(|error| of_list(error, &page))
    }

    /// Deletes a snapshot, or finds it gone. The call is retried until the plugin has answered, or the operation's time is over.
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
            let (controller, request) =
                self.shared.asked(plugin, "DeleteSnapshot", uid, secrets, Some(give_up)).await?;
            let deleted = controller.delete_snapshot(&snapshot, request);
            let Err(error) = fault::around("DeleteSnapshot", deleted).await else { return Ok(()) };
            let outcome = error.outcome(RpcKind::Controller);
            unknown |= outcome == RpcOutcome::Unknown;
            let wait = delay.next();
            let again = !outcome.is_final();
            if !again || Instant::now() + wait >= give_up {
                let error = Error::from(error);
                let kind = if unknown && again { Kind::Uncertain } else { error.kind };
                return Err(Error { kind, ..error });
            }
            tokio::time::sleep(wait).await;
        }
    }
}

impl Context {
    /// Waits until `deadline` for a controller of the plugin that offers `rpc`. Returns it with the arguments of the request. Returns NotSupported
    /// if no instance of the plugin offers a controller.
    async fn asked<'a>(
        &self,
        plugin: &str,
        rpc: &str,
        uid: u32,
        secrets: Option<&'a Secrets>,
        deadline: Option<Instant>,
    ) -> Result<(Controller, CallContext<'a>)> {
        if self.plugins.view(plugin).is_none() {
            return Err(VolumeError::UnknownPlugin { plugin: plugin.to_owned() }.into());
        }
        if self.plugins.can(plugin, Can::Plugin("CONTROLLER_SERVICE")) == Some(false) {
            return Err(VolumeError::NotOffered {
                plugin: plugin.to_owned(),
                capability: "CONTROLLER_SERVICE",
            }
            .into());
        }
        let operation = self.config.borrow().deadlines.operation;
        let latest = Instant::now() + operation;
        let latest = deadline.map_or(latest, |deadline| deadline.min(latest));
        let controller = self.plugins.controller(plugin, rpc, latest).await?;
        let secrets_forgotten = controller.had_secrets(|| self.may_have_sent_secrets(plugin)).await?;
        let left = |deadline: Instant| deadline.saturating_duration_since(Instant::now()).min(operation);
        let patience = deadline.map_or(operation, left);
        Ok((controller, CallContext { uid, secrets, secrets_forgotten, patience }))
    }

    /// Returns whether the snapshot exists. Fails if it belongs to another uid: the owner of its registered volume owns it
    /// (CVE-2019-11255). Root may use any snapshot, so the result is `true` without a query.
    pub(in crate::volume) async fn is_own_snapshot(
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
        let (controller, request) = self.asked(plugin, "ListSnapshots", uid, secrets, Some(deadline)).await?;
        let Some(found) = controller.find_snapshot(snapshot, request).await? else { return Ok(false) };
        let filter = RecordFilter {
            namespace: namespace.map(str::to_owned),
            plugin: Some(plugin.to_owned()),
            external_id: Some(found.external_id),
            ..RecordFilter::default()
        };
        let (volumes, _) = self.records.registry.records(filter).await?;
        match volumes.iter().flat_map(|record| &record.registration).any(|of| of.uid == uid) {
            true => Ok(true),
            false => Err(VolumeError::NotOwnSnapshot { snapshot: snapshot.to_owned() }.into()),
        }
    }
}

/// Maps the error of a list. A list whose token the plugin no longer accepts begins again (CSI rule 40).
pub(in crate::volume) fn of_list(error: RpcError, page: &Page) -> Error {
    let stale = restarts_list(error.code) && !page.token.is_empty();
    let error = Error::from(error);
    match stale {
        true => Error {
            message: format!("{}; the plugin does not accept the token any more", error.message),
            ..error
        },
        false => error,
    }
}
