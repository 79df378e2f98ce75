//! An instance takes another's place under the plugin's mounts: it is started beside it and looked at, then it is given the calls,
//! and the other one is stopped when nobody has it in hand any more.
//!
//! The journal has the new instance, with whom it replaces, before it is started, and forgets the other, with that mark, once
//! that was stopped. A csid that finds both goes on where it is safe: from the beginning. So one of the two is left in the end,
//! and it serves meanwhile.

use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, Shared};

use super::super::lookup;
use super::super::task::{AGAIN, How, Snapshot};
use super::{Entry, Kept, Origin, Plugins, ROOTS_KEYS, owner, registrar, stop, to_the_end};
use crate::error::{Error, Kind, Result};
use crate::plugin::spec::Place;
use crate::plugin::{PluginChange, PluginSpec, PluginView, Supervision, events};
use crate::store::Change;

/// One that is under way.
pub(super) struct Upgrade {
    /// The new instance's.
    spec: PluginSpec,
    outcome: Outcome,
}

/// The new instance's name, for everybody who waits for it.
pub(super) type Outcome = Shared<BoxFuture<'static, Result<String>>>;

impl Plugins {
    /// The spec of the instance that an upgrade replaces: the plugin's only one, or that of this name.
    pub fn upgradable(&self, id: &str, instance: Option<&str>) -> Result<PluginSpec> {
        let plugins = self.entries();
        let entries = plugins.get(id).ok_or_else(|| lookup::unknown(id))?;
        let is_it = |entry: &&Entry| instance.is_none_or(|instance| instance == entry.spec.instance());
        let mut found = entries.iter().filter(|entry| entry.serves()).filter(is_it);
        match (found.next(), found.next()) {
            (Some(entry), None) => Ok(entry.spec.clone()),
            (Some(_), Some(_)) => {
                let text = format!(
                    "the plugin {id} has several instances; name the one to replace (option `instance`)"
                );
                Err(Error::invalid(text))
            }
            (None, _) => {
                let text = format!("the plugin {id} has no instance `{}`", instance.unwrap_or_default());
                Err(Error::not_found(text))
            }
        }
    }

    /// Have an instance of `spec` take the place of `old`, and stop that; the new one's name. When the new one does not become
    /// healthy, or is not the same plugin, it is gone again and the old one goes on. What has begun is ended, whoever waits.
    pub async fn upgrade(&self, id: &str, old: &str, spec: PluginSpec, uid: u32) -> Result<String> {
        let (plugins, id, old) = (self.clone(), id.to_owned(), old.to_owned());
        let outcome = to_the_end(async move {
            let _changing = plugins.0.changing.lock().await;
            plugins.begin_upgrade(&id, &old, spec, uid).await
        });
        outcome.await?.await
    }

    async fn begin_upgrade(&self, id: &str, old: &str, mut spec: PluginSpec, uid: u32) -> Result<Outcome> {
        self.open()?;
        self.0.shared.store.writable()?;
        let (before, of, origin) = self
            .entry(id, old, |entry| (entry.spec.clone(), entry.owner, entry.origin.clone()))
            .ok_or_else(|| lookup::unknown(id))?;
        self.refuse_others(id, (old, of), &origin, &spec, uid)?;
        if let Some(outcome) = self.same_upgrade(id, &spec)? {
            return Ok(outcome);
        }
        // The same command may be another program by now: only who named the instance asks for what is there.
        if spec.instance.is_some() && before.same(&spec) {
            return Ok(std::future::ready(Ok(old.to_owned())).boxed().shared());
        }
        let number = self.numbered(id, &mut spec);
        self.refuse_beside(id, &before, &spec)?;
        spec.validate(id)?;
        spec.check_program()?;
        let kept = Kept { replaces: Some(old.to_owned()), ..Kept::new(&spec) };
        self.commit(vec![Change::PutPlugin(kept.row(id, number, of)?)]).await?;
        let to = spec.instance();
        tracing::info!(plugin = %id, uid, "plugin {id}: instance {to} is started in the place of {old}");
        self.add_tried(id, spec.clone(), of, origin, number, kept.replaces);
        Ok(self.under_way(id, old.to_owned(), spec))
    }

    /// The upgrade that is under way, if it is this one.
    fn same_upgrade(&self, id: &str, spec: &PluginSpec) -> Result<Option<Outcome>> {
        let upgrades = self.upgrades();
        let Some(upgrade) = upgrades.get(id) else { return Ok(None) };
        let instance = spec.instance.clone().or(upgrade.spec.instance.clone());
        match upgrade.spec.same(&PluginSpec { instance, ..spec.clone() }) {
            true => Ok(Some(upgrade.outcome.clone())),
            false => Err(is_upgrading(id)),
        }
    }

