//! Checks csid's promises: its rows, the kernel's mounts and csid's directories are exactly those that the clients' answers allow, and no
//! secret is written down.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use csi_witness::Mark;
use csid_client::MountRow;
use csid_tests::ask::{events, private};
use csid_tests::kernel;

use crate::model::{self, Ask, State};
use crate::plan::Kind;
use crate::report::Broken;
use crate::slot::{CANARY, Slot};
use crate::slots::Slots;

impl Slots<'_> {
    /// Compares rows, mounts and paths with what the answers allow.
    pub fn check(&mut self, rows: &[MountRow]) {
        let mut wrong = Vec::new();
        let mut table = kernel::volumes_below(&self.site.w.dir).expect("the mount table");
        table.retain(|mount| mount.point != self.site.w.path("run"));
        let mut points: BTreeSet<PathBuf> = BTreeSet::new();
        // A row that rests may have its volume staged, and published at the plugin's own path. One that was taken away while csid bound
        // it is there in part.
        let mut possible: BTreeSet<PathBuf> = BTreeSet::new();
        let mut paths: BTreeSet<PathBuf> = BTreeSet::new();
        for row in rows {
            let source = Path::new(&row.source);
            paths.extend(own_paths(source));
            paths.extend(Some(PathBuf::from(&row.staging)).filter(|path| path.is_absolute()));
            possible.extend([PathBuf::from(&row.staging), private(source)]);
            let Some(slot) = self.slot(row) else {
                wrong.push((Broken::Leftover, format!("a row that nobody asked for: {row:?}")));
                continue;
            };
            let shown = [source.to_owned(), private(source)].into_iter().chain(slot.target.clone());
            match seen(Some(row)) {
                State::Mounted => {
                    points.extend(shown);
                    points.extend((slot.kind == Kind::FileSystem).then(|| row.staging.clone().into()));
                }
                State::Taken => possible.extend(shown),
                _ => {}
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
        for slot in self.slots.iter().filter(|slot| slot.is_exclusive()) {
            let has = |other: &&Slot| other.volume == slot.volume && !other.must(State::Absent);
            let users: Vec<_> = self.slots.iter().filter(has).map(|slot| slot.consumer).collect();
            if users.len() > 1 {
                wrong.push((Broken::Breach, format!("{} is for one, and {users:?} have it", slot.volume)));
            }
        }
        for mount in &table {
            let stacked = table.iter().filter(|other| other.point == mount.point).count();
            if stacked != 1 || !(points.contains(&mount.point) || possible.contains(&mount.point)) {
                wrong.push((Broken::Leftover, format!("{stacked} mounts: {mount:?}")));
            }
        }
        for point in points.iter().filter(|point| !table.iter().any(|mount| mount.point == **point)) {
            wrong.push((Broken::LostMount, format!("nothing is mounted at {}", point.display())));
        }
        let left = self.site.w.leftovers().into_iter();
        for path in left.filter_map(|left| left.strip_prefix("path ").map(PathBuf::from)) {
            if !paths.contains(&path) {
                wrong.push((Broken::Leftover, format!("no row explains {}", path.display())));
            }
        }
        for breach in self.witnesses.breaches() {
            wrong.push((Broken::Breach, format!("{breach:?}")));
        }
        for (wrong, _) in &wrong {
            self.report.wrong(*wrong);
        }
        if wrong.is_empty() {
            return;
        }
        // The panic holds it all: of a failed run, some readers see only the panics.
        let mut text = String::new();
        for (wrong, what) in wrong {
            text.push_str(&format!("\n{wrong:?}: {what}"));
        }
        for Slot { volume, consumer, history, .. } in
            self.slots.iter().filter(|slot| !slot.history.is_empty())
        {
            let written = model::written(history);
            text.push_str(&format!("\n{volume} {consumer}, since it was looked at:{written}"));
        }
        for row in rows {
            text.push_str(&format!("\n{row:?}"));
        }
        panic!("what csid shows is not what the answers allow:{text}");
    }

    /// Everything is asked away, and nothing is left. The secrets were written nowhere.
    pub async fn close(mut self) {
        self.site.w.honest();
        let all: Vec<_> = (0..self.slots.len()).collect();
        self.must(Ask::Unmount, &all).await;
        self.settle(|_, _| panic!("csid ended by itself")).await;
        self.witnesses.mark(&Mark::Rest);
        self.check(&[]);
        self.site.w.nothing_left(&self.site.client).await;
        let answer = format!("{:?}", events(&self.site.client, 0).await);
        self.search("an event", answer.as_bytes());
        self.site.w.stop().await;
        let written: Vec<_> = ["state", "run"]
            .into_iter()
            .flat_map(|directory| kernel::tree(&self.site.w.path(directory)).expect("a directory"))
            .chain([self.site.w.path("csid.log")])
            .filter(|path| path.is_file())
            .collect();
        assert!(written.len() >= 3, "a log, a marker and a journal: {written:?}");
        for path in written {
            self.search(&path.display().to_string(), &std::fs::read(&path).expect("what csid wrote"));
        }
    }

    fn search(&self, place: &str, bytes: &[u8]) {
        if String::from_utf8_lossy(bytes).contains(CANARY) {
            self.report.wrong(Broken::SecretHit);
            panic!("a secret is in {place}");
        }
    }
}

/// A published path and the directories that csid made for it alone or for its volume.
pub fn own_paths(source: &Path) -> impl Iterator<Item = PathBuf> + '_ {
    let is_own = |path: &&Path| !path.ends_with("publish");
    let private = private(source);
    let of_volume = private.parent().map(Path::to_path_buf);
    source.ancestors().take_while(is_own).map(Path::to_path_buf).chain([private]).chain(of_volume)
}

/// Returns the state that a row shows.
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
