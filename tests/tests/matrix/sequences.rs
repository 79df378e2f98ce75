//! Several clients at once who mount, unmount, repeat, give up and cancel, while csid is killed, stopped and started, its
//! plugins misbehave and die, mounts are taken away and the host reboots. From time to time all pause; then what is there is
//! held against what may be after these calls and events, in any order that their times leave open.

use std::cell::{Cell, RefCell};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use csi_witness::Mark;
use csid_client::{Client, Target};
use csid_tests::dice::Dice;
use csid_tests::script::{Act, Rule};
use csid_tests::world::World;
use futures_util::future::join_all;

use crate::model::{Ask, Entry, Told, What, after_all};
use crate::plan::{self, Kind, Operation, Plugin};
use crate::report::Report;
use crate::site::{POLL, Site, Witnesses, arm, disarm};
use crate::slot::{Manner, Slot};

const CLIENTS: usize = 4;
/// Calls of a client between two pauses, at most.
const CALLS: u64 = 5;
const CELL: &str = "sequences";

/// What happened to each slot.
type History = RefCell<Vec<Vec<Entry>>>;

impl Site<'_> {
    pub async fn sequences(&mut self, epochs: usize) {
        // Few, so that they meet: two consumers of a volume, what rests as lost, what waits for its secrets, each kind.
        let few = ["FileSystem-0", "FileSystem-18", "FileSystem-17", "Block-0", "Unstaged-18"];
        self.slots.retain(|slot| few.contains(&slot.volume.as_str()));
        for _ in 0..epochs {
            self.epoch().await;
        }
    }

    async fn epoch(&mut self) {
        let history = RefCell::new(vec![Vec::new(); self.slots.len()]);
        let clients: Vec<_> = (0..CLIENTS)
            .map(|_| {
                let dice = Dice::new(self.dice.bits(), 0);
                client(&self.slots, self.w.socket(), dice, &history, &self.report)
            })
            .collect();
        let paused = Cell::new(false);
        let clients = async {
            join_all(clients).await;
            paused.set(true);
        };
        let mut fate = Fate {
            w: self.w,
            slots: &self.slots,
            witnesses: &self.witnesses,
            history: &history,
            report: &self.report,
        };
        tokio::join!(clients, fate.until(&paused, &mut self.dice));

        for (slot, history) in self.slots.iter_mut().zip(history.into_inner()) {
            slot.allowed = after_all(slot.state(), &history, slot.restores);
            if history.iter().any(|entry| entry.what.may_unmount()) {
                slot.holds.clear();
            }
        }
        self.w.honest();
        // It may be dead, or about to die.
        let edge = disarm(self.w);
        self.client = loop {
            if self.w.dead() {
                self.report.kill(&edge, CELL);
                self.happened(&What::Restarted);
                assert!(self.w.launch(&[]).await, "csid ended without a fault");
            }
            match Client::connect(&Target::Socket(self.w.socket())).await {
                Ok(client) => break client,
                Err(_) => tokio::time::sleep(POLL).await,
            }
        };
        self.settle(|site, edge| {
            site.report.kill(edge, CELL);
        })
        .await;
    }
}

/// One caller's calls, one after the other.
async fn client(slots: &[Slot], socket: PathBuf, mut dice: Dice, history: &History, report: &Report) {
    let mut connection = None;
    let mut left = 1 + dice.below(CALLS);
    while left > 0 {
        let Some(client) = &connection else {
            tokio::time::sleep(POLL).await;
            connection = Client::connect(&Target::Socket(socket.clone())).await.ok();
            continue;
        };
        left -= 1;
        let slot = dice.below(slots.len() as u64) as usize;
        let ask = dice.of(&[Ask::Mount, Ask::Unmount]);
        let mut pause = |most| Duration::from_millis(dice.below(most));
        let (wait, patience, regret) = (pause(40), pause(400), pause(100));
        let manner = Manner {
            deadline: dice.once_in(3).then_some(patience + POLL),
            cancel: dice.once_in(6).then(|| (format!("{:x}", dice.bits()), regret)),
        };
        let begun = Instant::now();
        let (told, _) = slots[slot].ask(client, ask, manner).await;
        if told == Told::CutOff {
            connection = None;
        }
        report.count(format!("calls in sequences: {ask:?} {told:?}"));
        let entry = Entry { what: What::Asked(ask, told), begun, ended: Instant::now() };
        history.borrow_mut()[slot].push(entry);
        tokio::time::sleep(wait).await;
    }
}

/// What befalls the host while the clients call.
struct Fate<'a> {
    w: &'a mut World,
    slots: &'a [Slot],
    witnesses: &'a Witnesses,
    history: &'a History,
    report: &'a Report,
}

impl Fate<'_> {
    async fn until(&mut self, paused: &Cell<bool>, dice: &mut Dice) {
        let mut next = Instant::now();
        while !paused.get() {
            let alive = Instant::now();
            tokio::time::sleep(POLL).await;
            self.w.revive().await;
            if self.w.dead() {
                let edge = disarm(self.w);
                self.report.kill(&edge, CELL);
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
            0..4 => arm(self.w, &format!("any:{}", 1 + dice.below(40))),
            4 => {
                self.report.kill("at any time", CELL);
                self.w.kill();
                self.start(What::Restarted, begun).await;
            }
            5 => {
                self.report.count("stops in sequences".to_owned());
                self.w.stop().await;
                self.start(What::Restarted, begun).await;
            }
            6 => {
                self.report.count("reboots in sequences".to_owned());
                self.w.reboot().await;
                self.witnesses.mark(Mark::Reboot);
                self.start(What::Rebooted, begun).await;
            }
            7 => {
                let slot = dice.below(self.slots.len() as u64) as usize;
                if self.slots[slot].take_away() {
                    self.report.count("mounts taken away in sequences".to_owned());
                    self.note(slot, What::Taken, begun);
                }
            }
            8 => {
                let plugin = self.w.plugin(dice.of(&Kind::ALL).plugin());
                self.report.count("kills of the plugin in sequences".to_owned());
                plugin.kill();
                plugin.start().await;
            }
            _ => {
                let kind = dice.of(&Kind::ALL);
                let operation = dice.of(&[Operation::Mount, Operation::Unmount]);
                let cell = plan::Cell { operation, flight: 2, kind, plugin: dice.of(&Plugin::ALL) };
                let rpc = dice.of(&operation.rpcs(kind));
                let mut rules = cell.rules(rpc, dice);
                if rules.is_empty() {
                    let late = dice.below(1500);
                    let act = [Act::Delay(late), Act::DelayAfter(late), Act::Stubborn(late)];
                    rules.push(Rule::once(rpc, act[dice.below(3) as usize].clone()));
                }
                self.w.plugin(kind.plugin()).rules(rules);
            }
        }
    }

    /// Start csid; `what` that was, since `begun`, for all mounts.
    async fn start(&mut self, what: What, begun: Instant) {
        disarm(self.w);
        assert!(self.w.launch(&[]).await, "csid ended without a fault");
        for slot in 0..self.slots.len() {
            self.note(slot, what.clone(), begun);
        }
    }

    fn note(&self, slot: usize, what: What, begun: Instant) {
        self.history.borrow_mut()[slot].push(Entry { what, begun, ended: Instant::now() });
    }
}