    /// What is said of an instance elsewhere is changed there.
    fn refuse_others(
        &self,
        id: &str,
        (old, of): (&str, u32),
        origin: &Origin,
        spec: &PluginSpec,
        uid: u32,
    ) -> Result<()> {
        let owner = self.entries().get(id).and_then(|entries| owner(entries));
        // The new instance is its owner's, so it is not enough to be the plugin's.
        let is_own = owner == Some(uid) && of == uid;
        if uid != 0 && (!is_own || spec.needs_root()) {
            let text = match is_own {
                false => format!(
                    "instance `{old}` of the plugin {id} is another uid's, or the plugin is; root may upgrade it"
                ),
                true => ROOTS_KEYS.to_owned(),
            };
            return Err(Error::new(Kind::NotAuthorized, text));
        }
        let text = match origin {
            Origin::Bus => return Ok(()),
            Origin::File(_) => {
                format!("the plugin {id} is defined by plugins.d/{id}.toml: change the file and reload")
            }
            Origin::Socket => format!(
                "instance `{old}` of the plugin {id} registered itself: have the new one register itself, too"
            ),
        };
        Err(Error::new(Kind::NotSupported, text))
    }

    /// Give the new instance its number, and a name if it has none.
    fn numbered(&self, id: &str, spec: &mut PluginSpec) -> u64 {
        let number = {
            let plugins = self.entries();
            plugins.get(id).into_iter().flatten().map(|entry| entry.number).max().unwrap_or(0) + 1
        };
        spec.instance = spec.instance.take().or_else(|| Some(self.free_name(id, number)));
        number
    }

    /// A name that no instance of the plugin has.
    pub(super) fn free_name(&self, id: &str, number: u64) -> String {
        let is_taken = |name: &String| self.entry(id, name, |_| ()).is_some();
        let mut names = (number..).map(|number| format!("i{number}"));
        names.find(|name| !is_taken(name)).unwrap_or_default()
    }

    /// Why the two cannot run beside each other, or not under the same mounts.
    pub(super) fn refuse_beside(&self, id: &str, before: &PluginSpec, spec: &PluginSpec) -> Result<()> {
        if registrar::names(spec.instance()) {
            let text = "an instance of that name is one that registered itself; choose another";
            return Err(Error::invalid(text));
        }
        if before.supervision != spec.supervision {
            let text = "supervision cannot change in an upgrade: unregister the plugin and register it anew";
            return Err(Error::invalid(text));
        }
        let place = |spec| Place::of(&self.0.directories, id, spec);
        let (old, new) = (place(before), place(spec));
        if old.root != new.root {
            let text = "plugin-root cannot change in an upgrade: unregister the plugin and register it anew";
            return Err(Error::invalid(text));
        }
        let entries = self.entries();
        for entry in entries.get(id).into_iter().flatten() {
            let instance = entry.spec.instance();
            if instance == spec.instance() {
                let text = format!("the plugin {id} has an instance `{instance}`; choose another name");
                return Err(Error::new(Kind::AlreadyExists, text));
            }
            let socket = place(&entry.spec).socket;
            let is_named = |argument: &String| argument.contains(&*socket.to_string_lossy());
            if socket != new.socket && !spec.argv.iter().any(is_named) {
                continue;
            }
            let text = match spec.supervision {
                Supervision::Managed => format!(
                    "CSI_ENDPOINT of the environment, or an argument, is the socket of instance `{instance}`, where no two can listen: \
                     leave it out, or name another"
                ),
                Supervision::Unit | Supervision::External => format!(
                    "instance `{instance}` of the plugin {id} has that socket: start the new one at another, and \
                     name that"
                ),
            };
            return Err(Error::invalid(text));
        }
        Ok(())
    }

    pub(super) fn refuse_upgrading(&self, id: &str) -> Result<()> {
        match self.upgrades().contains_key(id) {
            true => Err(is_upgrading(id)),
            false => Ok(()),
        }
    }

    /// Go on with what an earlier csid left.
    pub(super) fn resume(&self) {
        let tried: Vec<(String, String, PluginSpec)> = {
            let plugins = self.entries();
            let all = plugins.iter().flat_map(|(id, entries)| entries.iter().map(move |entry| (id, entry)));
            let tried = |(id, entry): (&String, &Entry)| {
                Some((id.clone(), entry.replaces.clone()?, entry.spec.clone()))
            };
            all.filter_map(tried).collect()
        };
        for (id, old, spec) in tried {
            tracing::info!(plugin = %id, "plugin {id}: instance {} is still to take the place of {old}", spec.instance());
            drop(self.under_way(&id, old, spec));
        }
    }

