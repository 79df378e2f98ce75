//! The creation, the deletion and the expansion of volumes, as callers ask for them. The intent is written here, and the caller waits for the outcome.

use csi_proto::cluster::v1::{CreateAsk, DeleteAsk, ExpandAsk, VolumeRow};
use csi_proto::identity::Identity;
use csid::cluster::rows::read_spec;
use csid::error::Step;
use csid::store::registry::{DrivenRpc, Expansion, Record, Registration, Registry, Standing, VolumeName};
use csid::volume::rules;
use csid::{Error, Kind};
use tokio::time::Instant;

use crate::cluster::Cluster;
use crate::failure::{Result, ServerError};
use crate::grants::May;
use crate::provisioning::failure_name;
use crate::random;
use crate::records::{TRIES, busy};
use crate::view;
use crate::volume_calls::is_unasked;
use crate::volumes::{has_other_id, holders_of, refuse_of_another};
use crate::wanted::CONTROLLER;

/// The limit of volumes of one owner that are being created, expanded or deleted.
const UNFINISHED: usize = 100;

/// What a caller wants of a volume.
enum Wanted {
    /// The plugin, the registration of the volume that is to be created, and whether its source may be used.
    Create(String, Box<Registration>, bool),
    /// The ID of the registration that is meant. Empty: any.
    Delete(String),
    /// The least capacity, and the limit.
    Expand(u64, u64),
}

/// What a look at the record has found.
enum Looked {
    Done(Box<VolumeRow>),
    /// The record or a row has changed since it was read.
    Changed,
    /// The plugin has yet to answer.
    Waits {
        /// The last failure.
        error: Option<String>,
        /// The record's revision.
        revision: u64,
    },
}

impl Wanted {
    fn rpc(&self) -> DrivenRpc {
        match self {
            Wanted::Create(..) => DrivenRpc::Create,
            Wanted::Delete(_) => DrivenRpc::Delete,
            Wanted::Expand(..) => DrivenRpc::Expand,
        }
    }

    fn step(&self) -> Step {
        match self {
            Wanted::Create(..) => Step::Create,
            Wanted::Delete(_) => Step::Delete,
            Wanted::Expand(..) => Step::Expand,
        }
    }

    fn participle(&self) -> &'static str {
        match self {
            Wanted::Create(..) => "created",
            Wanted::Delete(_) => "deleted",
            Wanted::Expand(..) => "expanded",
        }
    }
}

impl Cluster {
    /// Has a plugin create an empty volume, and registers it for the caller. The same call joins a creation that goes on.
    pub async fn create(&self, caller: &Identity, ask: CreateAsk) -> Result<VolumeRow> {
        let (name, plugin, new) = self.creation(caller, ask)?;
        if new.spec.has_source() {
            return Err(Error::invalid("a call that creates an empty volume has a snapshot or clone").into());
        }
        self.reach_creation(caller, &name, (plugin, new), true).await
    }

    /// Has a plugin create a volume, and registers it for the caller. `is_checked`: its source may be used. `false`: a creation that goes on is
    /// joined, and none begins.
    pub(crate) async fn reach_creation(
        &self,
        caller: &Identity,
        name: &VolumeName,
        (plugin, new): (String, Registration),
        is_checked: bool,
    ) -> Result<VolumeRow> {
        self.reach(caller, name, &Wanted::Create(plugin, Box::new(new), is_checked)).await
    }

    /// Checks a call that creates a volume. Returns the volume's name, its plugin and its registration.
    pub(crate) fn creation(
        &self,
        caller: &Identity,
        ask: CreateAsk,
    ) -> Result<(VolumeName, String, Registration)> {
        let name = rules::volume_name(&ask.namespace, &ask.volume)?;
        self.require(caller, &name.namespace, May::Create)?;
        let mut spec = read_spec(ask.spec.unwrap_or_default())?;
        if !spec.name.is_empty() || !spec.context.is_empty() {
            let text = "a volume that is created has a name or a context; the servers make the name, and the plugin the context";
            return Err(Error::invalid(text).into());
        }
        // A name of the caller's own could be that of a volume which another cluster has.
        spec.name = rules::name_at_plugin(&self.config.cluster, &name);
        // The plugin has yet to answer with the volume's ID.
        rules::check_volume(&ask.plugin, &spec.name, &spec)?;
        rules::check_capacity(ask.capacity_min, ask.capacity_max)?;
        if let Some(credential) = &spec.credential {
            rules::check_credential(&name.namespace, credential)?;
        }
        let (min, max) = (ask.capacity_min, ask.capacity_max);
        let new = rules::new_creation(&caller.to_string(), spec, min, max);
        Ok((name, ask.plugin, Registration { id: random::name(), ..new }))
    }

