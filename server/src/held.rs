//! What nodes hold, while the cluster recovers. Their claims come back into etcd, with what is attached for them.

use std::time::Duration;

use csi_proto::cluster::v1::{Held as Answer, HeldClaim, HeldClaims, RefusedClaim};
use csi_proto::identity::Identity;
use csid::store::registry::{
    AttachSecrets, Attachment, Claim, ClaimState, DrivenRpc, Driver, Record, Registry, VolumeName,
};
use csid::store::rows::{Leg, VolumeKey};
use csid::volume::rules::{self, check_name};
use csid::{Error, Kind};
use csid_etcd::EtcdError;

use crate::by_call::attachments;
use crate::cluster::{Cluster, meta_guard, node_guard, not_joined};
use crate::failure::{Result, ServerError};
use crate::grants::May;
use crate::heard::{SaidPage, is_not_recovering};
use crate::names::NodeNames;
use crate::queue;
use crate::random;
use crate::records::TRIES;
use crate::rows::{Mode, NodeRow, Read};

/// The most claims of a page.
const CLAIMS: usize = 64;
/// The longest pause after a change of a volume's record by another node.
const PAUSE: Duration = Duration::from_millis(100);

/// A claim that a node holds, as it was read and checked.
struct Held {
    name: VolumeName,
    volume: VolumeKey,
    claim: Claim,
    /// `None`: the plugin attaches nothing.
    attachment: Option<Attachment>,
}

impl Cluster {
    /// Takes over a page of what a node holds. What etcd has already stays. What excludes other claims is taken over, too: an audit finds it. A claim
    /// that is refused keeps none of the others out, nor the node.
    pub async fn hold(&self, caller: &Identity, page: HeldClaims) -> Result<Answer> {
        self.require_node(caller)?;
        let HeldClaims { boot, generation, claims, last } = page;
        if claims.len() > CLAIMS {
            let text = format!("a page has {} claims, and the limit is {CLAIMS}", claims.len());
            return Err(Error::invalid(text).into());
        }
        // A node that joins once more changes its row. What comes late of an earlier session is refused by that, and not tried again.
        let row =
            self.while_here(self.node_now(&caller.name)).await?.ok_or_else(|| not_joined(&caller.name))?;
        if row.value.boot != boot || !row.value.may_have_sessions() {
            let text = format!("node {} has joined with another boot, or is fenced or blocked", caller.name);
            return Err(Error::new(Kind::Busy, text).into());
        }
        let meta = self.while_here(self.meta_now()).await?;
        if meta.value.generation != generation || meta.value.mode == Mode::Restored {
            return Err(is_not_recovering());
        }
        // The last page alone may come once more after the end.
        if meta.value.mode != Mode::Recovering && !claims.is_empty() {
            return Err(is_not_recovering());
        }
        let named = claims.iter().filter(|of| !of.external_node_id.is_empty());
        let names = named.map(|of| (of.plugin.clone(), of.external_node_id.clone())).collect();
        // A fenced or blocked node may be this machine under an earlier name.
        let others = self.names_of_others(&caller.name, names, |of| of.may_have_sessions);
        let others = self.while_here(others).await?;
        let mut page = SaidPage { generation, ..SaidPage::default() };
        // The others come back meanwhile.
        let mut again = None;
        for of in claims {
            // An empty namespace is a name, too.
            let name = rules::volume_name(&of.namespace, &of.volume);
            let claim = RefusedClaim {
                claim: of.claim.clone(),
                namespace: name.map_or_else(|_| of.namespace.clone(), |name| name.namespace),
                volume: of.volume.clone(),
                consumer: of.consumer.clone(),
                why: String::new(),
            };
            match self.while_here(self.take_over(caller, (&row, &others), of, generation)).await {
                Ok(()) => page.taken.push(claim.claim),
                Err(error) => match why(error) {
                    Ok(why) => page.refused.push(RefusedClaim { why, ..claim }),
                    Err(error @ ServerError::Etcd(_)) => return Err(error),
                    Err(error) => again = again.or(Some(error)),
                },
            }
        }
        page.last = last && again.is_none();
        // The same last word again may come after the end.
        if meta.value.mode == Mode::Recovering {
            self.while_here(self.keep_heard(&caller.name, &row, &meta, &page)).await?;
        }
        match again {
            Some(error) => Err(error),
            None => Ok(Answer { refused: page.refused }),
        }
    }