    /// From here on it comes to its end by itself.
    pub(super) fn under_way(&self, id: &str, old: String, spec: PluginSpec) -> Outcome {
        let mut upgrades = self.upgrades();
        let (plugins, of, new) = (self.clone(), id.to_owned(), spec.instance().to_owned());
        let work = tokio::spawn(async move {
            let (at, id, to) = (plugins.clone(), of.clone(), new.clone());
            // Also one that panics is no longer under way.
            let ended = to_the_end(async move { at.replace(&id, &old, &to).await }).await;
            plugins.upgrades().remove(&of);
            ended.map(|()| new)
        });
        let outcome = work.map(|ended| {
            ended.unwrap_or_else(|error| Err(Error::internal(format!("the upgrade was not ended: {error}"))))
        });
        let outcome = outcome.boxed().shared();
        upgrades.insert(id.to_owned(), Upgrade { spec, outcome: outcome.clone() });
        outcome
    }

    async fn replace(&self, id: &str, old: &str, new: &str) -> Result<()> {
        let Err(error) = self.tried(id, old, new).await else { return self.take_over(id, old, new).await };
        // csid stops; the next one goes on.
        self.open()?;
        self.take_back(id, old, new, &error).await?;
        Err(error)
    }

    /// Wait until the new instance has shown that it can have the other's place, or that it cannot.
    async fn tried(&self, id: &str, old: &str, new: &str) -> Result<()> {
        let stopping = || Error::new(Kind::PluginShutdown, "csid is stopping; it goes on when it is back");
        let (mut state, spec) =
            self.entry(id, new, |entry| (entry.state.clone(), entry.spec.clone())).ok_or_else(stopping)?;
        let is_decided = state.wait_for(|seen| seen.ready.is_some() || seen.view.state == "failed");
        let start = self.0.shared.pace.start;
        let patience = match spec.supervision {
            // Its task knows when its time is over, but for a process whose mounts nobody would see: that one is left running.
            Supervision::Managed => start * 2,
            Supervision::Unit | Supervision::External => start,
        };
        let decided = tokio::time::timeout(patience, is_decided).await;
        let decided = decided.map(|decided| decided.map(|seen| seen.view.clone()).ok());
        let in_time =
            decided.unwrap_or_else(|_| self.entry(id, new, |entry| entry.state.borrow().view.clone()));
        let found = in_time.ok_or_else(stopping)?;
        let unchanged = |why: String| format!("{why}; instance `{old}` goes on as before");
        if !found.healthy {
            let message = &found.health_message;
            let why = message.split_once(AGAIN).map_or(message.as_str(), |(why, _)| why);
            let text = unchanged(format!("instance `{new}` did not become healthy: {why}"));
            return Err(Error::new(Kind::PluginUnavailable, text).with(|details| {
                details.plugin = Some(id.to_owned());
                details.retryable = false;
            }));
        }
        // After csid's start the other one may not have been seen yet, and nothing could be compared.
        let mut before = self.entry(id, old, |entry| entry.state.clone()).ok_or_else(stopping)?;
        let is_known = |seen: &Snapshot| !seen.view.provider.is_empty();
        let _ = tokio::time::timeout(start, before.wait_for(is_known)).await;
        let before = before.borrow().view.clone();
        // What was agreed to counts, also where the other one says something else by now.
        let node_id = self.0.shared.node_ids.agreed(id).unwrap_or_else(|| before.node_id.clone());
        match lack(&before, &found, &node_id) {
            None => Ok(()),
            Some(why) => {
                let text = unchanged(format!("instance `{new}` cannot take the place of `{old}`: {why}"));
                Err(Error::invalid(text).with(|details| details.plugin = Some(id.to_owned())))
            }
        }
    }

    /// The new one is given what is asked from now on; the other one ends what it has begun, and is stopped.
    async fn take_over(&self, id: &str, old: &str, new: &str) -> Result<()> {
        let (hands, owner) = {
            let mut plugins = self.entries();
            let entries = plugins.get_mut(id).map(Vec::as_mut_slice).unwrap_or_default();
            let (mut hands, mut owner) = (None, 0);
            for entry in entries {
                if entry.spec.instance() == new {
                    (entry.replaces, owner) = (None, entry.owner);
                } else if entry.spec.instance() == old {
                    hands = entry.hands.take();
                }
            }
            (hands, owner)
        };
        self.tell(PluginChange::Changed(id.to_owned()));
        events::write(&self.0.shared.store, events::came(id, new, owner, false)).await;
        if let Some(hands) = hands {
            let patience = self.patience(id, old);
            if tokio::time::timeout(patience, hands.empty()).await.is_err() {
                tracing::warn!(plugin = %id, instance = old, ?patience, "it is stopped before it has answered every call");
            }
        }
        let _changing = self.stopped(id, old).await?;
        let ended = vec![
            Change::DeletePlugin(id.to_owned(), old.to_owned()),
            self.settled(id, new)?,
            Change::Event(events::left(id, old, false)),
            Change::Event(events::upgraded(id, old, new, None)),
        ];
        self.commit(ended).await
    }

