//! Volumes for one consumer that a process in another mount namespace writes to, or that an administrator has bound in csid's own,
//! while their unmount is asked for and csid is killed: nobody else gets them before that process or bind has gone.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use csid_client::{Client, Error, Kind, MountOptions, Target};
use csid_tests::ask::*;
use csid_tests::dice::Dice;
use csid_tests::elsewhere::Consumer;
use csid_tests::kernel;
use csid_tests::site::Site;
use csid_tests::world::{World, eventually};
use rustix::mount::{UnmountFlags, mount_bind, unmount as unmount_now};

use crate::report::{Broken, Report};

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
    let site = Site::start(w).await;
    healthy(&site.client, "p").await;
    healthy(&site.client, "q").await;
    let mut life = Life { site, dice, report };
    for number in 0..volumes {
        life.volume(number).await;
    }
}

/// What keeps a volume in use.
enum Keeper {
    /// A process that writes to a bind in a mount namespace of its own.
    Elsewhere(Consumer),
    /// A bind in csid's own namespace, at this path.
    Here(PathBuf),
}

impl Keeper {
    fn new(is_here: bool, source: &Path, inside: &Path) -> Self {
        if !is_here {
            return Keeper::Elsewhere(Consumer::writer(source, inside));
        }
        mount_bind(source, inside).expect("a bind");
        Keeper::Here(inside.to_owned())
    }

    fn name(&self) -> String {
        match self {
            Keeper::Elsewhere(consumer) => format!("process {}", consumer.pid()),
            Keeper::Here(path) => format!("a bind at {}", path.display()),
        }
    }

    /// Checks that it has its mount, and can write to it.
    async fn writes(&self, inside: &Path) {
        match self {
            Keeper::Elsewhere(writer) => {
                assert!(writer.mounts().contains(inside.to_str().expect("UTF-8")), "it has its mount");
                let file = format!("/proc/{}/root{}/elsewhere", writer.pid(), inside.display());
                let length = || std::fs::metadata(&file).expect("the file that it writes").len();
                let before = length();
                eventually("it writes", async || length() > before).await;
            }
            Keeper::Here(path) => {
                assert_eq!(kernel::stacked(path).expect("the mount table"), 1, "the bind is there");
                std::fs::write(path.join("here"), "written").expect("the volume works");
            }
        }
    }

    fn end(self) {
        match self {
            Keeper::Elsewhere(consumer) => consumer.end(),
            Keeper::Here(path) => unmount_now(path, UnmountFlags::empty()).expect("the bind"),
        }
    }
}

struct Life<'w> {
    site: Site<'w>,
    dice: Dice,
    report: Arc<Report>,
}

impl Life<'_> {
    async fn volume(&mut self, number: usize) {
        let (plugin, volume) = (self.dice.of(&["p", "q"]), format!("elsewhere-{number}"));
        let start = self.dice.of(&STARTS);
        let is_here = self.dice.once_in(2);
        let what = if is_here { "a bind here" } else { "a writer elsewhere" };
        let cell = format!("unmount with {what}, from {}", start.unwrap_or("before"));
        let options = of_plugin(plugin, &volume);
        let source = mounted(&self.site.client, "one", options.clone()).await;
        let inside = self.site.w.path(&format!("inside-{number}"));
        std::fs::create_dir(&inside).expect("a directory");

        let edge = format!("any:{}", 1 + self.dice.below(EDGES));
        let (client, asked_for) = (self.site.client.clone(), volume.clone());
        let asking = async move { unmount(&client, &asked_for, "one").await };
        let (answer, writer);
        match start {
            None => {
                writer = Keeper::new(is_here, &source, &inside);
                self.site.fault.arm(&edge);
                answer = asking.await;
            }
            Some(name) => {
                self.site.fault.arm(&format!("{name}.held"));
                let asked = tokio::spawn(asking);
                self.site.fault.reached(name).await;
                writer = Keeper::new(is_here, &source, &inside);
                self.site.fault.arm(&edge);
                answer = asked.await.expect("the caller");
            }
        }
        if answer.is_ok() {
            self.wrong(&format!("{volume} was unmounted while in use by {}", writer.name()));
        }
        for _ in 0..=self.dice.below(KILLS) {
            self.comes_back(&cell).await;
            let edge = 1 + self.dice.below(EDGES);
            self.site.fault.arm(&format!("any:{edge}"));
            self.is_refused(&volume, &options, &writer).await;
        }
        self.comes_back(&cell).await;
        self.is_refused(&volume, &options, &writer).await;
        writer.writes(&inside).await;

        writer.end();
        eventually("the volume is unmounted", async || {
            unmount(&self.site.client, &volume, "one").await.is_ok()
        })
        .await;
        mounted(&self.site.client, "two", options).await;
        unmount(&self.site.client, &volume, "two").await.expect("an unmount");
        self.site.w.nothing_left(&self.site.client).await;
    }

    /// Starts csid again if it was killed. It is not killed before the next `arm`.
    async fn comes_back(&mut self, cell: &str) {
        let edge = self.site.fault.disarm();
        let is_killed = !edge.is_empty() && !edge.contains(':');
        if is_killed {
            eventually("csid has ended", async || self.site.w.dead()).await;
            let number = self.report.kill(&edge, cell);
            println!("kill {number} at {edge}: {cell}");
            assert!(self.site.w.launch(&[]).await, "csid ended without a fault");
        }
        self.site.client =
            Client::connect(&Target::Socket(self.site.w.socket())).await.expect("csid's socket");
    }

    /// Checks that no other consumer gets the volume, and that it stays mounted. csid may be killed meanwhile.
    async fn is_refused(&mut self, volume: &str, options: &MountOptions, writer: &Keeper) {
        match mount(&self.site.client, "two", options.clone()).await {
            Ok(_) => self.wrong(&format!("{volume} has two writers, {} and two", writer.name())),
            Err(Error::Csid(error)) => {
                assert!(matches!(error.kind, Kind::ClaimConflict | Kind::Busy | Kind::Uncertain), "{error}");
                let what = match writer {
                    Keeper::Elsewhere(_) => "a writer elsewhere",
                    Keeper::Here(_) => "a bind here",
                };
                self.report.count(format!("mounts refused with {what}"));
            }
            Err(Error::Disconnected(_)) => {}
            Err(other) => panic!("{volume}: {other}"),
        }
        if unmount(&self.site.client, volume, "one").await.is_ok() {
            self.wrong(&format!("{volume} was unmounted while in use by {}", writer.name()));
        }
    }

    fn wrong(&self, what: &str) -> ! {
        self.report.wrong(Broken::SecondWriter);
        panic!("{what}");
    }
}
