//! Releases claims that are bound to a systemd unit, or to the connection of their caller, when the unit or the connection
//! ends.
//!
//! systemd signals which units change, and each bound unit is probed once when it is bound. A unit that ended by its signal is
//! probed again before its claims are released. All units are probed when signals may be lost: after systemd or the bus was
//! away, after systemd has reloaded its definitions, and every minute. Connections are probed once a second while claims are
//! bound to any.
//!
//! If a unit or connection is not back within the grace time, the actor of the volume releases the claim, and retries. After a
//! restart of csid the grace time begins again.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::FutureExt;

use crate::error::Result;
use crate::host::Sifted;
use crate::host::unit_signals::{UnitSignal, UnitSignals};
use crate::host::units::UnitsError;
use crate::store::registry::{Bound, BoundTo};
use crate::volume::context::Context;
use crate::volume::errors::claim::ClaimError;
use crate::volume::manager::Volumes;
use crate::volume::model::subject::ClaimKey;
use crate::volume::operation::message::Message;
use crate::volume::operation::orders::until;
use crate::volume::tables::bound_claims::{Due, UNITS_OF_UID};
use crate::volume::tables::connections::Connected;

/// Interval between two probes of connections, and before systemd is asked again after it did not answer.
const EVERY: Duration = Duration::from_secs(1);
/// Interval between two probes of all units, whatever the signals say.
const FALLBACK: Duration = Duration::from_secs(60);
/// Number of signals that are taken before other work.
const AT_ONCE: usize = 1_000;

impl Volumes {
    /// Enters a connection on the private socket, by a name that no other connection has had or will have.
    pub fn connected(&self, name: String) -> Connected {
        self.shared.connections.enter(name)
    }

    /// Lets the helper take the next byte off a caller's stream, with the descriptors that were sent with it. `uid`: the
    /// caller's uid; `None`: not known. After an error it is not known whether the byte was taken.
    pub async fn sift(&self, uid: Option<u32>, stream: OwnedFd) -> std::io::Result<Sifted> {
        self.shared.host.sift(uid, stream).await
    }

    /// Releases claims whose unit or connection has ended. Never returns.
    pub async fn watch_bound(&self) {
        let shared = &self.shared;
        let mut units = BoundUnits::default();
        let mut every = tokio::time::interval(EVERY);
        every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            units.look(shared).await;
            let is_blind = units.silent || units.signals.is_none();
            for due in shared.bound.take_due(Instant::now()) {
                // A unit may be back, and no signal can report that.
                if is_blind && matches!(due.bound.to, BoundTo::Unit(_)) {
                    continue;
                }
                // With a damaged journal no claim can be released.
                if shared.changeable().is_ok() {
                    shared.unbind(due);
                }
            }
            let (due, look_at) = (shared.bound.next_due(), units.look_at);
            tokio::select! {
                () = shared.bound.changed() => {}
                signal = units.next() => units.take_all(shared, signal),
                () = until(due) => {}
                () = until(look_at) => {}
                _ = every.tick(), if shared.bound.has_callers() => shared.look_at_callers().await,
            }
        }
    }
}

/// State of the units that claims are bound to, in addition to `BoundClaims`.
#[derive(Default)]
struct BoundUnits {
    signals: Option<UnitSignals>,
    /// Names that claims know a unit by, keyed by the unit's own name and by its object's path.
    names: BTreeMap<String, BTreeSet<String>>,
    /// Units that have to be probed.
    unsure: BTreeSet<String>,
    /// Whether all units have to be probed.
    all: bool,
    /// Time of the next probe of all units. `None`: none is planned. After a failure no unit is probed before that time.
    look_at: Option<Instant>,
    /// Whether systemd does not answer. That is logged once.
    silent: bool,
}

impl BoundUnits {
    /// Probes the units that may have changed, after it has subscribed to later changes.
    async fn look(&mut self, shared: &Context) {
        if !shared.bound.has_units() {
            *self = BoundUnits::default();
            return;
        }
        let is_time = self.look_at.is_some_and(|at| at <= Instant::now());
        // systemd did not answer a moment ago.
        if self.silent && !is_time {
            return;
        }
        self.all |= is_time;
        match self.try_look(shared).await {
            Ok(()) => self.silent = false,
            Err(error) => {
                if !self.silent {
                    tracing::warn!(%error, "units that claims are bound to cannot be looked at; the claims stay");
                }
                (self.silent, self.all) = (true, true);
                self.look_at = Some(Instant::now() + EVERY);
            }
        }
    }