    /// The new one is gone again, and was never asked for anything.
    async fn take_back(&self, id: &str, old: &str, new: &str, why: &Error) -> Result<()> {
        tracing::warn!(plugin = %id, "plugin {id} was not upgraded: {why}");
        let _changing = self.stopped(id, new).await?;
        let ended = vec![
            Change::DeletePlugin(id.to_owned(), new.to_owned()),
            self.settled(id, old)?,
            Change::Event(events::upgraded(id, old, new, Some(&why.to_string()))),
        ];
        self.commit(ended).await
    }

    /// The row of the instance that is left.
    fn settled(&self, id: &str, left: &str) -> Result<Change> {
        let row = self.entry(id, left, |entry| {
            let filed = match &entry.origin {
                Origin::File(name) if name == left => return Ok(None),
                Origin::File(name) => Some(name.clone()),
                Origin::Bus | Origin::Socket => None,
            };
            Kept { filed, ..Kept::new(&entry.spec) }.row(id, entry.number, entry.owner).map(Some)
        });
        let forgotten = Change::DeletePlugin(id.to_owned(), left.to_owned());
        Ok(row.transpose()?.flatten().map_or(forgotten, Change::PutPlugin))
    }

    /// Stop and forget an instance, for as long as that takes; what follows of it belongs to the same change.
    async fn stopped(&self, id: &str, instance: &str) -> Result<tokio::sync::MutexGuard<'_, ()>> {
        loop {
            let changing = self.0.changing.lock().await;
            // After it no unit is stopped: tasks that have ended stop nothing.
            self.open()?;
            let Some(stops) = self.entry(id, instance, |entry| entry.stops.clone()) else {
                return Ok(changing);
            };
            match stop(&stops, How::Unit).await {
                Ok(()) => {
                    self.remove(id, instance);
                    return Ok(changing);
                }
                Err(error) => tracing::warn!(plugin = %id, instance, %error, "it is tried again"),
            }
            drop(changing);
            tokio::time::sleep(self.0.shared.pace.restart).await;
        }
    }

    /// How long a call to an instance takes at most.
    fn patience(&self, id: &str, instance: &str) -> Duration {
        let own = self.entry(id, instance, |entry| entry.spec.rpc_deadline().ok().flatten()).flatten();
        own.unwrap_or_else(|| self.0.shared.limit.get())
    }

    fn upgrades(&self) -> std::sync::MutexGuard<'_, std::collections::BTreeMap<String, Upgrade>> {
        self.0.upgrades.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

fn is_upgrading(id: &str) -> Error {
    let text = format!("the plugin {id} is being upgraded; that comes to its end by itself, ask again then");
    Error::new(Kind::Busy, text).with(|details| details.plugin = Some(id.to_owned()))
}

/// Why mounts and attachments of the one are none of the other's; what was never seen of the first is not asked of the second.
fn lack(before: &PluginView, found: &PluginView, node_id: &str) -> Option<String> {
    if found.node_id != node_id && !node_id.is_empty() {
        let text = format!("it calls this node {:?}, and not {node_id:?}", found.node_id);
        return Some(text + ", and volumes are attached by that name");
    }
    if before.provider.is_empty() {
        return None;
    }
    if before.provider != found.provider {
        return Some(format!("it is {}, and not {}", found.provider, before.provider));
    }
    if let Some(lost) = before.services.iter().find(|service| !found.services.contains(service)) {
        return Some(format!("it offers no {lost} service"));
    }
    let lost = |before: &[String], found: &[String], name: &str| {
        let has = |names: &[String]| names.iter().any(|offered| offered == name);
        has(before) && !has(found)
    };
    let stages = "STAGE_UNSTAGE_VOLUME";
    if lost(&before.node_capabilities, &found.node_capabilities, stages) {
        return Some(format!("it does not offer {stages}, and could not unstage what is staged"));
    }
    let attaches = "PUBLISH_UNPUBLISH_VOLUME";
    let lost = lost(&before.controller_capabilities, &found.controller_capabilities, attaches);
    lost.then(|| format!("it does not offer {attaches}, and could not detach what is attached"))
}
