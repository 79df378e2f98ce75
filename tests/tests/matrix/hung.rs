//! Volumes whose file systems hang, and others that are mounted and unmounted meanwhile. csid is killed on the way. What hangs stays
//! mounted, costs no other volume, and keeps no csid from its start.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use csid_client::{Client, Target, UnmountOptions};
use csid_tests::ask::*;
use csid_tests::dice::Dice;
use csid_tests::hung::LOOKS;
use csid_tests::kernel;
use csid_tests::site::Site;
use csid_tests::world::{World, eventually};

use crate::report::{Broken, Report};

/// Volumes whose file systems hang.
const HUNG: usize = 4;
/// Others, each mounted and unmounted in turn.
const OTHERS: u64 = 3;
/// More edges than a mount has.
const EDGES: u64 = 24;
/// The time of a call that a hung file system may keep from its end.
const BRIEF: Duration = Duration::from_millis(300);
const CELL: &str = "mounts next to hung ones";

pub async fn live(w: &mut World, rounds: usize, dice: Dice, report: Arc<Report>) {
    w.add_plugin_with("p", "rpc-deadline = \"1s\"").await;
    let site = Site::start(w).await;
    healthy(&site.client, "p").await;
    let mut life = Life { site, dice, report, hung: Vec::new() };
    life.hang().await;
    for round in 0..rounds {
        life.round(round).await;
    }
    life.close().await;
}

struct Life<'w> {
    site: Site<'w>,
    dice: Dice,
    report: Arc<Report>,
    /// The published paths of what hangs.
    hung: Vec<PathBuf>,
}

fn hung(number: usize) -> String {
    format!("hung-{number}")
}

impl Life<'_> {
    async fn hang(&mut self) {
        self.site.w.hang("p", "NodeStageVolume");
        for number in 0..HUNG {
            self.hung.push(mounted(&self.site.client, "job", inline(&hung(number))).await);
        }
        self.site.w.plugin("p").honest();
        self.site.w.hung().hold(&LOOKS);
    }

    async fn round(&mut self, round: usize) {
        let volume = format!("v-{}", self.dice.below(OTHERS));
        let is_mount = self.dice.once_in(2);
        self.site.fault.arm(&format!("any:{}", 1 + self.dice.below(EDGES)));
        let (client, options) = (self.site.client.clone(), inline(&volume));
        if round % 8 == 7 {
            // It is refused, or is not answered in this time. Nothing of it may be unmounted.
            let brief = UnmountOptions {
                deadline_usec: Some(BRIEF.as_micros() as u64),
                force: Some(self.dice.once_in(2)),
                ..UnmountOptions::default()
            };
            let number = self.dice.below(HUNG as u64) as usize;
            let answer = client.unmount(NAMESPACE, &hung(number), "job", brief).await;
            assert!(answer.is_err(), "{} was unmounted while it hangs", hung(number));
        }
        let _ = match is_mount {
            true => client.mount(NAMESPACE, &volume, "job", options).await.map(drop),
            false => unmount(&client, &volume, "job").await,
        };
        self.comes_back().await;
        match is_mount {
            true => drop(mounted(&self.site.client, "job", inline(&volume)).await),
            false => unmount(&self.site.client, &volume, "job").await.expect("an unmount"),
        }
        // The mount table asks no file system.
        for source in &self.hung {
            if kernel::stacked(source).expect("the mount table") != 1 {
                self.report.wrong(Broken::WrongUnmount);
                panic!("{} was unmounted while it hangs", source.display());
            }
        }
    }

    /// Starts csid again if it was killed. It is not killed before the next `arm`.
    async fn comes_back(&mut self) {
        let edge = self.site.fault.disarm();
        if !edge.is_empty() && !edge.contains(':') {
            eventually("csid has ended", async || self.site.w.dead()).await;
            let number = self.report.kill(&edge, CELL);
            println!("kill {number} at {edge}: {CELL}");
            assert!(self.site.w.launch(&[]).await, "csid ended without a fault");
        }
        self.site.client =
            Client::connect(&Target::Socket(self.site.w.socket())).await.expect("csid's socket");
        healthy(&self.site.client, "p").await;
    }

    async fn close(&mut self) {
        self.site.w.hung().release();
        let all = (0..HUNG).map(hung).chain((0..OTHERS).map(|number| format!("v-{number}")));
        for volume in all {
            eventually("it is unmounted", async || unmount(&self.site.client, &volume, "job").await.is_ok())
                .await;
        }
        self.site.w.nothing_left(&self.site.client).await;
    }
}
