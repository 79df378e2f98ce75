//! Several clients at once who mount, unmount, repeat, give up and cancel, while csid is killed, stopped and started, its
//! plugins misbehave and die, mounts are taken away and the host reboots. An answer is held against the kernel at once, where
//! nothing else was under way at its mount. From time to time all pause; then what is there is held against what may be after
//! these calls and events, in any order that their times leave open.

use std::cell::{Cell, RefCell};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use csi_witness::Mark;
use csid_client::{Client, Target};
use csid_tests::dice::Dice;
use csid_tests::kernel;
use csid_tests::script::{Act, Rule};
use csid_tests::site::Site;
use futures_util::future::join_all;

use crate::model::{Ask, Entry, State, Told, What, after, after_all};
use crate::plan::{self, Kind, Operation, Plugin};
use crate::report::{Broken, Report};
use crate::slot::{Manner, Slot};
use crate::slots::{POLL, Slots, Witnesses};
use crate::traffic::Traffics;

const CLIENTS: usize = 4;
/// Calls of a client between two pauses, at most.
const CALLS: u64 = 5;
const CELL: &str = "sequences";

/// The calls of each slot.
type History = RefCell<Vec<Vec<Entry<What>>>>;

impl Slots<'_> {
    pub async fn sequences(&mut self, epochs: usize) {
        // Few, so that they meet: two consumers of a volume, what rests as lost, what waits for its secrets, each kind.
        let few = ["FileSystem-0", "FileSystem-18", "FileSystem-17", "Block-0", "Unstaged-18"];
        self.slots.retain(|slot| few.contains(&slot.volume.as_str()));
        // And two who want what only one may have.
        let rivals: Vec<_> = self.slots.iter().filter(|slot| slot.is_exclusive()).map(Slot::rival).collect();
        self.slots.extend(rivals);
        for _ in 0..epochs {
            self.epoch().await;
        }
    }

    async fn epoch(&mut self) {
        let history = RefCell::new(vec![Vec::new(); self.slots.len()]);
        let traffic = Traffics::new(self.slots.len());
        let host = Host {
            dir: &self.site.w.dir.clone(),
            socket: self.site.w.socket(),
            slots: &self.slots,
            history: &history,
            traffic: &traffic,
            report: &self.report,
        };
        let dice: Vec<_> = (0..CLIENTS).map(|_| Dice::new(self.dice.bits(), 0)).collect();
        let clients = dice.into_iter().map(|dice| host.client(dice));
        let paused = Cell::new(false);
        let clients = async {
            join_all(clients).await;
            paused.set(true);
        };
        let mut fate = Fate { site: &mut self.site, host: &host, witnesses: &self.witnesses };
        tokio::join!(clients, fate.until(&paused, &mut self.dice));

        let mut histories = history.into_inner();
        self.note_probes(&mut histories);
        for (slot, history) in self.slots.iter_mut().zip(histories) {
            let after = |state, what: &What| after(state, what, slot.restores);
            let states = after_all(slot.state(), &history, after).into_iter();
            slot.allowed = states.map(State::at_rest).collect();
            if history.iter().any(|entry| entry.what.may_unmount()) {
                slot.holds.clear();
            }
            slot.history = history;
        }
        self.site.w.honest();
        // csid may be dead, or about to die.
        let edge = self.site.fault.disarm();
        self.site.client = loop {
            if self.site.w.dead() {
                self.report.kill(&edge, CELL);
                self.happened(&What::Restarted);
                assert!(self.site.w.launch(&[]).await, "csid ended without a fault");
            }
            match Client::connect(&Target::Socket(self.site.w.socket())).await {
                Ok(client) => break client,
                Err(_) => tokio::time::sleep(POLL).await,
            }
        };
        self.settle(|slots, edge| {
            slots.report.kill(edge, CELL);
        })
        .await;
    }

    /// Enters each Mount of a consumer whose mount may be taken into the histories of the volume's other consumers.
    fn note_probes(&self, histories: &mut [Vec<Entry<What>>]) {
        let mut probes = Vec::new();
        for (number, slot) in self.slots.iter().enumerate() {
            let history = &histories[number];
            let may_be_taken =
                slot.state() == State::Taken || history.iter().any(|entry| entry.what == What::Taken);
            if !may_be_taken {
                continue;
            }
            let mounts = history.iter().filter(|entry| matches!(entry.what, What::Asked(Ask::Mount, _)));
            let probed = mounts.map(|entry| Entry { what: What::Probed, ..entry.clone() });
            probes.extend(probed.map(|entry| (number, entry)));
        }
        for (by, probe) in probes {
            for (number, slot) in self.slots.iter().enumerate() {
                if number != by && slot.volume == self.slots[by].volume {
                    histories[number].push(probe.clone());
                }
            }
        }
    }
}

/// The state that the clients share.
struct Host<'a> {
    dir: &'a Path,
    socket: PathBuf,
    slots: &'a [Slot],
    history: &'a History,
    traffic: &'a Traffics,
    report: &'a Report,
}

