//! AttachVolume and DetachVolume, as callers ask for them: for a scheduler that keeps its own claims. The intent is written here, and the caller
//! waits for the outcome. An attachment has no claim, and lives until it is detached.

use std::time::Duration;

use csi_proto::cluster::v1::{AttachAsk, DetachAsk, VolumeRow};
use csi_proto::identity::Identity;
use csid::error::Step;
use csid::store::registry::{AskedAttach, Attachment, Blocked, Record, Registry, VolumeName};
use csid::store::rows::Leg;
use csid::volume::rules;
use csid::{Error, Kind};
use csid_etcd::{Guard, RowKey};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::by_call::{
    attach_again, attachment, attachments, detach, end, failure_name, forget, is_ended, is_forgotten,
    is_of_backup, meant, name_of_call, remove, set_keeper, unfinished,
};
use crate::cluster::{Cluster, Driven, is_in_state, meta_guard, node_guard, not_joined};
use crate::controllers::plugin_guard;
use crate::failure::{Result, ServerError};
use crate::grants::May;
use crate::random;
use crate::records::{TRIES, busy};
use crate::rows::{ATTACHES_BY_CALL, NodeState};
use crate::view;
use crate::volumes::holders_of;
use crate::wanted::CONTROLLER;

/// The pause before an attach that has come to nothing is begun again.
const PAUSE: Duration = Duration::from_secs(1);
/// The limit of attachments of one volume.
const OF_VOLUME: usize = 256;
/// The limit of attachments of one identity by one plugin that are being made or removed.
const UNFINISHED: usize = 100;

/// What a call has seen of an attachment.
#[derive(Default)]
struct Progress {
    /// How many attachments of the volume had ended when the record was read first. `None`: it was not read yet.
    ended: Option<u64>,
    /// The attachment that the call has begun or joined was there.
    has_begun: bool,
    /// The call has had a call tried again that the plugin has refused, or one that a backup has half done.
    has_asked: bool,
    /// Why the attach has failed, as far as the record says it.
    error: Option<Error>,
    failed: bool,
}

impl Cluster {
    /// Has a volume's controller attach it to a node. The same call joins what goes on.
    pub async fn attach(&self, caller: &Identity, ask: AttachAsk) -> Result<VolumeRow> {
        let name = rules::volume_name(&ask.namespace, &ask.volume)?;
        self.require(caller, &name.namespace, May::Attach)?;
        rules::check_node_id(&ask.node_id)?;
        rules::check_name("call", &ask.call)?;
        let begun = Instant::now();
        let _asking = self.asks.begin(&name_of_call(&caller.to_string(), &name, &ask.node_id), None);
        let mut driven = self.subscribe_driven(&name);
        let (mut tries, mut progress, mut try_begun) = (0, Progress::default(), begun);
        while tries < TRIES {
            driven.borrow_and_update();
            if begun.elapsed() >= CONTROLLER && !progress.has_begun {
                return Err(too_late(&name, Step::Attach));
            }
            let is_begun = progress.has_begun || progress.has_asked;
            let tried = self.try_attach(caller, &name, &ask, &mut progress).await;
            let Some(record) = tried.map_err(|error| if is_begun { error.of_begun() } else { error })? else {
                tries += 1;
                continue;
            };
            let at = attachment(&record, &ask.node_id);
            match at.map(|at| at.leg) {
                Some(Leg::Present) => {
                    let attached = at.map(|at| view::attached(at, caller));
                    return Ok(VolumeRow { attached, ..view::row(&record, caller) });
                }
                Some(Leg::Making) if !progress.failed => progress.has_begun = true,
                Some(Leg::Removing | Leg::Absent) if progress.has_begun => {
                    progress.failed = true;
                    // Later errors are those of the detach that undoes it.
                    progress.error = progress.error.or_else(|| error_of(at));
                }
                None if !progress.has_begun => {}
                None | Some(Leg::Making) => {
                    let error = self.not_attached(&name, &ask, try_begun, &progress);
                    if !error.details.retryable || begun.elapsed() >= CONTROLLER {
                        return Err(error.into());
                    }
                    // Nothing is left of that try, and the caller still waits.
                    progress = Progress { ended: progress.ended, ..Progress::default() };
                    try_begun = Instant::now();
                    tokio::time::sleep(PAUSE).await;
                    continue;
                }
                Some(_) => {}
            }
            if let Some(error) = blocked(&record, &ask.node_id).filter(|_| progress.has_asked) {
                return Err(error);
            }
            if begun.elapsed() >= CONTROLLER {
                if progress.failed {
                    return Err(self.not_attached(&name, &ask, try_begun, &progress).into());
                }
                if !self.withdraw_attach(&record, &ask.node_id).await? {
                    tries += 1;
                    continue;
                }
                let error = late(&record, at, &ask.node_id, Step::Attach);
                if at.is_some_and(|at| at.uncalled) {
                    // The same call may wait here, too.
                    self.note_failure(&failure_name(&name, &ask.node_id), error.clone());
                }
                return Err(error.into());
            }
            self.wait_for_attachment(&record, &mut driven, begun).await?;
        }
        Err(busy(&name))
    }

