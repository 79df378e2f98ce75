//! An instance takes another's place under the plugin's mounts: it is started in addition and probed, then it gets the calls,
//! and the old one is stopped when no call holds it any more.
//!
//! The journal has the new instance, the name and the facts of the one it replaces, before it is started, and drops the other, with
//! that mark, once that was stopped. A csid that finds both goes on where it is safe: from the beginning. So one of the two is left
//! in the end, and it serves meanwhile. The new one has the other's number, so that the newest of several stays the newest, and
//! the plugin its owner's.

use std::time::Duration;

use futures_util::FutureExt;

use crate::error::{Error, Result};
use crate::plugin::errors::registry::RegistrationError;
use crate::plugin::errors::upgrade::UpgradeError;
use crate::plugin::events;
use crate::plugin::place::Location;
use crate::plugin::registry::facts::{InstanceFacts, other_node_id};
use crate::plugin::registry::kept::Kept;
use crate::plugin::registry::plugins::{
    InstanceEntry, Plugins, SpecOrigin, Upgrade, UpgradeOutcome, owner, stop, to_the_end,
};
use crate::plugin::self_registered;
use crate::plugin::spec::{PluginSpec, Supervision};
use crate::plugin::task::{AGAIN, How, InstanceState};
use crate::plugin::view::PluginChange;
use crate::store::Change;

impl Plugins {
    /// The spec of the instance that an upgrade replaces: the plugin's only one, or that of this name. Once it was replaced it is
    /// what the one in its place runs by, so that an upgrade that is asked for again is known.
    pub fn upgradable(&self, id: &str, instance: Option<&str>) -> Result<PluginSpec> {
        let plugins = self.entries();
        let entries = plugins.get(id).ok_or_else(|| RegistrationError::unknown(id))?;
        let is_it =
            |entry: &&InstanceEntry| instance.is_none_or(|instance| instance == entry.spec.instance());
        let mut found = entries.iter().filter(|entry| entry.serves()).filter(is_it);
        match (found.next(), found.next()) {
            (Some(entry), None) => Ok(entry.spec.clone()),
            (Some(_), Some(_)) => Err(UpgradeError::SeveralInstances { id: id.to_owned() }.into()),
            (None, _) => {
                let name = instance.unwrap_or_default();
                let now = entries.iter().find(|entry| entry.replaced.as_deref() == Some(name));
                let spec = now.map(|now| PluginSpec { instance: Some(name.to_owned()), ..now.spec.clone() });
                let (id, instance) = (id.to_owned(), name.to_owned());
                spec.ok_or_else(|| UpgradeError::NoInstance { id, instance }.into())
            }
        }
    }

    /// Replaces the instance `old` by one of `spec`, stops the old one, and returns the new one's name. If the new one does not
    /// become healthy, or is another plugin, it is removed and the old one goes on. An upgrade ends also without its caller.
    pub async fn upgrade(&self, id: &str, old: &str, spec: PluginSpec, uid: u32) -> Result<String> {
        let (plugins, id, old) = (self.clone(), id.to_owned(), old.to_owned());
        let outcome = to_the_end(async move {
            let _changing = plugins.0.changing.lock().await;
            plugins.begin_upgrade(&id, &old, spec, uid).await
        });
        outcome.await?.await
    }

    async fn begin_upgrade(
        &self,
        id: &str,
        old: &str,
        mut spec: PluginSpec,
        uid: u32,
    ) -> Result<UpgradeOutcome> {
        self.open()?;
        self.0.shared.store.writable()?;
        let look = |entry: &InstanceEntry| {
            let facts = InstanceFacts::of(&entry.state.borrow().view);
            (entry.spec.clone(), entry.owner, entry.origin.clone(), entry.number, facts)
        };
        let (before, of, origin, number, facts) = self
            .entry(id, old, look)
            .or_else(|| self.successor(id, old, look))
            .ok_or_else(|| RegistrationError::unknown(id))?;
        self.refuse_others(id, (old, of), &origin, &spec, uid)?;
        if let Some(outcome) = self.same_upgrade(id, old, &spec)? {
            return Ok(outcome);
        }
        let (now, was_replaced) = (before.instance().to_owned(), before.instance() != old);
        let named = PluginSpec { instance: spec.instance.clone().or(Some(now.clone())), ..spec.clone() };
        // The same command may be another program by now: only who named an instance, or its socket, asks for what is there.
        let is_named = spec.instance.is_some() || spec.supervision != Supervision::Managed;
        if before.same(&named) && (was_replaced || is_named) {
            return Ok(std::future::ready(Ok(now)).boxed().shared());
        }
        if was_replaced {
            let (id, old) = (id.to_owned(), old.to_owned());
            return Err(UpgradeError::Replaced { id, old, now }.into());
        }
        self.give_name(id, &mut spec);
        self.refuse_beside(id, &before, &spec)?;
        spec.validate(id)?;
        spec.check_start()?;
        let kept = Kept { replaces: Some(old.to_owned()), before: facts, ..Kept::new(&spec) };
        self.commit(vec![Change::PutPlugin(kept.row(id, number, of)?)]).await?;
        let to = spec.instance();
        tracing::info!(plugin = %id, uid, "plugin {id}: instance {to} is started in the place of {old}");
        self.add_kept(id, kept, of, origin, number);
        Ok(self.under_way(id, old.to_owned(), spec))
    }

