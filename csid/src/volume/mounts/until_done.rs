//! Carries a mount, an unmount or the rest of one to its end: takes a step, writes it, performs the effect, and feeds its outcome back.

use std::collections::btree_map::{BTreeMap, Entry};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::backoff::Backoff;
use crate::error::{Error, Kind, Result, Step};
use crate::fault;
use crate::host::Shown;
use crate::plugin::HeldDirectories;
use crate::store::Durability;
use crate::store::event_kind::EventKind;
use crate::store::rows::{AttachmentMode, Leg, MountKey, NewEvent};
use crate::volume::api::requests::Force;
use crate::volume::errors::operation::OperationError;
use crate::volume::events::mount as mount_events;
use crate::volume::executor::Executor;
use crate::volume::model::paths;
use crate::volume::model::volume::{Action, Effect, MountEvent, Next, Outcome};
use crate::volume::mounts::effect_failure::EffectFailure;
use crate::volume::mounts::effects::EffectContext;
use crate::volume::operation::orders::abandoned;
use crate::volume::probe;
use crate::volume::waits::PluginWaits;

/// Number of times that a plugin may answer a making with INTERNAL, UNKNOWN or the like before the caller gets that answer. The
/// specification requires that the call is repeated. A plugin that answers so to a wrong mount option does it for ever, and its
/// message helps the caller more than a time-out.
const UNKNOWN_ANSWERS: u32 = 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::volume::mounts) enum Purpose {
    Mount,
    Unmount,
    Settle,
}