    /// Reads and checks a claim that a node says to hold.
    fn read_held(&self, caller: &Identity, of: HeldClaim, generation: u64) -> Result<Held, Error> {
        let name = rules::volume_name(&of.namespace, &of.volume)?;
        if !self.config.grants.allow(caller, &name.namespace, May::Mount) {
            let text = format!("{caller} has no grant for mount in namespace {}", name.namespace);
            return Err(Error::new(Kind::NotAuthorized, text));
        }
        for (what, text) in [
            ("claim", &of.claim),
            ("call", &of.call),
            ("consumer", &of.consumer),
            ("plugin", &of.plugin),
            ("granted-boot", &of.granted_boot),
        ] {
            check_name(what, text)?;
        }
        rules::check_external_id(&of.external_id)?;
        let usage = of.usage.ok_or_else(|| Error::invalid("usage is missing"))?;
        let usage = rules::read_use(&usage.mode, &usage.access_mode, &usage.attachment_mode)?;
        let credential = (!of.credential.is_empty()).then_some(of.credential);
        if let Some(credential) = &credential {
            rules::check_credential(&name.namespace, credential)?;
        }
        let for_detach =
            credential.clone().or((!of.volume_credential.is_empty()).then_some(of.volume_credential));
        if let Some(credential) = &for_detach {
            rules::check_credential(&name.namespace, credential)?;
        }
        rules::check_publish_context(&of.publish_context)?;
        let attachment = match of.external_node_id.is_empty() {
            true if !of.publish_context.is_empty() => {
                return Err(Error::invalid("a claim has a publish context of no node"));
            }
            true => None,
            // Nobody could detach it.
            false if !self.config.grants.name_controller(None, &of.plugin) => {
                let text =
                    format!("{name} is attached by plugin {}, and no grant names its controller", of.plugin);
                return Err(Error::new(Kind::NotSupported, text));
            }
            false => {
                rules::check_node_id(&of.external_node_id)?;
                Some(Attachment {
                    node_id: Some(of.external_node_id),
                    publish_context: of.publish_context,
                    boot: Some(of.granted_boot),
                    generation,
                    secrets: Some(AttachSecrets { credential: for_detach, given: false }),
                    ..Attachment::new(&caller.name, Leg::Present)
                })
            }
        };
        let claim = Claim {
            state: ClaimState::Taken,
            kept: true,
            adopted: true,
            by_mount: of.by_mount,
            credential,
            id: of.claim,
            call: format!("{caller}/{}", of.call),
            since_usec: of.since_usec,
            ..rules::new_claim(&of.consumer, &caller.name, of.uid, usage)
        };
        Ok(Held { name, volume: VolumeKey::new(of.plugin, of.external_id), claim, attachment })
    }

    /// Brings a claim back that its node holds. `row`: the node's. `others`: the names of other nodes by plugins.
    async fn take_over(
        &self,
        caller: &Identity,
        (row, others): (&Read<NodeRow>, &NodeNames),
        of: HeldClaim,
        generation: u64,
    ) -> Result<()> {
        let (node, held) = (&caller.name, self.read_held(caller, of, generation));
        for _ in 0..TRIES {
            let here = self.presence.here()?;
            let meta = self.meta().await?;
            if (meta.value.mode, meta.value.generation) != (Mode::Recovering, generation) {
                return match self.meta_now().await?.revision == meta.revision {
                    true => Err(is_not_recovering()),
                    // An old row was in memory.
                    false => continue,
                };
            }
            // A call that comes late is refused as such, whatever it says.
            let held = match &held {
                Ok(held) => held,
                Err(error) => return Err(error.clone().into()),
            };
            let record = self.registry.record(held.name.clone()).await?;
            let after = with_held(&record, held, &row.value, others)?;
            let is_new = after.claims != record.claims;
            let guards = vec![meta_guard(&meta), node_guard(node, row), here.guard()];
            if after == record {
                if self.has_guards(&guards, node, row).await? {
                    return Ok(());
                }
                continue;
            }
            let swapped = self.swap(&record, after, guards).await;
            if swapped.map_err(|error| self.hide_name(caller, error))?.is_some() {
                if is_new {
                    let Claim { consumer, id, .. } = &held.claim;
                    tracing::warn!(node, volume = %held.name, consumer, claim = id, "a claim that etcd lacked was brought back by its node");
                }
                return Ok(());
            }
            self.refuse_joined_again(node, row).await?;
            // Many nodes may hold the volume, and say so at the same moment.
            tokio::time::sleep(PAUSE.mul_f64(random::share())).await;
        }
        let text = format!("the record of a volume that node {node} holds changed {TRIES} times meanwhile");
        // The node goes on with its other claims, and says this one again.
        Err(ServerError::Unavailable(text))
    }

