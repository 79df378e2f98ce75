//! A world in which csid is killed, and what a client knows of it. After each kill csid starts again and comes to rest;
//! then its rows, the kernel's mounts and csid's directories are exactly what the client's answers allow.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use csid_client::{Client, MountFilter, MountRow, Target};
use csid_tests::ask::*;
use csid_tests::dice::Dice;
use csid_tests::kernel;
use csid_tests::script::Rule;
use csid_tests::world::{World, eventually};
use futures_util::future::join_all;

use crate::model::{self, Ask, State, Told};
use crate::plan::{Cell, Kind, Operation, Plugin, hang};
use crate::report::{Broken, Report};
use crate::slot::{Answer, CANARY, Slot};

const POLL: Duration = Duration::from_millis(5);
/// Within this csid comes to rest, however slow the machine is.
const PATIENCE: Duration = Duration::from_secs(60);

pub struct Site<'w> {
    pub w: &'w mut World,
    client: Client,
    pub slots: Vec<Slot>,
    pub dice: Dice,
    plugins: BTreeSet<&'static str>,
    report: Arc<Report>,
}

impl<'w> Site<'w> {
    pub async fn new(w: &'w mut World, kinds: &[Kind], dice: Dice, report: Arc<Report>) -> Self {
        let plugins: BTreeSet<_> = kinds.iter().map(|kind| kind.plugin()).collect();
        for plugin in &plugins {
            w.add_plugin_with(plugin, "rpc-deadline = \"1s\"").await;
        }
        if kinds.contains(&Kind::Unstaged) {
            w.plugin("q").set(|script| script.capabilities.retain(|c| c != "STAGE_UNSTAGE_VOLUME"));
        }
        let slots = Slot::all(w, kinds);
        let fault = w.path("fault").to_str().expect("UTF-8").to_owned();
        w.environment.insert("CSID_FAULT".to_owned(), fault);
        let client = w.start().await;
        Site { w, client, slots, dice, plugins, report }
    }

    /// csid dies at the edge, until `disarm`.
    fn arm(&self, edge: &str) {
        std::fs::write(self.w.path("fault"), edge).expect("the fault");
    }

    fn disarm(&self) {
        self.arm("");
    }

    /// The slots of a kind in random order.
    pub fn choose(&mut self, kind: Kind) -> Vec<usize> {
        let mut all: Vec<_> = (0..self.slots.len()).filter(|slot| self.slots[*slot].kind == kind).collect();
        self.dice.shuffle(&mut all);
        all
    }

    /// Ask for all of them at once, and note what that allows.
    pub async fn ask(&mut self, ask: Ask, slots: &[usize]) -> Vec<Told> {
        let asked = self.begin(ask, slots);
        self.end(ask, slots, asked).await
    }

    fn begin(&mut self, ask: Ask, slots: &[usize]) -> Vec<tokio::task::JoinHandle<Answer>> {
        let mut asked = Vec::new();
        for slot in slots {
            let slot = &mut self.slots[*slot];
            if ask == Ask::Unmount {
                slot.holds.clear();
            }
            asked.push(tokio::spawn(slot.ask(&self.client, ask)));
        }
        asked
    }

    async fn end(
        &mut self,
        ask: Ask,
        slots: &[usize],
        asked: Vec<tokio::task::JoinHandle<Answer>>,
    ) -> Vec<Told> {
        let mut answers = std::pin::pin!(join_all(asked));
        let answers = loop {
            tokio::select! {
                answers = &mut answers => break answers,
                () = tokio::time::sleep(POLL) => self.tend().await,
            }
        };
        let table = kernel::below(&self.w.dir).expect("the mount table");
        let mut all = Vec::new();
        for (slot, answer) in slots.iter().zip(answers) {
            let (told, source) = answer.expect("the caller");
            let slot = &mut self.slots[*slot];
            let before = slot.state();
            slot.allowed = model::after(before, ask, &told, slot.restores);
            if let Some(source) = source {
                // What was answered is there at once.
                slot.holds = slot.mounts(&table, &source).unwrap_or_else(|| {
                    self.report.wrong(Broken::LostMount);
                    panic!("{} {} was answered, and is not there: {table:#?}", slot.volume, slot.consumer);
                });
            }
            all.push(told);
        }
        all
    }