    /// The instance that has the place of one that is gone.
    fn successor<T>(&self, id: &str, gone: &str, look: impl FnOnce(&InstanceEntry) -> T) -> Option<T> {
        let plugins = self.entries();
        plugins.get(id)?.iter().find(|entry| entry.replaced.as_deref() == Some(gone)).map(look)
    }

    /// The upgrade that is under way, if it is this one.
    fn same_upgrade(&self, id: &str, old: &str, spec: &PluginSpec) -> Result<Option<UpgradeOutcome>> {
        let upgrades = self.upgrades();
        let Some(upgrade) = upgrades.get(id) else { return Ok(None) };
        let instance = spec.instance.clone().or(upgrade.spec.instance.clone());
        // A call that names no instance means the new one, once that has replaced the old one.
        let is_replaced = old == upgrade.old || old == upgrade.spec.instance();
        match is_replaced && upgrade.spec.same(&PluginSpec { instance, ..spec.clone() }) {
            true => Ok(Some(upgrade.outcome.clone())),
            false => Err(UpgradeError::UnderWay { id: id.to_owned() }.into()),
        }
    }

    /// Refuses an instance that a file or the plugin itself defines. It is changed there.
    fn refuse_others(
        &self,
        id: &str,
        (old, of): (&str, u32),
        origin: &SpecOrigin,
        spec: &PluginSpec,
        uid: u32,
    ) -> Result<()> {
        let owner = self.entries().get(id).and_then(|entries| owner(entries));
        // The new instance is its owner's, so it is not enough to be the plugin's.
        let is_own = owner == Some(uid) && of == uid;
        if uid != 0 && (!is_own || spec.needs_root()) {
            return Err(match is_own {
                false => UpgradeError::OtherUid { id: id.to_owned(), instance: old.to_owned() }.into(),
                true => RegistrationError::RootsKeys.into(),
            });
        }
        Ok(self.refuse_defined_elsewhere(id, old, origin)?)
    }

    /// Give the new instance a name if it has none: not the one that was the last before it, of which something may be left.
    fn give_name(&self, id: &str, spec: &mut PluginSpec) {
        let highest = {
            let plugins = self.entries();
            let of_name = |name: &str| name.strip_prefix('i')?.parse::<u32>().ok();
            let number =
                |entry: &InstanceEntry| of_name(entry.spec.instance()).map_or(0, u64::from).max(entry.number);
            plugins.get(id).into_iter().flatten().map(number).max().unwrap_or(0)
        };
        spec.instance = spec.instance.take().or_else(|| Some(self.free_name(id, highest + 1)));
    }

    /// A name that no instance of the plugin has.
    pub(super) fn free_name(&self, id: &str, number: u64) -> String {
        let is_taken = |name: &String| self.entry(id, name, |_| ()).is_some();
        let mut names = (number..).map(|number| format!("i{number}"));
        names.find(|name| !is_taken(name)).unwrap_or_default()
    }

