//! Volumes for one consumer that a process in another mount namespace writes to, while their unmount is asked for and csid is
//! killed: nobody else gets them before that process has ended.

use std::path::Path;
use std::sync::Arc;

use csid_client::{Client, Error, Kind, MountOptions, Target};
use csid_tests::ask::*;
use csid_tests::dice::Dice;
use csid_tests::elsewhere::Consumer;
use csid_tests::world::{World, eventually};

use crate::report::{Broken, Report};
use crate::site::{arm, disarm};

/// More edges than an unmount has that is refused.
const EDGES: u64 = 16;
/// The kills for one volume.
const KILLS: u64 = 3;

/// When the other namespace comes to be: before Unmount is asked for, or after csid has found nobody there. At the edge's name
/// csid is held meanwhile.
const STARTS: [Option<&str>; 3] = [None, Some("unpublish"), Some("withdraw")];

pub async fn live(w: &mut World, volumes: usize, dice: Dice, report: Arc<Report>) {
    for id in ["p", "q"] {
        w.add_plugin_and(id, &[], "").await;
    }
    w.plugin("q").set(|script| script.capabilities.retain(|c| c != "STAGE_UNSTAGE_VOLUME"));
    let fault = w.path("fault").to_str().expect("UTF-8").to_owned();
    w.environment.insert("CSID_FAULT".to_owned(), fault);
    let client = w.start().await;
    healthy(&client, "p").await;
    healthy(&client, "q").await;
    let mut life = Life { w, client, dice, report };
    for number in 0..volumes {
        life.volume(number).await;
    }
}

struct Life<'w> {
    w: &'w mut World,
    client: Client,
    dice: Dice,
    report: Arc<Report>,
}

impl Life<'_> {
    async fn volume(&mut self, number: usize) {
        let (plugin, volume) = (self.dice.of(&["p", "q"]), format!("elsewhere-{number}"));
        let start = self.dice.of(&STARTS);
        let cell = format!("unmount with a writer elsewhere, from {}", start.unwrap_or("before"));
        let options = of_plugin(plugin, &volume);
        let source = mounted(&self.client, "one", options.clone()).await;
        let inside = self.w.path(&format!("inside-{number}"));
        std::fs::create_dir(&inside).expect("a directory");

        let edge = format!("any:{}", 1 + self.dice.below(EDGES));
        let (client, asked_for) = (self.client.clone(), volume.clone());
        let asking = async move { unmount(&client, &asked_for, "one").await };
        let (answer, writer);
        match start {
            None => {
                writer = Consumer::writer(&source, &inside);
                arm(self.w, &edge);
                answer = asking.await;
            }
            Some(name) => {
                let held = self.w.path("fault.held");
                let _ = std::fs::remove_file(&held);
                arm(self.w, &format!("{name}.held"));
                let asked = tokio::spawn(asking);
                eventually("csid is held", async || held.exists()).await;
                writer = Consumer::writer(&source, &inside);
                arm(self.w, &edge);
                answer = asked.await.expect("the caller");
            }
        }
        if answer.is_ok() {
            self.wrong(&format!("{volume} was unmounted while in use by {}", writer.pid()));
        }
        for _ in 0..=self.dice.below(KILLS) {
            self.comes_back(&cell).await;
            let edge = 1 + self.dice.below(EDGES);
            arm(self.w, &format!("any:{edge}"));
            self.is_refused(&volume, &options, &writer).await;
        }
        self.comes_back(&cell).await;
        self.is_refused(&volume, &options, &writer).await;
        self.writes(&inside, &writer).await;

        writer.end();
        eventually("the volume is unmounted", async || unmount(&self.client, &volume, "one").await.is_ok())
            .await;
        mounted(&self.client, "two", options).await;
        unmount(&self.client, &volume, "two").await.expect("an unmount");
        self.w.nothing_left(&self.client).await;
    }

    /// Starts csid again if it was killed. It is not killed before the next `arm`.
    async fn comes_back(&mut self, cell: &str) {
        let edge = disarm(self.w);
        let is_killed = !edge.is_empty() && !edge.contains(':');
        if is_killed {
            eventually("csid has ended", async || self.w.dead()).await;
            let number = self.report.kill(&edge, cell);
            println!("kill {number} at {edge}: {cell}");
            assert!(self.w.launch(&[]).await, "csid ended without a fault");
        }
        self.client = Client::connect(&Target::Socket(self.w.socket())).await.expect("csid's socket");
    }

    /// Checks that no other consumer gets the volume, and that it stays mounted. csid may be killed meanwhile.
    async fn is_refused(&mut self, volume: &str, options: &MountOptions, writer: &Consumer) {
        match mount(&self.client, "two", options.clone()).await {
            Ok(_) => self.wrong(&format!("{volume} has two writers, {} and two", writer.pid())),
            Err(Error::Csid(error)) => {
                assert!(matches!(error.kind, Kind::ClaimConflict | Kind::Busy | Kind::Uncertain), "{error}");
                self.report.count("mounts refused with a writer elsewhere".to_owned());
            }
            Err(Error::Disconnected(_)) => {}
            Err(other) => panic!("{volume}: {other}"),
        }
        if unmount(&self.client, volume, "one").await.is_ok() {
            self.wrong(&format!("{volume} was unmounted while in use by {}", writer.pid()));
        }
    }

    /// The writer has its mount and goes on.
    async fn writes(&self, inside: &Path, writer: &Consumer) {
        assert!(writer.mounts().contains(inside.to_str().expect("UTF-8")), "it has its mount");
        let file = format!("/proc/{}/root{}/elsewhere", writer.pid(), inside.display());
        let length = || std::fs::metadata(&file).expect("the file that it writes").len();
        let before = length();
        eventually("it writes", async || length() > before).await;
    }

    fn wrong(&self, what: &str) -> ! {
        self.report.wrong(Broken::SecondWriter);
        panic!("{what}");
    }
}