    /// Has a volume's controller detach it from a node. What is not attached is detached already. A call without an ID changes nothing: its answer
    /// has the attachment that the next call names. So no try ends an attachment that was made since.
    pub async fn detach(&self, caller: &Identity, ask: DetachAsk) -> Result<VolumeRow> {
        let name = rules::volume_name(&ask.namespace, &ask.volume)?;
        self.require(caller, &name.namespace, May::Attach)?;
        if ask.forget {
            // It is said that the node has the volume no more, whatever the plugin says.
            self.require(caller, &name.namespace, May::ReleaseOthers)?;
            self.require(caller, &name.namespace, May::Fence)?;
        }
        rules::check_node_id(&ask.node_id)?;
        if ask.id.is_empty() {
            return self.to_be_detached(caller, &name, &ask).await;
        }
        rules::check_name("attachment", &ask.id)?;
        let begun = Instant::now();
        let mut driven = self.subscribe_driven(&name);
        let (mut tries, mut has_asked) = (0, false);
        while tries < TRIES {
            driven.borrow_and_update();
            if begun.elapsed() >= CONTROLLER && !has_asked {
                return Err(too_late(&name, Step::Detach));
            }
            let is_begun = has_asked;
            let tried = self.try_detach(caller, &name, &ask, &mut has_asked).await;
            let Some(record) = tried.map_err(|error| if is_begun { error.of_begun() } else { error })? else {
                tries += 1;
                continue;
            };
            let Some(at) = meant(&record, &ask.node_id, &ask.id) else {
                return Ok(view::row(&record, caller));
            };
            if let Some(error) = blocked(&record, &ask.node_id).filter(|_| has_asked) {
                return Err(error);
            }
            if begun.elapsed() >= CONTROLLER {
                return Err(late(&record, Some(at), &ask.node_id, Step::Detach).into());
            }
            self.wait_for_attachment(&record, &mut driven, begun).await?;
        }
        Err(busy(&name))
    }

    /// Returns a volume with the attachment that a detach of the caller would end. None there: nothing is attached to the node.
    async fn to_be_detached(
        &self,
        caller: &Identity,
        name: &VolumeName,
        ask: &DetachAsk,
    ) -> Result<VolumeRow> {
        self.require_unblocked(caller).await?;
        let record = self.while_here(async { Ok(self.registry.record(name.clone()).await?) }).await?;
        let Some(at) = attachment(&record, &ask.node_id) else {
            rules::refuse_claimed(&record).map_err(|error| holders_of(&record, error))?;
            if ask.forget {
                let text = format!("AttachVolume has attached {name} to no node {}", ask.node_id);
                return Err(Error::not_found(text).into());
            }
            return Ok(view::row(&record, caller));
        };
        self.refuse_anothers(caller, name, at)?;
        let attached = (!is_forgotten(at)).then(|| view::attachment(at, caller));
        Ok(VolumeRow { attached, ..view::row(&record, caller) })
    }

    /// Refuses a caller that may not end another identity's attachment.
    fn refuse_anothers(&self, caller: &Identity, name: &VolumeName, at: &Attachment) -> Result<()> {
        let is_own = at.asked.as_ref().is_some_and(|asked| asked.owner == caller.to_string());
        match is_own || self.config.grants.allow(caller, &name.namespace, May::ReleaseOthers) {
            true => Ok(()),
            false => Err(another_attacher(name, at.node_id.as_deref().unwrap_or_default())),
        }
    }

    /// Waits for a change of a record, or until the caller's time is over.
    async fn wait_for_attachment(
        &self,
        record: &Record,
        driven: &mut watch::Receiver<Driven>,
        begun: Instant,
    ) -> Result<()> {
        self.wake(&record.name);
        tokio::select! {
            _ = driven.changed() => Ok(()),
            // Another server may call the controller.
            changed = self.changed_elsewhere(&record.name, record.revision) => changed,
            () = self.presence.stopped() => Err(self.presence.cut_off()),
            () = tokio::time::sleep_until(begun + CONTROLLER) => Ok(()),
        }
    }

