//! The whole way of a volume, killed at each edge of it: one volume while another is in use, or all at once.

use csid_tests::clustered;
use csid_tests::script::{Act, Rule};
use futures_util::future::join_all;

use super::{Answer, Ask, Caller, Manner, Pool, first_of};
use crate::model::Told;
use crate::plan::{LATE, Plugin, TURN, hang};
use crate::slots::POLL;

/// More edges than one volume's way has.
const EDGES: u64 = 300;
/// About the number of edges of one volume's way.
const EDGES_OF_ONE: u64 = 100;

/// The places of a volume's items.
const REGISTRATION: usize = 0;
const USE: usize = 1;
const OTHER_NODE: usize = 5;

/// After its birth.
const WAY: [(usize, Ask); 12] = [
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

/// The shorter way of a volume that is created, not registered.
const SHORT_WAY: [(usize, Ask); 3] = [(USE, Ask::Mount), (USE, Ask::Unmount), (REGISTRATION, Ask::Delete)];

/// The calls they make.
pub const RPCS: [&str; 12] = [
    "CreateVolume",
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
    /// Works on one registered volume, then on one that is created. csid is killed at the first edge, then at the second, to the last.
    pub async fn every_edge(&mut self) {
        self.bystander().await;
        for (volume, way) in [(0, &WAY[..]), (1, &SHORT_WAY)] {
            let mut edge = 1;
            while self.round("the way of 1, the plugin Answers", way, &[volume], edge).await {
                edge += 1;
                assert!(edge < EDGES, "the way has no end");
            }
        }
    }

    /// Created and deleted, nothing between. When it is killed no more, the plugin having done what it does in any way it
    /// can, that was the last edge.
    pub async fn born(&mut self, plugin: Plugin) {
        self.bystander().await;
        let cell = format!("a birth and an end, the plugin {plugin:?}");
        for rpc in ["CreateVolume", "DeleteVolume"] {
            let (mut edge, mut survived) = (1, 0);
            while survived < 3 {
                let act = match misbehaviour(plugin, rpc, &mut self.dice) {
                    // The volume was not requested before, so the plugin may refuse it for good.
                    Some(Act::Fail(_)) if rpc == "CreateVolume" && self.dice.once_in(2) => {
                        Some(Act::Fail(self.dice.of(&FINAL)))
                    }
                    act => act,
                };
                self.site.w.plugin("p").rules(act.map(|act| Rule::once(rpc, act)));
                match self.round(&cell, &[(REGISTRATION, Ask::Delete)], &[1], edge).await {
                    true => edge += 1,
                    false => survived += 1,
                }
                assert!(edge < EDGES, "the way has no end");
            }
        }
    }

    /// Mounted for a connection that ends then: csid lets the claim go by itself, also one that it finds at its start.
    pub async fn bound(&mut self) {
        self.bystander().await;
        let way = [(USE, Ask::Bound), (REGISTRATION, Ask::Delete)];
        let mut edge = 1;
        while self.round("what a mount is bound to ends", &way, &[0], edge).await {
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
            let act = misbehaviour(plugin, rpc, &mut self.dice);
            self.site.w.plugin("p").rules(act.map(|act| Rule { from, ..Rule::once(rpc, act) }));
            let edge = 1 + self.dice.below(EDGES_OF_ONE * volumes.len() as u64);
            self.round(&cell, &WAY, &volumes, edge).await;
        }
    }

    /// Somebody has the last volume.
    async fn bystander(&mut self) {
        let last = self.volumes.len() - 1;
        self.register(last).await;
        self.must(first_of(last) + USE, Ask::Mount).await;
        assert_eq!(self.settle("beginning").await, None, "csid ended by itself");
    }

    /// All of these volumes go this way at once. Whether csid came to the edge.
    async fn round(&mut self, cell: &str, way: &[(usize, Ask)], volumes: &[usize], edge: u64) -> bool {
        for volume in volumes {
            self.provision(*volume);
        }
        self.site.fault.arm(&format!("any:{edge}"));
        for (item, ask, answer) in self.go(way, volumes).await {
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

    /// Each until it is cut off.
    async fn go(&mut self, way: &[(usize, Ask)], volumes: &[usize]) -> Vec<(usize, Ask, Answer)> {
        let caller = Caller { client: &self.site.client, volumes: &self.volumes, items: &self.items };
        let ways = volumes.iter().map(|volume| {
            let first = first_of(*volume);
            let birth = (REGISTRATION, self.volumes[*volume].birth());
            async move {
                let mut answers = Vec::new();
                for (place, ask) in std::iter::once(birth).chain(way.iter().copied()) {
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
                () = tokio::time::sleep(POLL) => self.site.w.revive().await,
            }
        }
    }
}

/// The codes after which it is open whether a volume was made. A plugin that answers with another code has none of that name (CSI
/// rule 36), and csid forgets it.
const OPEN: [i32; 7] = [1, 2, 4, 10, 13, 14, 15];

/// The codes with which a plugin refuses to create a volume. The next round requests the same volume.
const FINAL: [i32; 5] = [5, 7, 8, 9, 16];

/// DEADLINE_EXCEEDED, ABORTED and UNAVAILABLE: the call is made again.
const LATER: [i32; 3] = [4, 10, 14];

/// Returns a fault of the plugin in one call. `None`: no fault.
pub fn misbehaviour(plugin: Plugin, rpc: &str, dice: &mut csid_tests::dice::Dice) -> Option<Act> {
    let before = dice.once_in(2);
    let any = 1 + dice.below(16) as i32;
    // UNAVAILABLE and FAILED_PRECONDITION, for a while and for good, more often than others.
    let code = match (rpc, any) {
        ("CreateVolume", _) => dice.of(&OPEN),
        // An operator looks at a detach that a plugin refuses, and here is none.
        ("ControllerUnpublishVolume", _) if clustered::is_used() => dice.of(&LATER),
        // NOT_FOUND: it is gone.
        ("DeleteVolume", 5) => 9,
        _ => dice.of(&[14, 9, any]),
    };
    match plugin {
        Plugin::Answers => None,
        Plugin::Fails if before => Some(Act::Fail(code)),
        Plugin::Fails => Some(Act::FailAfter(code)),
        Plugin::Hangs => Some(hang(before)),
        Plugin::Dies if before => Some(Act::DieBefore),
        Plugin::Dies => Some(Act::DieAfter),
        Plugin::Late => Some(Act::Background(LATE)),
        Plugin::Serial => Some(Act::Serial(TURN)),
        // What these do differently they do in calls about mounts.
        Plugin::Leaves | Plugin::Counts => None,
    }
}