    /// Has a plugin delete a volume that is the caller's own. A volume that is not there is deleted already. Or returns the ID of its
    /// registration, if that is what is asked for.
    pub async fn delete(&self, caller: &Identity, ask: DeleteAsk) -> Result<VolumeRow> {
        let name = rules::volume_name(&ask.namespace, &ask.volume)?;
        self.require(caller, &name.namespace, May::Delete)?;
        match ask.asks_id {
            true => {
                let found = self.registration_to_end(caller, name.clone()).await?;
                if found.plugin.is_empty() {
                    // Claims may be left of a volume that no server knows any more.
                    let record = self.registry.record(name).await?;
                    rules::refuse_used(&record).map_err(|error| holders_of(&record, error))?;
                }
                Ok(found)
            }
            false => self.reach(caller, &name, &Wanted::Delete(ask.id)).await,
        }
    }

    /// Has a plugin's controller expand a volume that is the caller's own. What nodes have to do is in the row.
    pub async fn expand(&self, caller: &Identity, ask: ExpandAsk) -> Result<VolumeRow> {
        let name = rules::volume_name(&ask.namespace, &ask.volume)?;
        self.require(caller, &name.namespace, May::Expand)?;
        rules::check_capacity(ask.required, ask.limit)?;
        self.reach(caller, &name, &Wanted::Expand(ask.required, ask.limit)).await
    }

    /// Writes what is wanted, and waits until it is so. When that takes too long it goes on.
    async fn reach(&self, caller: &Identity, name: &VolumeName, wanted: &Wanted) -> Result<VolumeRow> {
        let begun = Instant::now();
        let mut driven = self.subscribe_driven(name);
        let (mut waits, mut tries) = (false, 0);
        while tries < TRIES {
            driven.borrow_and_update();
            let looked = match waits {
                true => self.look(caller, name, wanted, begun).await?,
                false => self.begin(caller, name, wanted).await?,
            };
            match looked {
                Looked::Done(row) => return Ok(*row),
                Looked::Changed => tries += 1,
                Looked::Waits { error, revision } => {
                    waits = true;
                    if begun.elapsed() >= CONTROLLER {
                        return Err(not_yet(name, wanted, error));
                    }
                    self.wake(name);
                    tokio::select! {
                        _ = driven.changed() => {}
                        // Another server may call the controller.
                        changed = self.changed_elsewhere(name, revision) => changed?,
                        () = self.presence.stopped() => return Err(self.presence.cut_off()),
                        () = tokio::time::sleep_until(begun + CONTROLLER) => {}
                    }
                }
            }
        }
        Err(busy(name))
    }