    /// Refuses an attach again to a node that takes no volume now. Returns the guard of its row. `None`: no node has the name.
    async fn refuse_unready(&self, plugin: &str, at: &Attachment) -> Result<Option<Guard>> {
        let node = match at.node.as_str() {
            "" => self.node_of_id(plugin, at.node_id.as_deref().unwrap_or_default()).await?,
            node => Some(node.to_owned()),
        };
        let Some(node) = node else { return Ok(None) };
        match self.node_now(&node).await? {
            Some(row) if row.value.state == NodeState::Ready => Ok(Some(node_guard(&node, &row))),
            Some(row) => Err(is_in_state(&node, row.value.state)),
            None => Err(not_joined(&node)),
        }
    }

    /// Writes the intent of an attach, or joins the one that goes on. Returns the record. `None`: it or a row has changed since it was read.
    async fn try_attach(
        &self,
        caller: &Identity,
        name: &VolumeName,
        ask: &AttachAsk,
        progress: &mut Progress,
    ) -> Result<Option<Record>> {
        let here = self.presence.here()?;
        let meta = self.normal().await?;
        if meta.value.schema < ATTACHES_BY_CALL {
            let text = format!(
                "the values in etcd have version {}, and AttachVolume needs version {ATTACHES_BY_CALL}",
                meta.value.schema
            );
            return Err(Error::new(Kind::NotSupported, text).into());
        }
        let mut guards = vec![meta_guard(&meta), here.guard()];
        guards.extend(self.unblocked_guard(caller).await?);
        let record = self.registry.record(name.clone()).await?;
        rules::registered(&record)?;
        let wanted = rules::new_attach(&record, ask.read_only, &ask.access_mode, &ask.attachment_mode)?;
        let ended = &record.ended_attaches;
        let has_ended = *progress.ended.get_or_insert(ended.number) != ended.number;
        let mut after = record.clone();
        if let Some(at) = attachment(&record, &ask.node_id) {
            if is_forgotten(at) {
                return Ok(Some(record));
            }
            let asked = at.asked.as_ref();
            if asked.is_none_or(|asked| asked.owner != caller.to_string()) {
                return Err(another_attacher(name, &ask.node_id));
            }
            let is_of_backup = is_of_backup(at, meta.value.generation);
            if (at.leg != Leg::Removing || is_of_backup)
                && let Some(present) = &at.by_call
            {
                rules::refuse_attached_otherwise(name, &ask.node_id, present, &wanted)?;
            }
            let is_blocked = asked.is_some_and(|asked| asked.blocked.is_some());
            match at.leg {
                Leg::Making if at.uncalled && asked.is_some_and(|asked| asked.keeper != here.id) => {
                    set_keeper(&mut after, &ask.node_id, &here.id);
                }
                _ if progress.has_asked || progress.has_begun => return Ok(Some(record)),
                // The volume may have been detached since the backup, or attached with another context.
                leg if is_of_backup && (leg != Leg::Making || is_blocked) => {
                    let of_node = self.refuse_unready(&record.volume.plugin, at).await?;
                    guards.extend(of_node.filter(|guard| !guards.contains(guard)));
                    attach_again(&mut after, &ask.node_id);
                }
                Leg::Removing if is_blocked => {
                    end(&mut after, &ask.node_id);
                }
                _ => return Ok(Some(record)),
            }
            let swapped = self.swap(&record, after, guards).await?;
            progress.has_asked |= (is_blocked || is_of_backup) && swapped.is_some();
            return Ok(swapped);
        }
        if progress.has_begun {
            return Ok(Some(record));
        }
        if has_ended || ended.calls.contains(&ask.call) {
            // What this call or its repeat has made may have been detached. Nobody would detach it again.
            let text =
                format!("{name} was not attached to {}: it was detached since the call began", ask.node_id);
            return Err(Error::new(Kind::Busy, text).into());
        }
        rules::refuse_claimed(&record).map_err(|error| holders_of(&record, error))?;
        rules::refuse_expanding(&record)?;
        if attachments(&record).count() >= OF_VOLUME {
            let text = format!("{name} has {OF_VOLUME} attachments by AttachVolume, the limit");
            return Err(Error::new(Kind::RateLimited, text).into());
        }
        let plugin = &record.volume.plugin;
        self.refuse_more_attachments(caller, plugin, meta.value.generation).await?;
        let node = self.node_of_id(plugin, &ask.node_id).await?;
        let row = match &node {
            Some(node) => self.node(node).await?,
            None => None,
        };
        let around = self.around_row(&record, row).await?;
        if !around.has_controllers {
            return match self.has_changed_plugin(plugin, &around).await? {
                true => Ok(None),
                false => Err(self.no_controller(name, plugin)),
            };
        }
        guards.push(plugin_guard(plugin, around.plugin.as_ref()));
        if let (Some(node), Some(row)) = (&node, &around.node) {
            if row.value.state != NodeState::Ready {
                return match self.has_changed(node, row).await? {
                    true => Ok(None),
                    false => Err(is_in_state(node, row.value.state)),
                };
            }
            let reported = row.value.plugins.get(plugin).and_then(|of| of.node_id.as_ref());
            let accepted = row.value.accepted_ids.get(plugin);
            if ![reported, accepted].contains(&Some(&ask.node_id)) {
                // The names are those of another row. They are read again when the change has come.
                self.forget(&RowKey::Node(node.clone()));
                return Ok(None);
            }
            if let Some(error) = self.refuse_limit(&record, node, &row.value).await? {
                return Err(error.into());
            }
            let guard = node_guard(node, row);
            if !guards.contains(&guard) {
                guards.push(guard);
            }
        }
        let asked = AskedAttach {
            id: random::name(),
            owner: caller.to_string(),
            call: ask.call.clone(),
            keeper: here.id.clone(),
            generation: meta.value.generation,
            ..AskedAttach::default()
        };
        after.attachments.push(Attachment {
            node_id: Some(ask.node_id.clone()),
            uncalled: true,
            by_call: Some(wanted),
            asked: Some(asked),
            ..Attachment::new(node.as_deref().unwrap_or_default(), Leg::Making)
        });
        let swapped = self.swap(&record, after, guards).await?;
        if swapped.is_some() {
            tracing::info!(%caller, volume = %name, node_id = ask.node_id, "a volume is to be attached");
        }
        Ok(swapped)
    }

