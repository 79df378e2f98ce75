//! The whole way of a volume, killed at each edge of it: one volume beside one that somebody has, or all at once.

use csid_tests::script::{Act, Rule};
use futures_util::future::join_all;

use super::{Answer, Ask, Caller, Manner, Pool, first_of};
use crate::model::Told;
use crate::plan::{Plugin, hang};
use crate::site::{POLL, arm};

/// More edges than one volume's way has.
const EDGES: u64 = 300;
/// As many as one volume's way has, about.
const EDGES_OF_ONE: u64 = 100;

/// The places of a volume's items.
const REGISTRATION: usize = 0;
const USE: usize = 1;
const OTHER_NODE: usize = 5;

const WAY: [(usize, Ask); 13] = [
    (REGISTRATION, Ask::Register),
    (USE, Ask::Claim),
    (USE, Ask::Mount),
    (REGISTRATION, Ask::Expand),
    (REGISTRATION, Ask::Snapshot),
    (USE, Ask::Unmount),
    (USE, Ask::Release),
    (USE, Ask::Mount),
    (USE, Ask::Claim),
    (USE, Ask::Release),
    (OTHER_NODE, Ask::Attach),
    (OTHER_NODE, Ask::Detach),
    (REGISTRATION, Ask::Delete),
];

/// The calls it makes.
pub const RPCS: [&str; 11] = [
    "ValidateVolumeCapabilities",
    "ControllerPublishVolume",
    "ControllerUnpublishVolume",
    "ControllerExpandVolume",
    "CreateSnapshot",
    "DeleteVolume",
    "NodeExpandVolume",
    "NodeStageVolume",
    "NodePublishVolume",
    "NodeUnpublishVolume",
    "NodeUnstageVolume",
];

impl Pool<'_> {
    /// One volume, killed at its first edge, then at its second, to the last. The other is mounted, and stays so.
    pub async fn every_edge(&mut self) {
        self.bystander().await;
        let mut edge = 1;
        while self.round("the way of 1, the plugin Answers", &[0], edge).await {
            edge += 1;
            assert!(edge < EDGES, "the way has no end");
        }
    }

    /// Killed somewhere on the way of all volumes but the last.
    pub async fn any_edge(&mut self, plugin: Plugin, rounds: usize) {
        self.bystander().await;
        let volumes: Vec<_> = (0..self.volumes.len() - 1).collect();
        let cell = format!("the way of {}, the plugin {plugin:?}", volumes.len());
        for _ in 0..rounds {
            let (rpc, from) = (self.dice.of(&RPCS), 1 + self.dice.below(2));
            let act = misbehaviour(plugin, &mut self.dice);
            self.w.plugin("p").rules(act.map(|act| Rule { from, ..Rule::once(rpc, act) }));
            let edge = 1 + self.dice.below(EDGES_OF_ONE * volumes.len() as u64);
            self.round(&cell, &volumes, edge).await;
        }
    }

    /// Somebody has the last volume.
    async fn bystander(&mut self) {
        let last = self.volumes.len() - 1;
        self.register(last).await;
        self.must(first_of(last) + USE, Ask::Mount).await;
        assert_eq!(self.settle("beginning").await, None, "csid ended by itself");
    }

    /// Whether csid came so far.
    async fn round(&mut self, cell: &str, volumes: &[usize], edge: u64) -> bool {
        for volume in volumes {
            self.w.plugin("p").provision(&self.volumes[*volume].name);
        }
        arm(self.w, &format!("any:{edge}"));
        for (item, ask, answer) in self.go(volumes).await {
            self.note(item, ask, &answer);
            if ask == Ask::Delete && answer.0 == Told::Done {
                self.volumes[self.items[item].volume].bytes = super::BYTES;
            }
        }
        let killed = self.settle(cell).await;
        self.away(volumes).await;
        self.settle(cell).await;
        killed.is_some()
    }

    /// All of them go their way at once, each until it is cut off.
    async fn go(&mut self, volumes: &[usize]) -> Vec<(usize, Ask, Answer)> {
        let caller = Caller { client: &self.client, volumes: &self.volumes, items: &self.items };
        let ways = volumes.iter().map(|volume| {
            let first = first_of(*volume);
            async move {
                let mut answers = Vec::new();
                for (place, ask) in WAY {
                    let manner = Manner { number: 2 * super::BYTES, ..Manner::default() };
                    let answer = caller.call((first + place, ask, manner)).await;
                    let is_cut_off = answer.0 == Told::CutOff;
                    answers.push((first + place, ask, answer));
                    if is_cut_off {
                        break;
                    }
                }
                answers
            }
        });
        let mut ways = std::pin::pin!(join_all(ways));
        loop {
            tokio::select! {
                answers = &mut ways => return answers.into_iter().flatten().collect(),
                () = tokio::time::sleep(POLL) => self.w.revive().await,
            }
        }
    }
}

/// What the plugin does wrong in one call.
pub fn misbehaviour(plugin: Plugin, dice: &mut csid_tests::dice::Dice) -> Option<Act> {
    let before = dice.once_in(2);
    let any = 1 + dice.below(16) as i32;
    // UNAVAILABLE and FAILED_PRECONDITION, for a while and for good, more often than others.
    let code = dice.of(&[14, 9, any]);
    match plugin {
        Plugin::Answers => None,
        Plugin::Fails if before => Some(Act::Fail(code)),
        Plugin::Fails => Some(Act::FailAfter(code)),
        Plugin::Hangs => Some(hang(before)),
        Plugin::Dies if before => Some(Act::DieBefore),
        Plugin::Dies => Some(Act::DieAfter),
    }
}
