//! csid killed at every fault point of mount, unmount, undo and recovery. Each scenario is run once without a fault, which
//! shows what the host looks like after each of its steps; then once for every hit of every point, with csid killed there,
//! started again, and the step repeated. After the kill the host must come to rest as it was before the step or as it is
//! after it, and at the end nothing may be left.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::process::Command;
use std::sync::{Arc, Mutex};

use csid_client::{Client, Error, Kind, MountFilter, MountOptions, Restore, Target};
use csid_tests::ask::*;
use csid_tests::script::{Act, Rule};
use csid_tests::world::{World, count, eventually, program, world};

#[derive(Clone, Copy, Debug)]
enum Step {
    Mount {
        consumer: &'static str,
        target: bool,
    },
    Unmount {
        consumer: &'static str,
    },
    /// The plugin refuses to publish, so the mount is undone.
    Refused {
        consumer: &'static str,
    },
    /// The host reboots; csid starts and restores.
    Reboot,
    /// csid is killed while the plugin stages; csid starts and undoes.
    CutOff,
    /// csid is killed while the plugin unpublishes; csid starts and goes on.
    CutOffUnmount,
    /// The mount is taken away behind csid's back, and asked for again.
    Repair,
}

#[derive(Clone, Copy, Debug)]
struct Scenario {
    name: &'static str,
    block: bool,
    stages: bool,
    steps: &'static [Step],
}

use Step::*;

const FILE_SYSTEM: Scenario = Scenario { name: "", block: false, stages: true, steps: &[] };

const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "two consumers of a file system, one with a target",
        steps: &[
            Mount { consumer: "one", target: true },
            Mount { consumer: "two", target: false },
            Unmount { consumer: "two" },
            Unmount { consumer: "one" },
        ],
        ..FILE_SYSTEM
    },
    Scenario {
        name: "a block device with a target",
        block: true,
        steps: &[Mount { consumer: "one", target: true }, Unmount { consumer: "one" }],
        ..FILE_SYSTEM
    },
    Scenario {
        name: "undo of a failed publish, alone and beside a consumer",
        steps: &[
            Refused { consumer: "one" },
            Mount { consumer: "one", target: false },
            Refused { consumer: "two" },
            Unmount { consumer: "one" },
        ],
        ..FILE_SYSTEM
    },
    Scenario {
        name: "a plugin that does not stage",
        stages: false,
        steps: &[Mount { consumer: "one", target: true }, Unmount { consumer: "one" }],
        ..FILE_SYSTEM
    },
    Scenario {
        name: "restore after a reboot",
        steps: &[Mount { consumer: "one", target: true }, Reboot, Unmount { consumer: "one" }],
        ..FILE_SYSTEM
    },
    Scenario {
        name: "recovery of what was cut off",
        steps: &[CutOff, Mount { consumer: "one", target: true }, CutOffUnmount],
        ..FILE_SYSTEM
    },
    Scenario {
        name: "repair of what was taken away",
        steps: &[Mount { consumer: "one", target: true }, Repair, Unmount { consumer: "one" }],
        ..FILE_SYSTEM
    },
];

/// The host as far as it concerns a volume; paths and mounts by number, since a path may be named anew.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Sight {
    rows: Vec<String>,
    mounts: usize,
    paths: usize,
}

struct Run<'w> {
    w: &'w mut World,
    scenario: Scenario,
    /// `NAME:N`, until csid was killed there.
    fault: Option<String>,
    /// What was seen after each step of a run without fault; the first is before any.
    due: Vec<Sight>,
    client: Client,
    killed: bool,
}

fn options(w: &World, scenario: Scenario, target: bool) -> MountOptions {
    let base = if scenario.block { block("v") } else { shared("v") };
    let place = w.path("targets").join("t");
    MountOptions {
        target: target.then(|| place.to_str().expect("UTF-8").to_owned()),
        dev: Some(true),
        restore: Some(Restore::Auto),
        ..base
    }
}