    /// Removes the row of an attachment for which no call was made in the caller's time. Returns `false` if the record has changed.
    async fn withdraw_attach(&self, record: &Record, node_id: &str) -> Result<bool> {
        let (here, meta) = (self.presence.here()?, self.meta().await?);
        let is_kept = |at: &Attachment| at.asked.as_ref().is_some_and(|asked| asked.keeper == here.id);
        // A caller that waits at another server has made that one the keeper.
        // The call may have been made since a backup.
        let may_be_there = |at: &Attachment| !at.uncalled || is_of_backup(at, meta.value.generation);
        if attachment(record, node_id).is_none_or(|at| may_be_there(at) || !is_kept(at)) {
            return Ok(true);
        }
        let mut after = record.clone();
        remove(&mut after, node_id);
        Ok(self.swap_granting(record, after, vec![meta_guard(&meta), here.guard()]).await?.is_some())
    }

    /// Writes that a volume is to be detached, or joins the detach that goes on. Returns the record. `None`: it or a row has changed since it was
    /// read.
    async fn try_detach(
        &self,
        caller: &Identity,
        name: &VolumeName,
        ask: &DetachAsk,
        has_asked: &mut bool,
    ) -> Result<Option<Record>> {
        let here = self.presence.here()?;
        let meta = self.normal().await?;
        let mut guards = vec![meta_guard(&meta), here.guard()];
        guards.extend(self.unblocked_guard(caller).await?);
        let record = self.registry.record(name.clone()).await?;
        // The caller may have attached the volume again since the one that is meant has ended.
        let Some(at) = meant(&record, &ask.node_id, &ask.id) else { return Ok(Some(record)) };
        if *has_asked {
            return Ok(Some(record));
        }
        self.refuse_anothers(caller, name, at)?;
        if ask.forget && at.leg != Leg::Removing {
            let state = view::leg(at.leg);
            let text = format!(
                "the attachment of {name} to {} is {state}, and one that is detaching may be forgotten",
                ask.node_id
            );
            return Err(Error::new(Kind::Busy, text).into());
        }
        let is_blocked = at.asked.as_ref().is_some_and(|asked| asked.blocked.is_some());
        if at.leg == Leg::Removing && is_ended(at) && !ask.forget && !is_blocked {
            *has_asked = true;
            return Ok(Some(record));
        }
        let mut after = record.clone();
        match ask.forget {
            true => forget(&mut after, &ask.node_id),
            false => detach(&mut after, &ask.node_id, meta.value.generation),
        }
        let swapped = self.swap_granting(&record, after, guards).await?;
        if swapped.is_some() {
            *has_asked = true;
            if ask.forget {
                tracing::warn!(%caller, volume = %name, node_id = ask.node_id, "an attachment was forgotten");
            }
        }
        Ok(swapped)
    }