    pub async fn must(&mut self, ask: Ask, slots: &[usize]) {
        let told = self.ask(ask, slots).await;
        let wrong: Vec<_> = slots.iter().zip(&told).filter(|(_, told)| **told != Told::Done).collect();
        assert!(wrong.is_empty(), "{ask:?} of {wrong:?}");
    }

    fn honest(&mut self) {
        for plugin in self.plugins.clone() {
            self.w.plugin(plugin).honest();
        }
    }

    /// A plugin that died comes back, and is honest then.
    async fn tend(&mut self) {
        for plugin in self.plugins.clone() {
            let plugin = self.w.plugin(plugin);
            if plugin.dead() {
                plugin.honest();
                plugin.start().await;
            }
        }
    }

    /// Do an operation with csid killed at its `edge`, start csid again, and hold what is there against what may be.
    /// Whether csid came so far.
    pub async fn round(&mut self, cell: &Cell, slots: &[usize], rules: &[Rule], edge: &str) -> bool {
        self.prepare(cell.operation, slots).await;
        let ask = match cell.operation {
            Operation::Mount | Operation::Repair | Operation::Undo => Some(Ask::Mount),
            Operation::Unmount | Operation::Finish => Some(Ask::Unmount),
            Operation::Restore => None,
        };
        match (cell.operation, ask) {
            (Operation::Restore, _) => {
                self.w.reboot().await;
                for slot in &mut self.slots {
                    slot.allowed = slot.allowed.iter().map(|s| model::rebooted(*s, slot.restores)).collect();
                    slot.holds.clear();
                }
                self.w.plugin(cell.kind.plugin()).rules(rules.to_vec());
                self.arm(edge);
                self.start().await;
            }
            (Operation::Undo | Operation::Finish, Some(ask)) => {
                self.cut_off(cell, ask, slots).await;
                self.w.plugin(cell.kind.plugin()).rules(rules.to_vec());
                self.arm(edge);
                self.start().await;
            }
            (_, Some(ask)) => {
                self.w.plugin(cell.kind.plugin()).rules(rules.to_vec());
                self.arm(edge);
                self.ask(ask, slots).await;
            }
            (_, None) => unreachable!("only a restore is not asked for"),
        }
        let rests = self.rests().await;
        let at = self.fault();
        self.disarm();
        let rows = if rests { self.rows().await } else { None };
        let killed = rows.is_none();
        let rows = match rows {
            Some(rows) => rows,
            None => self.again(cell, &at).await,
        };
        self.check(&rows);
        self.honest();
        if let Some(ask) = ask.filter(|_| killed) {
            self.must(ask, slots).await;
            assert!(self.rests().await, "csid ended by itself");
            let rows = self.rows().await.expect("csid runs");
            self.check(&rows);
        }
        killed
    }