async fn sight(w: &World, client: &Client) -> Sight {
    let mut rows: Vec<_> = client
        .list_mounts(MountFilter::default())
        .await
        .expect("the rows")
        .into_iter()
        .map(|row| format!("{} {} healthy={}", row.consumer, row.state, row.healthy))
        .collect();
    rows.sort();
    let left = w.leftovers();
    let mounts = left.iter().filter(|line| line.starts_with("mount ")).count();
    Sight { rows, mounts, paths: left.len() - mounts }
}

impl Run<'_> {
    /// Start csid with the fault still due; one that dies while it starts or restores is started again without.
    async fn start(&mut self) {
        let fault = self.fault.clone();
        let environment: Vec<_> = fault.iter().map(|fault| ("CSID_FAULT", fault.as_str())).collect();
        if self.w.launch(&environment).await
            && let Ok(client) = Client::connect(&Target::Socket(self.w.socket())).await
        {
            self.client = client;
            return;
        }
        self.again().await;
    }

    /// csid was killed by its fault: start it without.
    async fn again(&mut self) {
        eventually("csid has ended", async || self.w.dead()).await;
        assert!(self.fault.take().is_some(), "csid ended by itself");
        self.killed = true;
        assert!(self.w.launch(&[]).await, "csid ended without a fault");
        self.client = self.w.client().await;
    }

    /// csid was killed in step `step`: start it again and see that the host comes to rest before or after that step.
    async fn restarted(&mut self, step: usize) {
        self.again().await;
        self.rests(step, &[step, step + 1]).await;
    }

    async fn rests(&self, step: usize, due: &[usize]) {
        if self.due.len() <= step + 1 {
            return;
        }
        let mut seen = None;
        let due: Vec<_> = due.iter().map(|i| self.due[*i].clone()).collect();
        let what = format!("{:?}: {due:?} in step {step}", self.scenario.name);
        eventually(&what, async || {
            let idle = self.client.list_operations().await.expect("the operations").is_empty();
            let now = sight(self.w, &self.client).await;
            let good = idle && due.contains(&now);
            if seen.as_ref() != Some(&now) {
                eprintln!("seen: {now:?}");
                seen = Some(now);
            }
            good
        })
        .await;
    }

    /// Do a step until it is answered.
    async fn step(&mut self, number: usize) {
        let step = self.scenario.steps[number];
        match step {
            Reboot => {
                self.w.reboot().await;
                self.start().await;
                self.until_restored(number).await;
                return;
            }
            CutOff => {
                self.w.plugin("p").rules([Rule::once("NodeStageVolume", Act::DelayAfter(60_000))]);
                self.cut_off(number, Mount { consumer: "one", target: false }, "NodeStageVolume").await;
                return;
            }
            CutOffUnmount => {
                self.w.plugin("p").rules([Rule::once("NodeUnpublishVolume", Act::DelayAfter(60_000))]);
                self.cut_off(number, Unmount { consumer: "one" }, "NodeUnpublishVolume").await;
                return;
            }
            Repair => {
                let row = row(&self.client, "v", "one").await.expect("the row");
                for point in [&row.target, &row.source] {
                    rustix::mount::unmount(point.as_str(), rustix::mount::UnmountFlags::DETACH)
                        .expect("an unmount");
                }
            }
            _ => {}
        }
        loop {
            match self.ask(step).await {
                Ok(()) => return,
                Err(Error::Disconnected(_) | Error::Connect(_)) => self.restarted(number).await,
                Err(other) => panic!("{}: {step:?}: {other}", self.scenario.name),
            }
        }
    }

    async fn ask(&mut self, step: Step) -> csid_client::Result<()> {
        match step {
            Mount { consumer, target } => {
                let options = options(self.w, self.scenario, target);
                let answer = mount(&self.client, consumer, options).await?;
                assert!(self.client.has_mount(&answer.source).await?, "an answered mount is there");
                Ok(())
            }
            Repair => {
                let options = options(self.w, self.scenario, true);
                mount(&self.client, "one", options).await.map(drop)
            }
            Unmount { consumer } => unmount(&self.client, "v", consumer).await,
            Refused { consumer } => {
                self.w.plugin("p").rules([Rule::always("NodePublishVolume", Act::FailAfter(3))]);
                let options = options(self.w, self.scenario, false);
                match mount(&self.client, consumer, options).await {
                    Err(Error::Csid(error)) if error.kind == Kind::PluginError => {
                        self.w.plugin("p").honest();
                        Ok(())
                    }
                    Err(error) => Err(error),
                    Ok(answer) => panic!("{answer:?} though the plugin refuses"),
                }
            }
            Reboot | CutOff | CutOffUnmount => unreachable!("not asked of csid"),
        }
    }

    /// Kill csid while the plugin is in `rpc` of `step`, start it, and let it recover.
    async fn cut_off(&mut self, number: usize, step: Step, rpc: &'static str) {
        let client = self.client.clone();
        let options = options(self.w, self.scenario, false);
        let calls = self.w.plugin("p").count(rpc, "v");
        let asked = tokio::spawn(async move {
            match step {
                Mount { consumer, .. } => mount(&client, consumer, options).await.map(drop),
                Unmount { consumer } => unmount(&client, "v", consumer).await,
                _ => unreachable!("only these are cut off"),
            }
        });
        eventually(rpc, async || self.w.plugin("p").count(rpc, "v") > calls || self.w.dead()).await;
        let fell_before = self.w.dead();
        if !fell_before {
            self.w.kill();
        }
        assert!(asked.await.expect("the caller").is_err());
        self.w.plugin("p").honest();
        if fell_before {
            self.restarted(number).await;
        } else {
            self.start().await;
        }
        self.until_restored(number).await;
        if fell_before && matches!(step, Unmount { .. }) {
            self.ask(step).await.expect("the repeated call");
        }
    }

    /// csid recovers by itself, killed meanwhile or not.
    async fn until_restored(&mut self, number: usize) {
        loop {
            let client = self.client.clone();
            let mut dead = false;
            eventually("csid has recovered", async || {
                dead = self.w.dead();
                if dead {
                    return true;
                }
                let Ok(operations) = client.list_operations().await else { return false };
                let Ok(manager) = client.manager().await else { return false };
                let Ok(rows) = client.list_mounts(MountFilter::default()).await else { return false };
                operations.is_empty()
                    && ["ready", "degraded"].contains(&manager.state.as_str())
                    && rows.iter().all(|row| row.state == "mounted")
            })
            .await;
            if !dead {
                return;
            }
            self.again().await;
            self.rests(number, &[number + 1]).await;
        }
    }
}