    /// Refuses a caller with as many attachments of a plugin under way as it may have. Another plugin that hangs does not count.
    async fn refuse_more_attachments(&self, caller: &Identity, plugin: &str, generation: u64) -> Result<()> {
        let owner = caller.to_string();
        let own = |record: &Record| unfinished(record, &owner, plugin, generation);
        let records = self.registry.attached_by_call(|record| own(record) > 0).await?;
        let count: usize = records.iter().map(own).sum();
        match count >= UNFINISHED {
            false => Ok(()),
            true => {
                let text = format!(
                    "{count} attachments of {caller} by plugin {plugin} are being made or removed, the limit"
                );
                Err(Error::new(Kind::RateLimited, text).into())
            }
        }
    }

    /// Returns why an attach came to nothing.
    fn not_attached(&self, name: &VolumeName, ask: &AttachAsk, begun: Instant, progress: &Progress) -> Error {
        let known = self.failure_since(&failure_name(name, &ask.node_id), begun);
        let recorded = || {
            let (kind, why) = match &progress.error {
                Some(error) => (error.kind, &*error.message),
                None => (Kind::PluginError, "it was detached meanwhile, or another server knows the failure"),
            };
            Error::new(kind, format!("{name} was not attached to {}: {why}", ask.node_id))
        };
        known.unwrap_or_else(recorded).with(|details| details.step = Some(Step::Attach))
    }
}

/// Returns how the last call for an attachment has failed. `None`: it has not, or no call was made.
fn error_of(at: Option<&Attachment>) -> Option<Error> {
    let asked = at?.asked.as_ref()?;
    Some(Error::new(kind_of_error(asked), asked.error.clone()?))
}

/// Returns the kind of the error of the last call.
fn kind_of_error(asked: &AskedAttach) -> Kind {
    Kind::read(&asked.error_kind).unwrap_or(Kind::PluginError)
}

/// Returns the error of a call that the plugin refuses. `None`: it does not.
fn blocked(record: &Record, node_id: &str) -> Option<ServerError> {
    let at = attachment(record, node_id)?;
    let asked = at.asked.as_ref()?;
    let Blocked { reason } = asked.blocked.as_ref()?;
    let kind = kind_of_error(asked);
    let (what, step) = match at.leg {
        Leg::Making => ("attached to", Step::Attach),
        Leg::Absent | Leg::Present | Leg::Removing => ("detached from", Step::Detach),
    };
    let text = format!("{} is not {what} {node_id}: {reason}", record.name);
    Some(Error::new(kind, text).with(|details| details.step = Some(step)).into())
}

/// Returns the error of an attachment that another identity has made.
fn another_attacher(name: &VolumeName, node_id: &str) -> ServerError {
    ServerError::denied(format!("another identity has attached {name} to {node_id}"))
}

/// Returns the error of a call for which nothing was done in its time. Its caller may have attached the volume again since.
fn too_late(name: &VolumeName, step: Step) -> ServerError {
    let text = format!("{name}: the servers have not begun in {} s", CONTROLLER.as_secs());
    Error::new(Kind::TimedOut, text).with(|details| details.step = Some(step)).into()
}

/// Returns the error of a call that takes longer than its caller may wait. `at`: the attachment as the record has it.
fn late(record: &Record, at: Option<&Attachment>, node_id: &str, step: Step) -> Error {
    let name = &record.name;
    let last = error_of(at).map(|error| format!("; the last try: {}", error.message)).unwrap_or_default();
    let text = match at.map(|at| (at.leg, at.uncalled)) {
        Some((Leg::Making, true)) => {
            let plugin = &record.volume.plugin;
            format!(
                "{name} was not attached to {node_id}: no controller of plugin {plugin} took the call{last}"
            )
        }
        Some((Leg::Making, false)) => {
            format!("{name} is not attached to {node_id} yet, and the servers go on{last}")
        }
        _ => format!("{name} is not detached from {node_id} yet, and the servers go on{last}"),
    };
    Error::new(Kind::TimedOut, text).with(|details| details.step = Some(step))
}
