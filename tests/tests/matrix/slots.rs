//! The mounts of a site in which csid is killed, and what a client knows of them. The client asks, notes what the answers allow, starts csid
//! again and waits until csid is at rest.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use csi_witness::rules::Breach;
use csi_witness::{Mark, Setup, Sockets, Witness};
use csid_client::{Client, MountFilter, MountRow, Target};
use csid_tests::dice::Dice;
use csid_tests::kernel;
use csid_tests::site::Site;
use csid_tests::world::{World, eventually};
use futures_util::future::join_all;
use tokio::task::JoinHandle;

use crate::model::{self, Ask, State, Told, What};
use crate::plan::Kind;
use crate::report::{Broken, Report};
use crate::slot::{Answer, Manner, Slot};

pub const POLL: Duration = Duration::from_millis(5);
/// Within this csid comes to rest, however slow the machine is.
const PATIENCE: Duration = Duration::from_secs(60);

pub struct Slots<'w> {
    pub site: Site<'w>,
    pub slots: Vec<Slot>,
    pub witnesses: Witnesses,
    pub dice: Dice,
    pub report: Arc<Report>,
    /// Whether the plugins count publishes.
    counts: bool,
}

/// The witnesses, one before each plugin, which outlive csid.
#[derive(Default)]
pub struct Witnesses(Vec<Witness>);

impl Witnesses {
    pub fn mark(&self, mark: &Mark) {
        for witness in &self.0 {
            witness.mark(mark.clone()).expect("the witness' log");
        }
    }

    pub fn breaches(&self) -> Vec<Breach> {
        self.0.iter().flat_map(|witness| witness.verdict().expect("the witness' log").breaches).collect()
    }
}

impl<'w> Slots<'w> {
    pub async fn new(w: &'w mut World, kinds: &[Kind], dice: Dice, report: Arc<Report>) -> Self {
        let mut witnesses = Witnesses::default();
        for id in kinds.iter().map(|kind| kind.plugin()).collect::<BTreeSet<_>>() {
            // Each round asks for the verdict, so the witness is the matrix' own.
            let plugin = w.add_unwitnessed(id, "").await;
            let [listen, log] = ["witness.sock", "witness.jsonl"].map(|name| plugin.directory.join(name));
            let sockets = vec![Sockets { listen: listen.clone(), plugin: plugin.socket() }];
            let setup = Setup { sockets, log, ..Setup::default() };
            witnesses.0.push(Witness::start(setup).expect("a witness"));
            w.configure_plugin(id, &listen, "rpc-deadline = \"1s\"");
        }
        if kinds.contains(&Kind::Unstaged) {
            w.plugin("q").set(|script| script.capabilities.retain(|c| c != "STAGE_UNSTAGE_VOLUME"));
        }
        let slots = Slot::all(w, kinds);
        let site = Site::start(w).await;
        Slots { site, slots, witnesses, dice, report, counts: false }
    }

    /// Makes the plugins count publishes, before anything is published.
    pub fn count_publishes(&mut self) {
        let plugins: BTreeSet<_> = self.slots.iter().map(|slot| slot.kind.plugin()).collect();
        for id in plugins {
            self.site.w.plugin(id).set(|script| script.counts_publishes = true);
        }
        self.counts = true;
    }

    /// Returns the slots of a kind in random order.
    pub fn choose(&mut self, kind: Kind) -> Vec<usize> {
        let mut all: Vec<_> = (0..self.slots.len()).filter(|slot| self.slots[*slot].kind == kind).collect();
        self.dice.shuffle(&mut all);
        all
    }

    /// Makes the call for all of these slots at once, and notes which states the answers allow.
    pub async fn ask(&mut self, ask: Ask, slots: &[usize]) -> Vec<Told> {
        let asked = self.begin(ask, slots);
        self.end(ask, slots, asked).await
    }

    pub fn begin(&mut self, ask: Ask, slots: &[usize]) -> Vec<JoinHandle<Answer>> {
        let mut asked = Vec::new();
        for slot in slots {
            let slot = &mut self.slots[*slot];
            if ask == Ask::Unmount {
                slot.holds.clear();
            }
            asked.push(tokio::spawn(slot.ask(&self.site.client, ask, Manner::default())));
        }
        asked
    }