impl Executor<'_> {
    pub(in crate::volume::mounts) async fn until_done(
        &mut self,
        mut next: Next,
        key: &MountKey,
        purpose: Purpose,
        mut held: Option<HeldDirectories>,
    ) -> Result<(), EffectFailure> {
        // A user keeps an answered mount even if it cannot be repaired.
        let is_there = self.row(key).is_some_and(|row| row.kept && row.publish == Leg::Present);
        let mut why: Option<EffectFailure> = None;
        let mut delay = Backoff::new();
        let mut tries = Tries::default();
        loop {
            match next {
                Next::Run(effect) => {
                    let noted = match self.leave_foreign_paths(&effect).await {
                        Ok(()) => self.note_backing(&effect).await,
                        Err(error) => Err(EffectFailure::nothing_done(error)),
                    };
                    self.operation.step.set_part("intent");
                    fault::around("intent", self.rows.intend(&self.shared.store, &effect)).await?;
                    drop(held.take());
                    let performed = match noted {
                        Ok(()) => self.perform(&effect).await,
                        Err(failure) => Err(failure),
                    };
                    next = match performed {
                        Ok(device) => {
                            delay = Backoff::new();
                            tries = Tries::default();
                            self.event(MountEvent::Ended {
                                effect,
                                outcome: Outcome::Done { device },
                                error: None,
                            })?
                        }
                        Err(mut failure) => {
                            self.searched = None;
                            if effect.action.makes() {
                                tries.note(&mut failure);
                            }
                            if failure.unimplemented {
                                self.ask_what_it_can().await;
                            }
                            let (effect_action, makes) = (effect.action, effect.action.makes());
                            let (outcome, error) = (failure.outcome, Some(failure.error.message.clone()));
                            self.event(MountEvent::Ended { effect, outcome, error })?;
                            let lasting = failure.definite || (makes && outcome == Outcome::Failed);
                            let again = !lasting && self.pause(&mut delay).await;
                            if self.row(key).is_none() {
                                return Err(Error::from(OperationError::Forgotten).into());
                            } else if again {
                                self.event(MountEvent::Continue { key: key.clone() })?
                            } else if makes && is_there && effect_action == Action::Bind {
                                self.event(MountEvent::Keep { key: key.clone() })?;
                                self.persist(Durability::Disk, None).await?;
                                return Err(self.reason(failure));
                            } else if makes && !lasting && self.yields(&tries) {
                                return Err(self.put_off(key, failure).await);
                            } else if makes {
                                delay = Backoff::new();
                                tries = Tries::default();
                                why = Some(self.reason(failure));
                                self.event(MountEvent::Undo { key: key.clone() })?
                            } else {
                                return Err(self.give_up(key, why, failure, purpose, is_there).await);
                            }
                        }
                    };
                }
                // The mount was there before and still is.
                Next::Mounted if self.rows.is_written() => return Ok(()),
                Next::Mounted => {
                    self.operation.step.decide();
                    let is_healed = self.rows.written(key).is_some_and(|row| row.status.healing);
                    let kind = if is_healed { EventKind::MountHealed } else { EventKind::Mount };
                    let mut event = mount_events::ended(kind, self.row(key), None);
                    if let Some(event) = &mut event {
                        mount_events::note_timings(event, &self.operation.step.timings());
                    }
                    return self.persist(Durability::Disk, event).await;
                }
                Next::Gone | Next::Rest => return self.ended(key, why, purpose).await,
            }
        }
    }

    /// Ends an operation whose row is gone or at rest: removes the directories, commits with an event, and returns why the
    /// volume is not mounted.
    async fn ended(
        &mut self,
        key: &MountKey,
        why: Option<EffectFailure>,
        purpose: Purpose,
    ) -> Result<(), EffectFailure> {
        self.clean_up(key).await;
        if let Some(failure) = &why {
            mount_events::log(key, self.rows.volume(), &failure.error);
        }
        let row = self.rows.written(key).or_else(|| self.row(key));
        let is_gone = self.row(key).is_none();
        let event = match purpose {
            Purpose::Mount => {
                mount_events::ended(EventKind::Mount, row, why.as_ref().map(|failure| &failure.error))
            }
            Purpose::Unmount | Purpose::Settle if is_gone => {
                mount_events::ended(EventKind::Unmount, row, None)
            }
            Purpose::Unmount | Purpose::Settle => None,
        };
        // After a power cut the intent of a mount makes it again, so the removal of a rolled-back mount has to be durable, too.
        self.persist(Durability::Disk, event).await?;
        match why {
            Some(why) => Err(why),
            None if purpose == Purpose::Mount => {
                Err(Error::internal("a mount ended without its mount").into())
            }
            None => Ok(()),
        }
    }

    /// Leaves a removal that does not end in time in the rows, for the background and for the next caller.
    async fn give_up(
        &mut self,
        key: &MountKey,
        why: Option<EffectFailure>,
        failure: EffectFailure,
        purpose: Purpose,
        is_there: bool,
    ) -> EffectFailure {
        mount_events::log(key, self.rows.volume(), &failure.error);
        let keep = match purpose {
            Purpose::Unmount => failure.in_use,
            Purpose::Mount | Purpose::Settle => is_there,
        };
        let event = match keep {
            true => Some(MountEvent::Keep { key: key.clone() }),
            // All work is done, and the end is waited for.
            false if failure.held => None,
            false => Some(MountEvent::GaveUp { key: key.clone() }),
        };
        let orphan = self
            .rows
            .written(key)
            .filter(|_| failure.orphan)
            .and_then(|row| mount_events::ended(EventKind::Orphan, Some(row), Some(&failure.error)));
        let persisted = match event.map_or(Ok(Next::Rest), |event| self.event(event)) {
            Ok(_) => self.persist(Durability::Disk, orphan).await,
            Err(error) => Err(error.into()),
        };
        match (persisted, why) {
            (Err(error), _) => error,
            (Ok(()), Some(why)) => {
                let text = format!(
                    "{}; and undoing it has not come to an end: {}",
                    why.error.message, failure.error.message
                );
                let mut error = Error { kind: Kind::Uncertain, message: text, details: why.error.details };
                error.details.retryable = true;
                EffectFailure::new(Outcome::Failed, error)
            }
            (Ok(()), None) if failure.outcome == Outcome::Failed && !failure.definite => {
                EffectFailure { error: Error { kind: Kind::Uncertain, ..failure.error }, ..failure }
            }
            (Ok(()), None) => failure,
        }
    }

    /// Returns whether a making that may have been tried rests as it is. That holds if only csid wants it and no caller has
    /// requested its end.
    fn yields(&self, tries: &Tries) -> bool {
        self.own && tries.unknown && self.operation.signals.borrow().abandon.is_none()
    }

    /// Puts the row to rest. The next try repeats the call.
    async fn put_off(&mut self, key: &MountKey, failure: EffectFailure) -> EffectFailure {
        mount_events::log(key, self.rows.volume(), &failure.error);
        let persisted = match self.event(MountEvent::Yield { key: key.clone() }) {
            Ok(_) => self.persist(Durability::Process, None).await,
            Err(error) => Err(error.into()),
        };
        persisted.err().unwrap_or(failure)
    }

    pub(in crate::volume) async fn persist(
        &mut self,
        durability: Durability,
        event: Option<NewEvent>,
    ) -> Result<(), EffectFailure> {
        let name = if durability == Durability::Disk { "outcome" } else { "intent" };
        let persisted = self.rows.persist(&self.shared.store, durability, event);
        fault::around(name, persisted).await.map_err(EffectFailure::from)
    }

    /// Records what the volume's mounts show before they are removed, so that the journal has it along with the intent: a copy
    /// elsewhere outlives csid. Nothing is recorded for a dead mount, because nothing can write to it.
    async fn note_backing(&mut self, effect: &Effect) -> Result<(), EffectFailure> {
        // The mounts of another row are left out of what was read for one.
        let mounts = self.own_mounts.take().filter(|(key, _)| *key == effect.key);
        let volume = self.rows.volume();
        let Some(mount) = volume.mount(&effect.key) else { return Ok(()) };
        let staging = volume.row.staging.as_deref();
        let is_first = match effect.action {
            Action::Stage => true,
            Action::Publish => staging.is_none() && !volume.published_elsewhere(&mount.key),
            Action::Bind | Action::Unbind | Action::Unpublish | Action::Unstage => false,
        };
        if is_first || effect.action == Action::Publish {
            return self.note_before(effect, is_first).await.map_err(EffectFailure::nothing_done);
        }
        // Without a staging each publish may be a file system of its own. Another file system may get its number once it is
        // gone.
        let is_not_last = staging.is_none() && volume.published_elsewhere(&mount.key);
        let removes = matches!(effect.action, Action::Unpublish | Action::Unstage) && !is_not_last;
        // An Unpublish since the volume was staged has recorded the staging, too.
        let mut backing = probe::known(&volume.row).map_err(EffectFailure::nothing_done)?;
        // A restarted plugin may have mounted another file system since, with the number of the first one.
        let may_be_another = backing.shown.iter().any(Shown::lends_its_number);
        let is_noted = effect.action == Action::Unstage
            && effect.from == Leg::Present
            && !backing.is_unknown()
            && !may_be_another;
        if !removes || is_noted || self.force >= Force::Dead || mount.status.healing {
            return Ok(());
        }
        let is_block = mount.spec.usage.attachment_mode == AttachmentMode::BlockDevice;
        let own = [Some(mount.source.as_str()), mount.published.as_deref(), staging].into_iter().flatten();
        let own: Vec<&Path> = own.map(Path::new).collect();
        let mounts = match mounts {
            Some((_, mounts)) => mounts,
            None => {
                let places = self.shared.places_of(volume, Some(&mount.key));
                let mounts = self.shared.own_mounts(volume, &places).await;
                mounts.map_err(EffectFailure::nothing_done)?
            }
        };
        // If the mounts are gone, only their device number is known.
        backing.join(mounts.backing(&own, is_block, mount.device));
        let mut seen = BTreeMap::new();
        for path in own {
            for device in mounts.lent_numbers(path, is_block) {
                if let Entry::Vacant(new) = seen.entry(device) {
                    new.insert(self.shared.host.watch_end(&mount.volume.plugin, path, device).await);
                }
            }
        }
        for (device, watch) in seen {
            self.rows.ends_mut().note(device, watch);
        }
        self.set_known(&backing).map_err(EffectFailure::nothing_done)
    }

    /// Returns the failure of an effect that an order to forget interrupts. The row keeps its last error, because the order may
    /// be refused.
    fn interrupted(&self, effect: &Effect, outcome: Outcome) -> EffectFailure {
        let last = self.row(&effect.key).and_then(|row| row.error.clone());
        let error =
            last.map_or_else(|| OperationError::Forgotten.into(), |last| Error::new(Kind::Cancelled, last));
        EffectFailure::new(outcome, error)
    }

    async fn perform(&mut self, effect: &Effect) -> Result<Option<u64>, EffectFailure> {
        let makes = effect.action.makes();
        if let Some(kind) = self.operation.signals.borrow().abandon.filter(|_| makes) {
            return Err(EffectFailure::new(Outcome::NotSent, OperationError::Stopped { kind }.into()));
        }
        if !self.operation.orders.is_empty() {
            return Err(self.interrupted(effect, Outcome::NotSent));
        }
        self.in_effect = true;
        let ready = self.ready().await;
        self.in_effect = false;
        let ready = ready.map_err(|error| EffectFailure::new(Outcome::NotSent, error))?;
        self.note_node_id(effect, &ready).await?;
        self.find_directory(effect, &ready).await;
        let gone = || Error::internal("an effect for a row that is gone");
        let mount = self.row(&effect.key).ok_or_else(gone)?;
        // Only a bind needs the root, and it may have to wait for the root's server.
        let target_root = match effect.action {
            Action::Bind => self.shared.target_root(mount.uid, &mount.spec).await,
            _ => Ok(PathBuf::from("/")),
        };
        self.operation.step.set(step_of(effect.action));
        let config = self.shared.config.borrow().clone();
        let asked = AtomicBool::new(false);
        let surroundings = EffectContext {
            host: &self.shared.host,
            shared: self.shared,
            ready: &ready,
            volume: self.rows.volume(),
            mount,
            secrets: self.operation.secrets.as_ref(),
            // A caller's deadline ends only its waiting. The RPC has the deadline of the plugin.
            patience: config.deadlines.operation,
            asked: &asked,
            base: self.shared.base(ready.host_root()),
            processes: self.shared.plugins.processes(&self.rows.volume().row.key.plugin),
            target_root,
            target_fd: self.target_fd.as_deref(),
            progress: &self.operation.step,
            from: effect.from,
            force: self.force,
            searched: self.searched.as_ref(),
            ends: self.rows.ends(),
        };
        let mut signals = self.operation.signals.clone();
        let is_bind = effect.action == Action::Bind;
        let unwanted = |kind| {
            // A call that was still waiting for its turn had no effect.
            let is_sent = is_bind || asked.load(Ordering::Relaxed);
            EffectFailure::new(
                if is_sent { Outcome::Failed } else { Outcome::NotSent },
                OperationError::Stopped { kind }.into(),
            )
        };
        let mut ended = tokio::select! {
            biased;
            ended = fault::around(effect.action.name(), surroundings.perform(effect.action)) => ended,
            // Only a making is dropped, and with it the RPC. A removal continues to its end. With a descriptor a bind ends
            // soon, and while an automount is pending only the bind's own mount can be rolled back.
            kind = abandoned(&mut signals), if makes && !(is_bind && self.target_fd.is_some()) => {
                Err(unwanted(kind))
            }
            // A removal that an order to forget interrupts need not continue to its end.
            () = self.operation.orders.came(), if !makes => Err(self.interrupted(effect, Outcome::Failed)),
        };
        if let Err(failure) = &ended {
            self.operation.step.note(&failure.error);
        }
        let is_done = ended.is_ok();
        if effect.action == Action::Publish
            && (is_done || asked.load(Ordering::Relaxed))
            && let Err(error) = self.note_published(&effect.key, is_done).await
            && is_done
        {
            ended = Err(EffectFailure::new(Outcome::Failed, error));
        }
        // The effect ended just when no caller wanted it any more. Nothing waits between this check and the commit point.
        match self.operation.signals.borrow().abandon.filter(|_| makes && ended.is_ok()) {
            Some(kind) => Err(unwanted(kind)),
            None => ended,
        }
    }

    /// Returns the error that ended a making: its failure, or that no caller wanted it.
    fn reason(&self, failure: EffectFailure) -> EffectFailure {
        match self.operation.signals.borrow().abandon {
            Some(kind) => EffectFailure::new(failure.outcome, OperationError::Stopped { kind }.into()),
            None => failure,
        }
    }

    /// Removes the directories that a row leaves, if they are empty, before the row that explains them goes.
    pub(in crate::volume) async fn clean_up(&self, key: &MountKey) {
        let volume = self.rows.volume();
        let idle =
            volume.row.stage == Leg::Absent && volume.mounts.iter().all(|mount| mount.publish == Leg::Absent);
        // Each user may mount at the consumers' path, in a namespace of its own, so a removal may hang there. That path is the last.
        let own = self.rows.written(key).into_iter().flat_map(|row| [row.published(), row.source.as_str()]);
        let staging = volume.row.staging.as_deref().filter(|_| idle);
        let directories = paths::OwnDirectories::of(&volume.row.key);
        let is_own = |path: &&Path| directories.have(path);
        // A path is …/ROOT/staging/HASH, …/ROOT/private/HASH/HASH, …/ROOT/publish/HASH/HASH, or longer. The directories
        // below ROOT stay, because the next mount needs them again.
        let below = |path: &Path| Some((paths::kind(path)?.to_owned(), path.to_owned()));
        let mut left: Vec<_> =
            staging.into_iter().chain(own).map(Path::new).filter(is_own).filter_map(below).collect();
        left.dedup();
        let is_forced = self.force >= Force::Dead;
        if let Err(error) = self.shared.host.remove_left(&volume.row.key.plugin, left, is_forced).await {
            tracing::warn!(volume = %key.volume, %error, "cannot remove directories that are no longer used");
        }
    }
}

fn step_of(action: Action) -> Step {
    match action {
        Action::Stage => Step::Stage,
        Action::Publish => Step::Publish,
        Action::Bind => Step::Bind,
        Action::Unbind => Step::Unbind,
        Action::Unpublish => Step::Unpublish,
        Action::Unstage => Step::Unstage,
    }
}

/// Result of the tries of one making.
#[derive(Default)]
struct Tries {
    /// Whether one of the tries may have had its effect, or have it yet.
    unknown: bool,
    /// Whether a connection broke.
    broken: bool,
    /// Number of answers of the plugin that left the outcome open.
    answers: u32,
}

impl Tries {
    /// Records a failed try. A try whose outcome is unknown may be repeated as it is.
    fn note(&mut self, failure: &mut EffectFailure) {
        self.unknown |= failure.unknown;
        self.broken |= failure.broken;
        self.answers += u32::from(failure.unknown && failure.answered);
        // A plugin that was restarted may have lost the state that the mount needs.
        failure.broken = self.broken;
        if failure.unknown && self.answers < UNKNOWN_ANSWERS {
            failure.outcome = Outcome::Again;
        }
    }
}