    async fn try_look(&mut self, shared: &Context) -> Result<(), UnitsError> {
        if self.signals.is_none() {
            self.signals = Some(shared.units.signals().await?);
            self.all = true;
        }
        self.unsure.extend(shared.bound.take_unread());
        if self.all {
            self.unsure = shared.bound.units();
        }
        if self.unsure.is_empty() {
            return Ok(());
        }
        let asked: Vec<&str> = self.unsure.iter().map(String::as_str).collect();
        let seen = shared.units.seen(&asked).await?;
        if self.all {
            self.names.clear();
            self.all = false;
            self.look_at = Some(Instant::now() + FALLBACK);
        }
        for (unit, seen) in std::mem::take(&mut self.unsure).into_iter().zip(seen) {
            let to = BoundTo::Unit(unit.clone());
            shared.bound.set_gone(&to, !seen.runs, Instant::now());
            for of in [seen.name, seen.path] {
                self.names.entry(of).or_default().insert(unit.clone());
            }
        }
        Ok(())
    }

    async fn next(&mut self) -> Option<UnitSignal> {
        match &mut self.signals {
            Some(signals) => signals.next().await,
            None => std::future::pending().await,
        }
    }

    /// Takes a signal, and the signals that have already arrived.
    fn take_all(&mut self, shared: &Context, first: Option<UnitSignal>) {
        self.take(shared, first);
        for _ in 0..AT_ONCE {
            let Some(next) = self.next().now_or_never() else { return };
            self.take(shared, next);
        }
    }

    fn take(&mut self, shared: &Context, signal: Option<UnitSignal>) {
        let (of, runs) = match signal {
            None => {
                self.signals = None;
                return;
            }
            Some(UnitSignal::Reloaded) => {
                self.all = true;
                return;
            }
            Some(UnitSignal::Changed { path, runs }) => (path, runs),
            Some(UnitSignal::Job { unit }) => (unit, None),
        };
        for unit in self.names.get(&of).into_iter().flatten() {
            let to = BoundTo::Unit(unit.clone());
            match (shared.bound.is_gone(&to), runs) {
                (Some(true), Some(true)) => shared.bound.set_gone(&to, false, Instant::now()),
                // systemd loads an idle unit to answer the probe, and signals that. This signal needs no further probe.
                (None, _) | (Some(true), Some(false)) | (Some(false), Some(true)) => {}
                (Some(false), Some(false)) | (Some(_), None) => drop(self.unsure.insert(unit.clone())),
            }
        }
    }
}

impl Context {
    fn unbind(self: &Arc<Self>, due: Due) {
        let Due { name, consumer, volume, uid, bound } = due;
        let key = ClaimKey::new(&name, &consumer);
        self.directory.send(&volume, name, Message::Unbind(key, uid, bound));
    }

    async fn look_at_callers(&self) {
        let callers = self.bound.callers();
        let (on_bus, connected): (Vec<_>, Vec<_>) = callers.into_iter().partition(|name| is_on_bus(name));
        let here = self.connections.lock().clone();
        let mut seen: Vec<(String, bool)> =
            connected.into_iter().map(|name| (name.clone(), here.contains(&name))).collect();
        if !on_bus.is_empty() {
            match self.units.bus_names().await {
                Ok(names) => {
                    let names: BTreeSet<String> = names.into_iter().collect();
                    seen.extend(on_bus.into_iter().map(|name| (name.clone(), names.contains(&name))));
                }
                Err(error) => {
                    tracing::warn!(%error, "callers that claims are bound to cannot be looked at; the claims stay");
                }
            }
        }
        let now = Instant::now();
        for (name, is_there) in seen {
            self.bound.set_gone(&BoundTo::Caller(name), !is_there, now);
        }
    }

    /// Refuses a claim whose unit does not run, unless the claim has a grace time. Also refuses it if the uid names too many
    /// units.
    pub(in crate::volume) async fn refuse_ended(&self, bound: &Bound, uid: u32) -> Result<()> {
        let BoundTo::Unit(unit) = &bound.to else { return Ok(()) };
        if !self.bound.may_name(uid, unit) {
            return Err(ClaimError::TooManyUnits { most: UNITS_OF_UID }.into());
        }
        match self.units.running(&[unit]).await {
            Ok(running) if running.is_empty() && bound.grace_usec == 0 => {
                Err(ClaimError::NotRunning { to: bound.to.clone() }.into())
            }
            Ok(_) => Ok(()),
            Err(error) => Err(ClaimError::Unwatchable { to: bound.to.clone(), source: error.into() }.into()),
        }
    }
}

/// Returns whether the connection is on a bus. A unique name has a colon, after the name of its bus.
fn is_on_bus(name: &str) -> bool {
    name.contains(':')
}