    /// Returns whether the guards hold in etcd now. Fails if the node has joined once more.
    async fn has_guards(&self, guards: &[csid_etcd::Guard], node: &str, row: &Read<NodeRow>) -> Result<bool> {
        let holds = self.broken(guards).await?.is_none();
        if !holds {
            self.refuse_joined_again(node, row).await?;
        }
        Ok(holds)
    }

    /// Fails if a node's row has changed. The node says once more what it holds.
    pub(crate) async fn refuse_joined_again(&self, node: &str, row: &Read<NodeRow>) -> Result<()> {
        match self.has_changed(node, row).await? {
            true => Err(ServerError::Unavailable(format!("the row of node {node} has changed meanwhile"))),
            false => Ok(()),
        }
    }
}

/// Returns why a claim is refused for good. Fails if the same may be tried again.
fn why(error: ServerError) -> Result<String> {
    match error {
        ServerError::Refused(error) => match error.kind {
            Kind::InvalidArgument
            | Kind::NotAuthorized
            | Kind::NotSupported
            | Kind::NotFound
            | Kind::AlreadyExists
            | Kind::ClaimConflict
            | Kind::RateLimited
            | Kind::StateCorrupt => Ok(error.message),
            _ => Err(error.into()),
        },
        // The reason may have a part of a value.
        ServerError::Etcd(EtcdError::Unreadable { key, why: _ }) => {
            Ok(format!("the value of {key} in etcd cannot be read"))
        }
        ServerError::Etcd(error @ (EtcdError::TooLarge { .. } | EtcdError::Twice { .. })) => {
            Ok(error.to_string())
        }
        ServerError::Row(error) => Ok(error.to_string()),
        error => Err(error),
    }
}

/// Returns what is left of a call that the backup has under way, if a node holds the volume. The node's own call had an answer before its claim was
/// granted. Another call may still run, so the next one waits for it. `None`: nothing is left.
fn driver_after(driver: Driver, node: &str) -> Option<Driver> {
    let Some(call) = driver.call.as_ref().filter(|call| call.node == node) else { return Some(driver) };
    let unanswered = match call.rpc {
        DrivenRpc::Publish => driver.unanswered.clone(),
        DrivenRpc::Unpublish => call.id.clone(),
        _ => return Some(driver),
    };
    let left = Driver { server: String::new(), call: None, unanswered, ..driver };
    (!left.unanswered.is_empty()).then_some(left)
}