impl Host<'_> {
    /// Makes the calls of one caller, one after the other.
    async fn client(&self, mut dice: Dice) {
        let mut connection = None;
        let mut left = 1 + dice.below(CALLS);
        while left > 0 {
            let Some(client) = &connection else {
                tokio::time::sleep(POLL).await;
                connection = Client::connect(&Target::Socket(self.socket.clone())).await.ok();
                continue;
            };
            left -= 1;
            let slot = dice.below(self.slots.len() as u64) as usize;
            let ask = dice.of(&[Ask::Mount, Ask::Unmount]);
            let mut pause = |most| Duration::from_millis(dice.below(most));
            let (wait, patience, regret) = (pause(40), pause(400), pause(100));
            let manner = Manner {
                deadline: dice.once_in(3).then_some(patience + POLL),
                cancel: dice.once_in(6).then(|| (format!("{:x}", dice.bits()), regret)),
            };
            let begun = Instant::now();
            let ride = self.traffic.enter(slot);
            let (answer, source) = self.slots[slot].ask(client, ask, manner).await;
            if self.traffic.leave(slot, &ride) && answer == Told::Done {
                self.report.count(format!("answers looked at in sequences: {ask:?}"));
                self.look(&self.slots[slot], source.as_deref());
            }
            if answer == Told::CutOff {
                connection = None;
            }
            self.report.count(format!("calls in sequences: {ask:?} {answer:?}"));
            let entry = Entry { what: What::Asked(ask, answer), begun, ended: Instant::now() };
            self.history.borrow_mut()[slot].push(entry);
            tokio::time::sleep(wait).await;
        }
    }

    /// Checks that an answered mount is there at once, and an unmounted one is gone.
    fn look(&self, slot: &Slot, source: Option<&Path>) {
        let table = kernel::volumes_below(self.dir).expect("the mount table");
        let Slot { volume, consumer, .. } = slot;
        match source {
            Some(source) if slot.mounts(&table, source).is_none() => {
                self.report.wrong(Broken::LostMount);
                panic!("{volume} {consumer} was answered, and is not there: {table:#?}");
            }
            Some(_) => {}
            None => {
                // The answer does not name the published path, and the volume may have other users.
                if let Some(left) = table.iter().find(|mount| slot.target.as_ref() == Some(&mount.point)) {
                    self.report.wrong(Broken::Leftover);
                    panic!("{volume} {consumer} was answered to be gone, and is there: {left:?}");
                }
            }
        }
    }
}

/// The kills and reboots of the host while the clients call.
struct Fate<'a, 'w> {
    site: &'a mut Site<'w>,
    host: &'a Host<'a>,
    witnesses: &'a Witnesses,
}

impl Fate<'_, '_> {
    async fn until(&mut self, paused: &Cell<bool>, dice: &mut Dice) {
        let mut next = Instant::now();
        while !paused.get() {
            let alive = Instant::now();
            tokio::time::sleep(POLL).await;
            self.site.w.revive().await;
            if self.site.w.dead() {
                let edge = self.site.fault.disarm();
                self.host.report.kill(&edge, CELL);
                self.start(What::Restarted, alive).await;
            } else if alive >= next {
                self.strike(dice).await;
                next = Instant::now() + Duration::from_millis(dice.below(200));
            }
        }
    }

    async fn strike(&mut self, dice: &mut Dice) {
        let begun = Instant::now();
        match dice.below(12) {
            0..4 => self.site.fault.arm(&format!("any:{}", 1 + dice.below(40))),
            4 => {
                self.host.report.kill("at any time", CELL);
                self.site.w.kill();
                self.start(What::Restarted, begun).await;
            }
            5 => {
                self.host.report.count("stops in sequences".to_owned());
                self.site.w.stop().await;
                self.start(What::Restarted, begun).await;
            }
            6 => {
                self.host.report.count("reboots in sequences".to_owned());
                let slots = 0..self.host.slots.len();
                let rides: Vec<_> = slots.map(|slot| self.host.traffic.enter(slot)).collect();
                self.site.w.reboot().await;
                self.witnesses.mark(&Mark::Reboot);
                self.start(What::Rebooted, begun).await;
                for (slot, ride) in rides.iter().enumerate() {
                    self.host.traffic.leave(slot, ride);
                }
            }
            7 => {
                // A mount that is there, as far as that is known.
                let held = |slot: &usize| !self.host.slots[*slot].holds.is_empty();
                let held: Vec<_> = (0..self.host.slots.len()).filter(held).collect();
                if held.is_empty() {
                    return;
                }
                let slot = dice.of(&held);
                let ride = self.host.traffic.enter(slot);
                if self.host.slots[slot].take_away() {
                    self.host.report.count("mounts taken away in sequences".to_owned());
                    self.note(slot, What::Taken, begun);
                }
                self.host.traffic.leave(slot, &ride);
            }
            8 => {
                let plugin = self.site.w.plugin(dice.of(&Kind::ALL).plugin());
                self.host.report.count("kills of the plugin in sequences".to_owned());
                plugin.kill();
                // Else it may die of its script before it is seen to listen.
                plugin.honest();
                plugin.start().await;
            }
            _ => {
                let kind = dice.of(&Kind::ALL);
                let operation = dice.of(&[Operation::Mount, Operation::Unmount]);
                let behaviours = [&Plugin::ALL[..], &Plugin::ODD[..]].concat();
                let cell = plan::Cell { operation, flight: 2, kind, plugin: dice.of(&behaviours) };
                let rpc = dice.of(&operation.rpcs(kind));
                let mut rules = cell.rules(rpc, dice);
                if rules.is_empty() {
                    let late = dice.below(1500);
                    let act = [Act::Delay(late), Act::DelayAfter(late), Act::Stubborn(late)];
                    rules.push(Rule::once(rpc, act[dice.below(3) as usize].clone()));
                }
                self.site.w.plugin(kind.plugin()).rules(rules);
            }
        }
    }

    /// Start csid; `what` that was, since `begun`, for all mounts.
    async fn start(&mut self, what: What, begun: Instant) {
        self.site.fault.disarm();
        assert!(self.site.w.launch(&[]).await, "csid ended without a fault");
        for slot in 0..self.host.slots.len() {
            self.note(slot, what.clone(), begun);
        }
    }

    fn note(&self, slot: usize, what: What, begun: Instant) {
        self.host.history.borrow_mut()[slot].push(Entry { what, begun, ended: Instant::now() });
    }
}
