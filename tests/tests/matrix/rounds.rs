//! The cells of the matrix, kill by kill: bring the volumes to where the operation begins, let csid die at an edge of it, see
//! that nothing is lost or left, and repeat what was not answered.

use std::collections::BTreeSet;

use csi_witness::Mark;
use csid_tests::script::Rule;
use csid_tests::world::eventually;

use crate::model::{Ask, Restores, State, What};
use crate::plan::{Calls, Cell, Operation, Plugin, hang};
use crate::slots::Slots;

/// More edges than one volume's operation has.
const EDGES: u64 = 200;
/// Fewer than each of several passes, so that a random edge is mostly there.
const EDGES_OF_ONE: u64 = 12;

impl Slots<'_> {
    /// Works on one volume. csid is killed at its first edge, then at its second, to the last.
    pub async fn every_edge(&mut self, cell: &Cell, calls: Calls) {
        let mut rpcs = cell.operation.rpcs(cell.kind);
        if calls == Calls::One || cell.plugin == Plugin::Answers {
            rpcs = vec![self.dice.of(&rpcs)];
        }
        for rpc in rpcs {
            let all = self.choose(cell.kind);
            // A mount that passes every edge: it is restored without a call, and has a target.
            let is_whole = |slot: &usize| {
                let slot = &self.slots[*slot];
                slot.target.is_some() && slot.restores == Restores::Alone
            };
            let slot: Vec<_> = all.into_iter().filter(is_whole).take(1).collect();
            let rules = cell.rules(rpc, &mut self.dice);
            self.bystanders(&slot).await;
            let mut edge = 1;
            while self.round(cell, &slot, &rules, edge).await {
                edge += 1;
                assert!(edge < EDGES, "{cell} has no end");
            }
        }
    }

    pub async fn random_edge(&mut self, cell: &Cell) {
        let mut slots = self.choose(cell.kind);
        if cell.operation == Operation::Restore {
            slots.sort_by_key(|slot| self.slots[*slot].restores != Restores::Alone);
        }
        slots.truncate(cell.flight);
        let rpc = self.dice.of(&cell.operation.rpcs(cell.kind));
        let rules = cell.rules(rpc, &mut self.dice);
        let edge = 1 + self.dice.below(EDGES_OF_ONE * cell.flight as u64);
        self.round(cell, &slots, &rules, edge).await;
    }

    /// Does an operation, and kills csid at its `edge`. Returns whether csid came to the edge.
    async fn round(&mut self, cell: &Cell, slots: &[usize], rules: &[Rule], edge: u64) -> bool {
        self.prepare(cell.operation, slots).await;
        let ask = match cell.operation {
            Operation::Mount | Operation::Repair | Operation::Undo => Some(Ask::Mount),
            Operation::Unmount | Operation::Finish => Some(Ask::Unmount),
            Operation::Restore => None,
        };
        match ask {
            None => {
                self.site.w.reboot().await;
                self.witnesses.mark(&Mark::Reboot);
                self.happened(&What::Rebooted);
            }
            Some(ask) if cell.operation.begins_cut_off() => self.cut_off(cell, ask, slots).await,
            Some(_) => {}
        }
        self.site.w.plugin(cell.kind.plugin()).rules(rules.to_vec());
        self.site.fault.arm(&format!("any:{edge}"));
        match ask {
            Some(ask) if !cell.operation.begins_cut_off() => drop(self.ask(ask, slots).await),
            _ => self.start().await,
        }
        let mut killed = false;
        self.settle(|slots, edge| {
            killed = true;
            let number = slots.report.kill(edge, &cell.to_string());
            println!("kill {number} at {edge}: {cell}");
            // A fault of the plugin that is still to come meets the next csid, or none.
            if !slots.dice.once_in(4) {
                slots.site.w.honest();
            }
        })
        .await;
        self.site.w.honest();
        if let Some(ask) = ask.filter(|_| killed) {
            self.must(ask, slots).await;
            self.settle(|_, _| panic!("csid ended by itself")).await;
        }
        killed
    }

    /// Brings the slots to where the operation begins.
    async fn prepare(&mut self, operation: Operation, slots: &[usize]) {
        let (ask, is_ready): (Ask, fn(State) -> bool) = match operation {
            // A call may also be for a mount at rest.
            Operation::Mount => (Ask::Unmount, |state| state != State::Mounted),
            Operation::Undo => (Ask::Unmount, |state| state == State::Absent),
            _ => (Ask::Mount, |state| state == State::Mounted),
        };
        if operation == Operation::Restore {
            self.alone(slots).await;
        }
        let todo: Vec<_> =
            slots.iter().copied().filter(|slot| !is_ready(self.slots[*slot].state())).collect();
        self.must(ask, &todo).await;
        if operation == Operation::Repair {
            for slot in slots {
                let slot = &mut self.slots[*slot];
                assert!(slot.take_away(), "{} {} is mounted", slot.volume, slot.consumer);
                slot.allowed = [State::Taken].into();
                slot.holds.clear();
            }
        }
    }

    /// Unmounts all other slots.
    async fn alone(&mut self, slots: &[usize]) {
        let others = (0..self.slots.len()).filter(|slot| !slots.contains(slot));
        let others: Vec<_> = others.filter(|slot| self.slots[*slot].state() != State::Absent).collect();
        self.must(Ask::Unmount, &others).await;
    }

    /// Mounts a few other slots, which keep their mounts.
    async fn bystanders(&mut self, slots: &[usize]) {
        self.alone(slots).await;
        let mut others: Vec<_> = (0..self.slots.len()).filter(|slot| !slots.contains(slot)).collect();
        self.dice.shuffle(&mut others);
        if self.dice.once_in(2) {
            // The other mount is of the same volume, if that has another consumer.
            others.sort_by_key(|other| {
                slots.iter().all(|s| self.slots[*s].volume != self.slots[*other].volume)
            });
        }
        others.truncate(3);
        self.must(Ask::Mount, &others).await;
    }

    /// Kills csid while the plugin is in some of its calls.
    async fn cut_off(&mut self, cell: &Cell, ask: Ask, slots: &[usize]) {
        let during = if ask == Ask::Mount { Operation::Mount } else { Operation::Unmount };
        let rpc = self.dice.of(&during.rpcs(cell.kind));
        let act = hang(self.dice.once_in(2));
        let plugin = self.site.w.plugin(cell.kind.plugin());
        plugin.rules([Rule::always(rpc, act)]);
        let recorded = plugin.recorded();
        let asked = self.begin(ask, slots);
        // Two consumers of a volume stage it once.
        let volumes: BTreeSet<_> = slots.iter().map(|slot| &self.slots[*slot].volume).collect();
        let many = 1 + self.dice.below(volumes.len() as u64) as usize;
        let plugin = self.site.w.plugin(cell.kind.plugin());
        eventually("the plugin is in its calls", async || {
            // A volume that another consumer has is neither staged nor unstaged.
            plugin.begun_since(recorded, rpc) >= many || asked.iter().all(|call| call.is_finished())
        })
        .await;
        self.site.w.kill();
        self.report.kill(&format!("{rpc}.within"), &cell.to_string());
        self.end(ask, slots, asked).await;
        self.happened(&What::Restarted);
    }
}