/// Returns a record with a claim that its node holds, and with what is attached for it.
fn with_held(record: &Record, held: &Held, row: &NodeRow, others: &NodeNames) -> Result<Record> {
    let Held { name, volume, claim, attachment } = held;
    let mut after = queue::without(record.clone(), &claim.call);
    if record.is_empty() {
        after.volume = volume.clone();
    } else if record.volume.handle.is_creating() {
        let text = format!(
            "{name} is being created in etcd, which does not know the volume of the plugin that node {} holds",
            claim.node
        );
        return Err(Error::new(Kind::ClaimConflict, text).into());
    } else if record.volume != *volume {
        let text = format!(
            "{name} is another volume of a plugin in etcd than the one that node {} holds",
            claim.node
        );
        return Err(Error::new(Kind::ClaimConflict, text).into());
    }
    // The end of either would detach the volume, and the other one's node may use it. An operator looks at that before the recovery ends.
    if attachments(record).next().is_some() {
        let text = format!("{name}, which node {} holds, is attached by AttachVolume in etcd", claim.node);
        return Err(Error::new(Kind::ClaimConflict, text).into());
    }
    match record.claim_at(&claim.consumer, &claim.node) {
        // The backup has the claim. A release of it that was asked for is due still.
        Some(present) if present.id == claim.id && present.state != ClaimState::Pending => {}
        Some(present) if present.id == claim.id => {
            let granted = Claim {
                state: ClaimState::Taken,
                kept: true,
                adopted: true,
                error: None,
                blocked: None,
                ..present.clone()
            };
            after.claims.insert(granted);
        }
        // The backup has none, or an earlier one of the consumer, which ended later.
        _ => {
            let capabilities = match &record.registration {
                Some(registration) => registration.spec.capabilities.clone(),
                // Nobody knows them.
                None => vec![claim.usage.capability],
            };
            rules::fits(&capabilities, claim.usage)
                .map_err(|refusal| rules::refused(refusal, name, &claim.consumer))?;
            after.claims.insert(claim.clone());
        }
    }
    // The plugin has refused the deletion since the backup, or has never got it: the volume is in use.
    rules::deletion_refused(&mut after);
    let Some(at) = attachment else { return Ok(after) };
    let plugin = &volume.plugin;
    let is_anothers = at.node_id.as_ref().is_some_and(|id| others.contains(&(plugin.clone(), id.clone())));
    let is_accepted = at.node_id.is_some() && row.accepted_ids.get(plugin) == at.node_id.as_ref();
    if is_anothers && !is_accepted {
        // The other node may be none that this one may see.
        let text =
            format!("node {} holds {name} under a name by plugin {plugin} that another node has", claim.node);
        return Err(Error::new(Kind::NotAuthorized, text).into());
    }
    match row.node_ids.get(plugin) {
        first if first == at.node_id.as_ref() => {}
        // Its plugin may not have begun yet.
        None if row.plugins.get(plugin).is_none_or(|of| of.other_node_id.is_none()) => {
            let text = format!("node {} has not reported its name by plugin {plugin} yet", claim.node);
            return Err(ServerError::Unavailable(text));
        }
        _ => {
            let text = format!(
                "node {} holds {name} under another name by plugin {plugin} than it has reported",
                claim.node
            );
            return Err(Error::new(Kind::NotAuthorized, text).into());
        }
    }
    if let Some(other) = record.attachments.iter().find(|of| of.node != at.node && of.node_id == at.node_id) {
        let text =
            format!("plugin {plugin} has the same name for node {} as for node {}", at.node, other.node);
        return Err(Error::new(Kind::ClaimConflict, text).into());
    }
    let is_there = |of: &&mut Attachment| {
        of.node == at.node
            && of.node_id == at.node_id
            && of.leg == Leg::Present
            && of.publish_context == at.publish_context
    };
    if let Some(present) = after.attachments.iter_mut().find(is_there) {
        present.generation = at.generation;
        // The backup may be from before the node's boot. Another claim of the node may have been granted before it, too.
        if at.boot.as_ref() == Some(&row.boot) {
            present.boot.clone_from(&at.boot);
        }
    } else {
        after.attachments.retain(|of| of.node != at.node);
        after.attachments.push(at.clone());
        after.driver = record.driver.clone().and_then(|driver| driver_after(driver, &claim.node));
    }
    Ok(after)
}

#[cfg(test)]
mod tests {
    use csid::store::registry::DrivenCall;

    use super::*;

    #[test]
    fn call_of_the_holder_alone_has_ended() {
        let driver = |rpc, node: &str, unanswered: &str| Driver {
            server: "s".into(),
            host: "c1".into(),
            call: Some(DrivenCall {
                id: "call".into(),
                rpc,
                node: node.into(),
                consumer: "web".into(),
                node_id: String::new(),
            }),
            unanswered: unanswered.into(),
            deadline_ms: 1,
            sent_usec: 0,
        };
        let unanswered = |rpc, node, before| {
            let left = driver_after(driver(rpc, node, before), "n1")?;
            Some((left.call.is_some(), left.unanswered))
        };
        assert_eq!(unanswered(DrivenRpc::Publish, "n1", ""), None);
        // One before it may still run on the host.
        assert_eq!(unanswered(DrivenRpc::Publish, "n1", "old"), Some((false, "old".into())));
        assert_eq!(unanswered(DrivenRpc::Unpublish, "n1", ""), Some((false, "call".into())));
        for (rpc, node) in [
            (DrivenRpc::Publish, "n2"),
            (DrivenRpc::Unpublish, "n2"),
            (DrivenRpc::Expand, ""),
            (DrivenRpc::Create, ""),
        ] {
            assert_eq!(unanswered(rpc, node, ""), Some((true, String::new())), "{rpc:?} {node}");
        }
    }
}