    /// Refuses an upgrade whose instances cannot run at the same time, or not under the same mounts.
    pub(super) fn refuse_beside(&self, id: &str, before: &PluginSpec, spec: &PluginSpec) -> Result<()> {
        if self_registered::is_name(spec.instance()) {
            return Err(RegistrationError::ReservedName { instance: spec.instance().to_owned() }.into());
        }
        if before.supervision != spec.supervision {
            return Err(UpgradeError::FixedKey { key: "supervision" }.into());
        }
        let place = |spec| Location::of(&self.0.directories, id, spec);
        let (old, new) = (place(before), place(spec));
        if old.root != new.root {
            return Err(UpgradeError::FixedKey { key: "plugin-root" }.into());
        }
        let entries = self.entries();
        for entry in entries.get(id).into_iter().flatten() {
            let (id, instance) = (id.to_owned(), entry.spec.instance().to_owned());
            if instance == spec.instance() {
                return Err(UpgradeError::InstanceExists { id, instance }.into());
            }
            let socket = place(&entry.spec).socket;
            let is_named = |argument: &String| argument.contains(&*socket.to_string_lossy());
            if socket != new.socket && !spec.argv.iter().any(is_named) {
                continue;
            }
            return Err(match spec.supervision {
                Supervision::Managed => UpgradeError::EndpointInUse { instance }.into(),
                Supervision::Unit | Supervision::External => {
                    UpgradeError::SocketInUse { id, instance }.into()
                }
            });
        }
        Ok(())
    }

    pub(super) fn refuse_upgrading(&self, id: &str) -> Result<()> {
        match self.upgrades().contains_key(id) {
            true => Err(UpgradeError::UnderWay { id: id.to_owned() }.into()),
            false => Ok(()),
        }
    }

    /// Goes on with the upgrades that an earlier csid left.
    pub(super) fn resume(&self) {
        let tried: Vec<(String, String, PluginSpec)> = {
            let plugins = self.entries();
            let all = plugins.iter().flat_map(|(id, entries)| entries.iter().map(move |entry| (id, entry)));
            let tried = |(id, entry): (&String, &InstanceEntry)| {
                Some((id.clone(), entry.replaces.clone()?, entry.spec.clone()))
            };
            all.filter_map(tried).collect()
        };
        for (id, old, spec) in tried {
            if self.refuse_upgrading(&id).is_err() {
                continue;
            }
            tracing::info!(plugin = %id, "plugin {id}: instance {} is still to take the place of {old}", spec.instance());
            drop(self.under_way(&id, old, spec));
        }
    }

    /// From here on it comes to its end by itself.
    pub(super) fn under_way(&self, id: &str, old: String, spec: PluginSpec) -> UpgradeOutcome {
        let mut upgrades = self.upgrades();
        let (plugins, of, new) = (self.clone(), id.to_owned(), spec.instance().to_owned());
        let from = old.clone();
        let work = tokio::spawn(async move {
            let (at, id, to) = (plugins.clone(), of.clone(), new.clone());
            // An upgrade that panics has ended, too.
            let ended = to_the_end(async move { at.replace(&id, &from, &to).await }).await;
            plugins.upgrades().remove(&of);
            ended.map(|()| new)
        });
        let outcome =
            work.map(|ended| ended.unwrap_or_else(|source| Err(UpgradeError::Interrupted { source }.into())));
        let outcome = outcome.boxed().shared();
        upgrades.insert(id.to_owned(), Upgrade { old, spec, outcome: outcome.clone() });
        outcome
    }

    async fn replace(&self, id: &str, old: &str, new: &str) -> Result<()> {
        let Err(error) = self.tried(id, old, new).await.map_err(Error::from) else {
            return self.take_over(id, old, new).await;
        };
        // csid stops; the next one goes on.
        self.open()?;
        self.take_back(id, old, new, &error).await?;
        Err(error)
    }