    /// Bring the slots to where the operation begins.
    async fn prepare(&mut self, operation: Operation, slots: &[usize]) {
        let (ask, is_ready): (Ask, fn(State) -> bool) = match operation {
            // Also a mount that rests may be asked for.
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
                for (path, _) in slot.holds.drain(..).rev() {
                    rustix::mount::unmount(&path, rustix::mount::UnmountFlags::DETACH).expect("an unmount");
                }
                slot.allowed = [State::Taken].into();
            }
        }
    }

    /// Unmount all others.
    pub async fn alone(&mut self, slots: &[usize]) {
        let others = (0..self.slots.len()).filter(|slot| !slots.contains(slot));
        let others: Vec<_> = others.filter(|slot| self.slots[*slot].state() != State::Absent).collect();
        self.must(Ask::Unmount, &others).await;
    }

    /// Mount a few others, which keep their mounts whatever happens.
    pub async fn bystanders(&mut self, slots: &[usize]) {
        self.alone(slots).await;
        let mut others: Vec<_> = (0..self.slots.len()).filter(|slot| !slots.contains(slot)).collect();
        self.dice.shuffle(&mut others);
        if self.dice.once_in(2) {
            // Of the same volume, if it has another consumer.
            others.sort_by_key(|other| {
                slots.iter().all(|s| self.slots[*s].volume != self.slots[*other].volume)
            });
        }
        others.truncate(3);
        self.must(Ask::Mount, &others).await;
    }

    /// Kill csid while the plugin is in some of its calls.
    async fn cut_off(&mut self, cell: &Cell, ask: Ask, slots: &[usize]) {
        let during = if ask == Ask::Mount { Operation::Mount } else { Operation::Unmount };
        let rpc = self.dice.of(&during.rpcs(cell.kind));
        let act = hang(self.dice.once_in(2));
        let plugin = self.w.plugin(cell.kind.plugin());
        plugin.rules([Rule::always(rpc, act)]);
        let recorded = plugin.recorded();
        let asked = self.begin(ask, slots);
        // Two consumers of a volume stage it once.
        let volumes: BTreeSet<_> = slots.iter().map(|slot| &self.slots[*slot].volume).collect();
        let many = 1 + self.dice.below(volumes.len() as u64) as usize;
        let plugin = self.w.plugin(cell.kind.plugin());
        eventually("the plugin is in its calls", async || {
            // A volume that another consumer has is neither staged nor unstaged.
            plugin.begun_since(recorded, rpc) >= many || asked.iter().all(|call| call.is_finished())
        })
        .await;
        self.w.kill();
        self.report.kill(&format!("{rpc}.within"), &cell.to_string());
        self.end(ask, slots, asked).await;
        self.restarted();
    }

    fn restarted(&mut self) {
        for slot in &mut self.slots {
            slot.allowed = slot.allowed.iter().map(|s| model::restarted(*s, slot.restores)).collect();
        }
    }

    /// Start csid, which may die at once.
    async fn start(&mut self) {
        if self.w.launch(&[]).await
            && let Ok(client) = Client::connect(&Target::Socket(self.w.socket())).await
        {
            self.client = client;
        }
    }

    /// csid was killed at its edge: start it again, and let it come to rest.
    async fn again(&mut self, cell: &Cell, at: &str) -> Vec<MountRow> {
        eventually("csid has ended", async || self.w.dead()).await;
        let number = self.report.kill(at, &cell.to_string());
        println!("kill {number} at {at}: {cell}");
        self.restarted();
        // What the plugin has yet to do wrong it does to the next csid, or not.
        if cell.plugin != Plugin::Answers && !self.dice.once_in(4) {
            self.honest();
        }
        assert!(self.w.launch(&[]).await, "csid ended without a fault");
        self.client = self.w.client().await;
        assert!(self.rests().await, "csid ended without a fault");
        self.rows().await.expect("csid runs")
    }

    /// The edge at which csid was killed.
    fn fault(&self) -> String {
        std::fs::read_to_string(self.w.path("fault")).expect("the fault")
    }

    async fn rows(&self) -> Option<Vec<MountRow>> {
        self.client.list_mounts(MountFilter::default()).await.ok()
    }

    /// Wait until nothing is under way. False: csid was killed before.
    async fn rests(&mut self) -> bool {
        let end = Instant::now() + PATIENCE;
        loop {
            self.tend().await;
            if self.w.dead() {
                return false;
            }
            let busy = match (self.client.list_operations().await, self.rows().await) {
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

    fn slot(&self, row: &MountRow) -> Option<&Slot> {
        self.slots.iter().find(|slot| slot.volume == row.volume && slot.consumer == row.consumer)
    }

    /// Hold rows, mounts and paths against what the answers allow.
    fn check(&mut self, rows: &[MountRow]) {
        let mut wrong = Vec::new();
        let mut table = kernel::below(&self.w.dir).expect("the mount table");
        table.retain(|mount| mount.point != self.w.path("run"));
        let mut points: BTreeSet<PathBuf> = BTreeSet::new();
        // A row that rests may have its volume staged.
        let mut staged: BTreeSet<PathBuf> = BTreeSet::new();
        let mut paths: BTreeSet<PathBuf> = BTreeSet::new();
        for row in rows {
            let source = Path::new(&row.source);
            paths.extend([source.to_owned(), source.parent().expect("a parent").to_owned()]);
            paths.extend(Some(PathBuf::from(&row.staging)).filter(|path| path.is_absolute()));
            staged.insert(row.staging.clone().into());
            let Some(slot) = self.slot(row) else {
                wrong.push((Broken::Leftover, format!("a row that nobody asked for: {row:?}")));
                continue;
            };
            if seen(Some(row)) == State::Mounted {
                points.insert(source.to_owned());
                points.extend(slot.target.clone());
                points.extend((slot.kind == Kind::FileSystem).then(|| row.staging.clone().into()));
            }
        }
        for slot in &mut self.slots {
            let row = rows.iter().find(|row| row.volume == slot.volume && row.consumer == slot.consumer);
            let state = seen(row);
            let Slot { volume, consumer, allowed, .. } = &*slot;
            if !allowed.contains(&state) {
                let lost = slot.must(State::Mounted);
                let what = format!("{volume} {consumer} is {state:?}, not one of {allowed:?}");
                wrong.push((if lost { Broken::LostMount } else { Broken::Leftover }, what));
            }
            for (path, number) in &slot.holds {
                let now = kernel::mount_id(path).ok();
                if now != Some(*number) {
                    let what = format!("{}: mount {number} is {now:?} now", path.display());
                    wrong.push((Broken::WrongUnmount, what));
                }
            }
            slot.allowed = [state].into();
            slot.holds.clear();
            if let Some(row) = row.filter(|_| state == State::Mounted) {
                match slot.mounts(&table, Path::new(&row.source)) {
                    Some(mounts) => slot.holds = mounts,
                    None => {
                        wrong.push((Broken::LostMount, format!("not shown once, or another volume: {row:?}")))
                    }
                }
            }
        }
        for mount in &table {
            let stacked = table.iter().filter(|other| other.point == mount.point).count();
            if stacked != 1 || !(points.contains(&mount.point) || staged.contains(&mount.point)) {
                wrong.push((Broken::Leftover, format!("{stacked} mounts: {mount:?}")));
            }
        }
        for point in points.iter().filter(|point| !table.iter().any(|mount| mount.point == **point)) {
            wrong.push((Broken::LostMount, format!("nothing is mounted at {}", point.display())));
        }
        let left = self.w.leftovers().into_iter();
        for path in left.filter_map(|left| left.strip_prefix("path ").map(PathBuf::from)) {
            if !paths.contains(&path) {
                wrong.push((Broken::Leftover, format!("no row explains {}", path.display())));
            }
        }
        for (wrong, _) in &wrong {
            self.report.wrong(*wrong);
        }
        assert!(wrong.is_empty(), "{wrong:#?}");
    }

    /// Everything is asked away, and nothing is left. The secrets were written nowhere, and the plugins saw no rule broken.
    pub async fn close(mut self) {
        self.honest();
        let all: Vec<_> = (0..self.slots.len()).collect();
        self.must(Ask::Unmount, &all).await;
        assert!(self.rests().await, "csid ended by itself");
        let rows = self.rows().await.expect("csid runs");
        self.check(&rows);
        self.w.nothing_left(&self.client).await;
        let told = format!("{:?}", events(&self.client, 0).await);
        self.search("an event", told.as_bytes());
        self.w.stop().await;
        let written: Vec<_> = ["state", "run"]
            .into_iter()
            .flat_map(|directory| kernel::tree(&self.w.path(directory)).expect("a directory"))
            .chain([self.w.path("csid.log")])
            .filter(|path| path.is_file())
            .collect();
        assert!(written.len() >= 3, "a log, a marker and a journal: {written:?}");
        for path in written {
            self.search(&path.display().to_string(), &std::fs::read(&path).expect("what csid wrote"));
        }
        for plugin in self.plugins.clone() {
            self.w.plugin(plugin).assert_rules();
        }
    }

    fn search(&self, place: &str, bytes: &[u8]) {
        if String::from_utf8_lossy(bytes).contains(CANARY) {
            self.report.wrong(Broken::SecretHit);
            panic!("a secret is in {place}");
        }
    }
}

/// The state a row shows.
fn seen(row: Option<&MountRow>) -> State {
    match row.map(|row| (row.state.as_str(), row.healthy)) {
        None => State::Absent,
        Some(("mounted", true)) => State::Mounted,
        Some(("mounted", false)) => State::Taken,
        Some(("lost", _)) => State::Lost,
        Some(("waiting", _)) => State::Waiting,
        Some((other, _)) => panic!("{other} at rest"),
    }
}