    /// Writes the intent of a creation or deletion, or joins the one that goes on.
    async fn begin(&self, caller: &Identity, name: &VolumeName, wanted: &Wanted) -> Result<Looked> {
        let mut guards = self.guards_of(caller).await?;
        let record = self.registry.record(name.clone()).await?;
        if is_of_later(&record, wanted) {
            return Ok(deleted(name, caller));
        }
        refuse_of_another(&record, caller)?;
        let mut after = record.clone();
        match wanted {
            Wanted::Create(plugin, new, is_checked) => match &record.registration {
                None if !is_checked => {
                    let text = format!("{name} has been deleted meanwhile, and its source was not checked");
                    return Err(Error::new(Kind::Busy, text).into());
                }
                None => {
                    // What is left of an earlier volume of the name.
                    rules::refuse_used(&record).map_err(|error| holders_of(&record, error))?;
                    self.refuse_more_volumes(caller).await?;
                    let mut new = Registration::clone(new);
                    if !new.spec.clone.is_empty() {
                        guards.push(self.enter_clone(caller, name, plugin, &mut new).await?);
                    }
                    self.require_controller(name, plugin)?;
                    rules::begin_creation(&mut after, plugin, new)?;
                }
                Some(_) => {
                    rules::refuse_unfit(&record)?;
                    rules::join_creation(&mut after, plugin, new, false)?;
                }
            },
            Wanted::Delete(_) => {
                begin_deletion(&mut after)?;
                self.refuse_copied(caller, &record).await?;
            }
            Wanted::Expand(required, limit) => begin_expansion(&mut after, *required, *limit)?,
        }
        if !rules::is_unfinished(&record) && rules::is_unfinished(&after) {
            self.refuse_more_unfinished(caller).await?;
        }
        let after = match after == record {
            true => record,
            false => match self.swap(&record, after, guards).await {
                Ok(Some(after)) => {
                    let call = wanted.participle();
                    tracing::info!(%caller, volume = %name, "a volume is to be {call}");
                    after
                }
                Ok(None) => return Ok(Looked::Changed),
                Err(error) => return Err(self.hide_name(caller, error)),
            },
        };
        Ok(looked(&after, caller, wanted))
    }

    /// Refuses a caller with as many changes under way as it may have. Each keeps the servers busy until it ends.
    pub(crate) async fn refuse_more_unfinished(&self, caller: &Identity) -> Result<()> {
        let owner = caller.to_string();
        let is_one = |record: &&Record| {
            rules::is_unfinished(record) && record.registration.as_ref().is_some_and(|of| of.owner == owner)
        };
        let (records, _) = self.registry.restless().await?;
        match records.iter().filter(is_one).count() >= UNFINISHED {
            false => Ok(()),
            true => {
                let text = format!(
                    "{UNFINISHED} volumes of {caller} are being created, expanded or deleted, the limit"
                );
                Err(Error::new(Kind::RateLimited, text).into())
            }
        }
    }

    /// Looks for the outcome of what was begun.
    async fn look(
        &self,
        caller: &Identity,
        name: &VolumeName,
        wanted: &Wanted,
        begun: Instant,
    ) -> Result<Looked> {
        self.presence.here()?;
        let record = self.registry.record(name.clone()).await?;
        if is_of_later(&record, wanted) {
            return Ok(deleted(name, caller));
        }
        // The caller's volume may be gone, and the name another one's.
        refuse_of_another(&record, caller)?;
        if let (Wanted::Delete(_), Some(Standing::Creating(creation))) =
            (wanted, record.registration.as_ref().map(|of| &of.standing))
            && !creation.to_delete
            && record.volume.handle.is_creating()
        {
            // The volume was deleted, and another caller has another one created under the name.
            return Ok(deleted(name, caller));
        }
        let has_ended = match (wanted, record.registration.as_ref().map(|of| &of.standing)) {
            (Wanted::Create(..), None) => true,
            // The plugin has refused it. The source of a volume in creation is not confirmed.
            (Wanted::Delete(_), Some(Standing::Registered)) => true,
            (Wanted::Delete(_), Some(Standing::Creating(_))) => !record.volume.handle.is_creating(),
            // Another caller has the volume deleted.
            (Wanted::Create(..), Some(Standing::Deleting { .. })) => true,
            // The plugin has refused it, or has answered with less.
            (Wanted::Expand(..), _) => !record.awaits_expansion() && !is_done(&record, wanted),
            _ => false,
        };
        if has_ended {
            let known = self.failure_since(&failure_name(wanted.rpc(), name), begun);
            let unknown = || {
                let text = format!(
                    "{name} was not {}: the plugin has refused it at another server, or another caller has changed the volume",
                    wanted.participle()
                );
                Error::new(Kind::PluginError, text)
            };
            let noted = record.registration.as_ref().and_then(|of| of.error.clone());
            let noted = noted.map(|error| Error::new(Kind::PluginError, error));
            let error = known.or(noted).unwrap_or_else(unknown);
            return Err(error.with(|details| details.step = Some(wanted.step())).into());
        }
        if matches!(wanted, Wanted::Create(..)) {
            rules::refuse_unfit(&record)?;
        }
        if let Some(blocked) = record.registration.as_ref().and_then(|of| of.blocked.clone()) {
            let text = format!("{name} is not {}: {}", wanted.participle(), blocked.reason);
            return Err(Error::new(Kind::PluginError, text)
                .with(|details| details.step = Some(wanted.step()))
                .into());
        }
        Ok(looked(&record, caller, wanted))
    }
}