    /// Wait until the new instance has shown that it can have the other's place, or that it cannot.
    async fn tried(&self, id: &str, old: &str, new: &str) -> Result<(), UpgradeError> {
        let stopping = || UpgradeError::Stopping;
        let (mut state, spec) =
            self.entry(id, new, |entry| (entry.state.clone(), entry.spec.clone())).ok_or_else(stopping)?;
        let is_decided = state.wait_for(|seen| seen.ready.is_some() || seen.view.state == "failed");
        let start = self.0.shared.pace.start;
        let patience = match spec.supervision {
            // The instance's task ends it in time. It leaves a process running that says that it is not ready, or whose mounts the
            // host would not see.
            Supervision::Managed => start * 2,
            Supervision::Unit | Supervision::External => start,
        };
        let decided = tokio::time::timeout(patience, is_decided).await;
        let decided = decided.map(|decided| decided.map(|seen| seen.view.clone()).ok());
        let in_time =
            decided.unwrap_or_else(|_| self.entry(id, new, |entry| entry.state.borrow().view.clone()));
        let found = in_time.ok_or_else(stopping)?;
        let names = || (id.to_owned(), old.to_owned(), new.to_owned());
        if !found.healthy {
            let message = &found.health_message;
            let why = message.split_once(AGAIN).map_or(message.as_str(), |(why, _)| why).to_owned();
            let hiding = found.hidden_by_unit.then(|| found.unit.clone());
            let (id, old, new) = names();
            return Err(UpgradeError::NotHealthy { id, old, new, why, hiding });
        }
        let (mut state, journalled) = {
            let state = self.entry(id, old, |entry| entry.state.clone()).ok_or_else(stopping)?;
            (state, self.entry(id, new, |entry| entry.before.clone()).flatten())
        };
        let mut before = InstanceFacts::of(&state.borrow().view).or(journalled);
        if before.is_none() {
            // After csid's start it may not have been seen yet.
            let is_known = |seen: &InstanceState| InstanceFacts::of(&seen.view).is_some();
            let _ = tokio::time::timeout(start, state.wait_for(is_known)).await;
            before = InstanceFacts::of(&state.borrow().view);
        }
        // The accepted id counts, even if the other instance reports another one by now.
        let agreed = self.0.shared.node_ids.agreed(id);
        let node_id = agreed.or_else(|| Some(before.as_ref()?.node_id.clone())).unwrap_or_default();
        let lack = || before.as_ref().and_then(|before| before.lack(&found));
        match other_node_id(&node_id, &found).or_else(lack) {
            None => Ok(()),
            Some(source) => {
                let (id, old, new) = names();
                Err(UpgradeError::Unfit { id, old, new, source })
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
                    (entry.replaced, owner) = (entry.replaces.take(), entry.owner);
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
                tracing::warn!(plugin = %id, instance = old, ?patience, "plugin {id}: instance {old} is stopped before it has answered every call");
            }
        }
        let ended = || {
            Ok(vec![
                Change::DeletePlugin(id.to_owned(), old.to_owned()),
                self.settled(id, new)?,
                Change::Event(events::left(id, old, false)),
                Change::Event(events::upgraded(id, old, new, None)),
            ])
        };
        self.end(id, old, ended).await
    }

    /// The new one is gone again, and was never asked for anything.
    async fn take_back(&self, id: &str, old: &str, new: &str, why: &Error) -> Result<()> {
        tracing::warn!(plugin = %id, "plugin {id} was not upgraded: {why}");
        let ended = || {
            Ok(vec![
                Change::DeletePlugin(id.to_owned(), new.to_owned()),
                self.settled(id, old)?,
                Change::Event(events::upgraded(id, old, new, Some(&why.to_string()))),
            ])
        };
        self.end(id, new, ended).await
    }

    /// Stop an instance, and write that, as soon as the journal takes it: two rows would begin the upgrade again at the next start.
    async fn end(&self, id: &str, leaves: &str, ended: impl Fn() -> Result<Vec<Change>>) -> Result<()> {
        let mut changing = self.stopped(id, leaves).await?;
        let mut pause = self.0.shared.pace.restart;
        while let Err(error) = self.commit(ended()?).await {
            tracing::error!(plugin = %id, "plugin {id}: the end of its upgrade cannot be written, and is tried again: {error}");
            drop(changing);
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(self.0.shared.pace.longest);
            changing = self.0.changing.lock().await;
            self.open()?;
        }
        drop(changing);
        Ok(())
    }

    /// The row of the instance that is left.
    fn settled(&self, id: &str, left: &str) -> Result<Change> {
        let row = self.entry(id, left, |entry| {
            let filed = match &entry.origin {
                SpecOrigin::File(name) if name == left => return Ok(None),
                SpecOrigin::File(name) => Some(name.clone()),
                SpecOrigin::Bus | SpecOrigin::Socket => None,
            };
            let kept = Kept { filed, replaced: entry.replaced.clone(), ..Kept::new(&entry.spec) };
            kept.row(id, entry.number, entry.owner).map(Some)
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
                Err(error) => tracing::warn!(
                    plugin = %id, instance, "plugin {id}: instance {instance} does not leave, and is tried again: {error}"
                ),
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