/// The sights after each step of a run, and whether csid was killed in it.
fn run(scenario: Scenario, fault: Option<String>, due: Vec<Sight>) -> (Vec<Sight>, bool) {
    let result = Arc::new(Mutex::new(None));
    let sink = Arc::clone(&result);
    world(async move |w| {
        let plugin = w.add_plugin("p").await;
        if !scenario.stages {
            plugin.set(|script| script.capabilities.retain(|c| c != "STAGE_UNSTAGE_VOLUME"));
        }
        if scenario.block {
            w.add_device("p", "v");
            std::fs::write(w.path("targets/t"), "").expect("a target");
        } else {
            std::fs::create_dir(w.path("targets/t")).expect("a target");
        }
        // In a scenario with a recovery the fault is for the csid that recovers.
        let recovers = scenario.steps.iter().any(|step| matches!(step, Reboot | CutOff | CutOffUnmount));
        let environment: Vec<_> =
            fault.iter().filter(|_| !recovers).map(|fault| ("CSID_FAULT", fault.as_str())).collect();
        let started = w.launch(&environment).await;
        if !started {
            assert!(w.launch(&[]).await, "csid ended without a fault");
        }
        let client = w.client().await;
        let fault = fault.filter(|_| started);
        let mut run = Run { w, scenario, fault, due, client, killed: !started };
        let mut seen = vec![sight(run.w, &run.client).await];
        for number in 0..scenario.steps.len() {
            run.step(number).await;
            if run.w.dead() {
                // It fell after the answer.
                run.restarted(number).await;
            }
            let now = sight(run.w, &run.client).await;
            if let Some(due) = run.due.get(number + 1) {
                assert_eq!(now, *due, "{}: after {:?}", scenario.name, scenario.steps[number]);
            }
            seen.push(now);
        }
        run.w.nothing_left(&run.client).await;
        run.w.plugin("p").assert_rules();
        *sink.lock().expect("the result") = Some((seen, run.killed));
    });
    result.lock().expect("the result").take().expect("the run ended")
}