/// Returns whether the volume that is to be deleted is gone, and the name has a later one.
fn is_of_later(record: &Record, wanted: &Wanted) -> bool {
    match wanted {
        Wanted::Delete(id) => has_other_id(record, id),
        Wanted::Create(..) | Wanted::Expand(..) => false,
    }
}

/// Returns that a volume is deleted.
fn deleted(name: &VolumeName, caller: &Identity) -> Looked {
    Looked::Done(Box::new(view::row(&Record::none(name.clone()), caller)))
}

/// Returns whether a record is as wanted.
fn is_done(record: &Record, wanted: &Wanted) -> bool {
    match (wanted, record.registration.as_ref()) {
        (Wanted::Create(..), of) => of.is_some_and(|of| of.standing == Standing::Registered),
        (Wanted::Delete(_), of) => of.is_none(),
        (Wanted::Expand(..), None) => false,
        (Wanted::Expand(required, _), Some(of)) => {
            // A plugin need not report the capacity. A refusal leaves its error.
            let is_large = of.capacity.is_none_or(|has| has >= *required);
            of.standing == Standing::Registered
                && !record.awaits_expansion()
                && of.error.is_none()
                && is_large
        }
    }
}

/// Returns what a record says of what is wanted.
fn looked(record: &Record, caller: &Identity, wanted: &Wanted) -> Looked {
    match is_done(record, wanted) {
        true => Looked::Done(Box::new(view::row(record, caller))),
        false => {
            let error = record.registration.as_ref().and_then(|of| of.error.clone());
            Looked::Waits { error, revision: record.revision }
        }
    }
}

/// Enters the deletion of a volume. A volume in creation is created first, for its ID is not known. If its plugin was never asked, its row
/// is removed at once.
fn begin_deletion(record: &mut Record) -> Result<()> {
    rules::refuse_used(record).map_err(|error| holders_of(record, error))?;
    let unasked = is_unasked(record);
    let Some(registration) = &mut record.registration else { return Ok(()) };
    registration.blocked = None;
    match &registration.standing {
        Standing::Creating(_) if unasked => record.registration = None,
        Standing::Creating(_) if record.volume.handle.is_creating() => rules::doom(record),
        // The plugin has created the volume, and has not confirmed its source.
        Standing::Creating(_) | Standing::Registered | Standing::Deleting { .. } => {
            let volume = record.volume.clone();
            let has_begun = rules::begin_deletion(record, &volume, false)?;
            rules::set_unasked(record, !has_begun || unasked);
        }
    }
    Ok(())
}

/// Enters an expansion. A volume that is large enough stays as it is.
fn begin_expansion(record: &mut Record, required: u64, limit: u64) -> Result<()> {
    rules::registered(record)?;
    let Some(registration) = &mut record.registration else { return Ok(()) };
    registration.error = None;
    if (required, limit) != (0, 0) && rules::falls_short(registration.capacity, required, limit)? {
        let asked = Expansion { required, limit, by_controller: false };
        registration.pending_expansion = Some(asked);
    }
    Ok(())
}

/// Returns the error of a change that takes longer than its caller may wait. It goes on.
fn not_yet(name: &VolumeName, wanted: &Wanted, last: Option<String>) -> ServerError {
    let last = last.map(|error| format!("; the last try: {error}")).unwrap_or_default();
    let text = format!("{name} is not {} yet, and the servers go on{last}", wanted.participle());
    Error::new(Kind::TimedOut, text).with(|details| details.step = Some(wanted.step())).into()
}