    pub async fn end(&mut self, ask: Ask, slots: &[usize], asked: Vec<JoinHandle<Answer>>) -> Vec<Told> {
        let mut answers = std::pin::pin!(join_all(asked));
        let answers = loop {
            tokio::select! {
                answers = &mut answers => break answers,
                () = tokio::time::sleep(POLL) => self.site.w.revive().await,
            }
        };
        let table = kernel::volumes_below(&self.site.w.dir).expect("the mount table");
        let mut all = Vec::new();
        for (slot, answer) in slots.iter().zip(answers) {
            let (reply, source) = answer.expect("the caller");
            let slot = &mut self.slots[*slot];
            let states = model::after(slot.state(), &What::Asked(ask, reply.clone()), slot.restores);
            slot.allowed = states.into_iter().map(State::at_rest).collect();
            if let Some(source) = source {
                // An answered mount is there at once.
                slot.holds = slot.mounts(&table, &source).unwrap_or_else(|| {
                    self.report.wrong(Broken::LostMount);
                    panic!("{} {} was answered, and is not there: {table:#?}", slot.volume, slot.consumer);
                });
            }
            all.push(reply);
        }
        all
    }

    /// Makes calls that an honest plugin carries out. A call that a busy machine delayed beyond its deadline is repeated. So is an unmount of
    /// a plugin that counts a publish of which csid knows nothing any more: no caller was answered, and the host rebooted.
    pub async fn must(&mut self, ask: Ask, slots: &[usize]) {
        let mut left = slots.to_vec();
        for last in [false, false, true] {
            let reply = self.ask(ask, &left).await;
            let wrong: Vec<_> =
                left.into_iter().zip(reply).filter(|(_, reply)| *reply != Told::Done).collect();
            let slow =
                |(slot, reply): &(usize, Told)| reply.is_held_up() && self.slots[*slot].allowed.len() == 1;
            let counted = |(_, reply): &(usize, Told)| self.counts && reply.is_failed_precondition();
            let may_be = |one: &(usize, Told)| slow(one) || counted(one);
            assert!(!last && wrong.iter().all(may_be) || wrong.is_empty(), "{ask:?} of {wrong:?}");
            left = wrong.into_iter().map(|(slot, _)| slot).collect();
            // The repeated call decides.
            left.iter().for_each(|slot| {
                let allowed = &mut self.slots[*slot].allowed;
                allowed.retain(|state| *state != State::Absent || ask == Ask::Mount);
            });
            if left.is_empty() {
                return;
            }
        }
    }

    /// Notes an event that all mounts had.
    pub fn happened(&mut self, what: &What) {
        for slot in &mut self.slots {
            let states = slot.allowed.iter().flat_map(|state| model::after(*state, what, slot.restores));
            slot.allowed = states.collect();
            if *what == What::Rebooted {
                slot.holds.clear();
            }
        }
    }

    /// Starts csid, which may die at once.
    pub async fn start(&mut self) {
        if self.site.w.launch(&[]).await
            && let Ok(client) = Client::connect(&Target::Socket(self.site.w.socket())).await
        {
            self.site.client = client;
        }
    }

    /// Let csid come to rest, and hold what is there against what may be. If it was killed, `killed` gets the edge, and csid is
    /// started again.
    pub async fn settle(&mut self, killed: impl FnOnce(&mut Self, &str)) {
        let rests = self.rests().await;
        let edge = self.site.fault.disarm();
        let rows = if rests { self.rows().await } else { None };
        let rows = match rows {
            Some(rows) => rows,
            None => {
                eventually("csid has ended", async || self.site.w.dead()).await;
                killed(self, &edge);
                self.happened(&What::Restarted);
                assert!(self.site.w.launch(&[]).await, "csid ended without a fault");
                self.site.client = self.site.w.client().await;
                assert!(self.rests().await, "csid ended without a fault");
                self.rows().await.expect("csid runs")
            }
        };
        self.check(&rows);
    }

    pub async fn rows(&self) -> Option<Vec<MountRow>> {
        self.site.client.list_mounts(MountFilter::default()).await.ok()
    }

    /// Waits until no operation is under way. Returns false if csid was killed before.
    async fn rests(&mut self) -> bool {
        let end = Instant::now() + PATIENCE;
        loop {
            self.site.w.revive().await;
            if self.site.w.dead() {
                return false;
            }
            let busy = match (self.site.client.list_operations().await, self.rows().await) {
                (Ok(operations), Some(rows)) if operations.is_empty() => {
                    rows.iter().filter(|row| !self.is_at_rest(row)).map(|row| format!("{row:?}")).collect()
                }
                (operations, _) => vec![format!("{operations:?}")],
            };
            if busy.is_empty() {
                return true;
            }
            assert!(Instant::now() < end, "csid does not come to rest: {busy:#?}");
            tokio::time::sleep(POLL).await;
        }
    }

    fn is_at_rest(&self, row: &MountRow) -> bool {
        match row.state.as_str() {
            "mounted" | "lost" => true,
            "waiting" => self.slot(row).is_some_and(|slot| slot.restores.rests() == State::Waiting),
            _ => false,
        }
    }

    pub fn slot(&self, row: &MountRow) -> Option<&Slot> {
        self.slots.iter().find(|slot| slot.volume == row.volume && slot.consumer == row.consumer)
    }
}