fn points() -> Vec<String> {
    let output = Command::new(program("csid-under-test")).arg("--fault-points").output().expect("csid");
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).expect("UTF-8").lines().map(str::to_owned).collect()
}

#[test]
fn killed_at_every_fault_point_nothing_is_lost_or_left() {
    let points = points();
    assert!(points.len() >= 14, "before and after each effect and commit: {points:?}");
    let dues: Vec<Vec<Sight>> = SCENARIOS.iter().map(|scenario| run(*scenario, None, Vec::new()).0).collect();
    let queue: VecDeque<(usize, String)> =
        (0..SCENARIOS.len()).flat_map(|s| points.iter().map(move |p| (s, p.clone()))).collect();
    let queue = Arc::new(Mutex::new(queue));
    let kills: Arc<Mutex<BTreeMap<(usize, String), usize>>> = Arc::default();
    let failed: Arc<Mutex<Vec<String>>> = Arc::default();
    let dues = Arc::new(dues);
    let workers: Vec<_> = (0..2)
        .map(|_| {
            let (queue, kills, dues) = (queue.clone(), kills.clone(), dues.clone());
            let failed = failed.clone();
            std::thread::spawn(move || {
                loop {
                    let Some((scenario, point)) = queue.lock().expect("the queue").pop_front() else {
                        return;
                    };
                    for hit in 1..=100 {
                        let fault = format!("{point}:{hit}");
                        let name = SCENARIOS[scenario].name;
                        let due = dues[scenario].clone();
                        let outcome =
                            std::panic::catch_unwind(|| run(SCENARIOS[scenario], Some(fault.clone()), due).1);
                        match outcome {
                            Ok(true) => {}
                            Ok(false) => break,
                            Err(_) => {
                                eprintln!("==== {name}, killed at {fault}: see above");
                                failed.lock().expect("the failures").push(format!("{name}: {fault}"));
                            }
                        }
                        *kills.lock().expect("the kills").entry((scenario, point.clone())).or_default() += 1;
                    }
                }
            })
        })
        .collect();
    for worker in workers {
        if let Err(panic) = worker.join() {
            std::panic::resume_unwind(panic);
        }
    }
    let kills = kills.lock().expect("the kills");
    for (number, scenario) in SCENARIOS.iter().enumerate() {
        let here = kills.iter().filter(|((s, _), _)| *s == number).map(|(_, n)| n).sum();
        count(&format!("kills in `{}`", scenario.name), here);
    }
    count("kills at fault points", kills.values().sum());
    let failed = failed.lock().expect("the failures");
    assert!(failed.is_empty(), "{} of them ended badly: {failed:#?}", failed.len());
    let hit: BTreeSet<_> = kills.keys().map(|(_, point)| point).collect();
    let missed: Vec<_> = points.iter().filter(|point| !hit.contains(point)).collect();
    assert!(missed.is_empty(), "never hit: {missed:?}");
}
