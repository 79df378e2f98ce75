//! Checks csid's promises: every answered item is there, every item that is there was requested, and a row explains each attachment at
//! the plugin.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Instant;

use csi_witness::report::Proof;
use csid_client::{
    AccessMode, CallOptions, ClaimFilter, ClaimRow, Error, Kind, MountFilter, MountRow, VolumeFilter,
    VolumeRow,
};
use csid_tests::ask::{NAMESPACE, private};
use csid_tests::kernel;
use csid_tests::{backend, clustered};

use super::{PATIENCE, Pool, State, Thing, Volume, WITNESS_LOG, first_of, items_of};
use crate::check::own_paths;
use crate::model;
use crate::report::Broken;
use crate::slots::POLL;

/// This node's name at the plugin.
const HERE: &str = "node-1";

/// Whatever csid and the world show at rest.
struct Seen {
    volumes: Vec<VolumeRow>,
    claims: Vec<ClaimRow>,
    mounts: Vec<MountRow>,
    /// The volumes that csid reports as attached here.
    attached: BTreeSet<String>,
    /// At the plugin.
    made: BTreeSet<String>,
    kept: Vec<backend::Volume>,
    table: Vec<kernel::Mount>,
}

impl Pool<'_> {
    /// Returns the rows of the volumes. A node of a cluster lists only those that it has claimed, so it asks its server for each.
    async fn volume_rows(&self) -> Vec<VolumeRow> {
        let client = &self.site.client;
        if !clustered::is_used() {
            return client.list_volumes(VolumeFilter::default()).await.expect("the volumes");
        }
        let end = Instant::now() + PATIENCE;
        let mut rows = Vec::new();
        for Volume { name, .. } in &self.volumes {
            loop {
                match client.volume(NAMESPACE, name).await {
                    Ok(row) => rows.push(row),
                    Err(Error::Csid(error)) if error.kind == Kind::NotFound => {}
                    // csid has just started.
                    Err(Error::Csid(error)) if error.kind == Kind::Unavailable && Instant::now() < end => {
                        tokio::time::sleep(POLL).await;
                        continue;
                    }
                    Err(error) => panic!("GetVolume of {name}: {error}"),
                }
                break;
            }
        }
        rows
    }

    /// Returns what csid and the world show.
    async fn seen(&mut self) -> Seen {
        let volumes = self.volume_rows().await;
        let (client, backend) = (&self.site.client, self.site.w.plugin("p").backend());
        let mut attached = BTreeSet::new();
        for volume in self.volumes.iter().filter(|volume| volumes.iter().any(|row| row.id == volume.name)) {
            let answer = client.explain(NAMESPACE, &volume.name, CallOptions::default()).await;
            let steps = match answer {
                // csid asks a server, which it may not have joined yet.
                Err(Error::Csid(error)) if clustered::is_used() && error.kind == Kind::Unavailable => vec![],
                answer => answer.expect("why").steps,
            };
            let is_attached = steps.contains(&format!("node {HERE}: attached"));
            attached.extend(is_attached.then(|| attachment(volume, HERE)));
        }
        Seen {
            volumes,
            attached,
            claims: client.list_claims(ClaimFilter::default()).await.expect("the claims"),
            mounts: client.list_mounts(MountFilter::default()).await.expect("the rows"),
            made: backend.made().expect("the backend").into_iter().collect(),
            kept: backend.all().expect("the backend"),
            table: kernel::volumes_below(&self.site.w.dir).expect("the mount table"),
        }
    }

    /// Holds rows, mounts and attachments against what the answers allow. Servers of a cluster detach after their answer, so what is left over has
    /// time to go.
    pub(super) async fn check(&mut self) {
        let end = Instant::now() + PATIENCE;
        let before = self.items.clone();
        let mut wrong = self.wrong().await;
        let may_go = |wrong: &[(Broken, String)]| {
            !wrong.is_empty() && wrong.iter().all(|(wrong, _)| matches!(wrong, Broken::Leftover))
        };
        while may_go(&wrong) && clustered::is_used() && Instant::now() < end {
            tokio::time::sleep(POLL).await;
            self.items = before.clone();
            wrong = self.wrong().await;
        }
        for (wrong, _) in &wrong {
            self.report.wrong(*wrong);
        }
        if wrong.is_empty() {
            return;
        }
        for (wrong, what) in wrong {
            eprintln!("{wrong:?}: {what}");
        }
        for (number, item) in self.items.iter().enumerate().filter(|(_, item)| !item.history.is_empty()) {
            let answer = model::written(&item.history);
            eprintln!("{}, since it was looked at:{answer}", self.say(number));
        }
        panic!("what csid shows is not what the answers allow");
    }

    /// Returns what the answers do not allow.
    async fn wrong(&mut self) -> Vec<(Broken, String)> {
        let seen = self.seen().await;
        let mut wrong = Vec::new();
        self.check_items(&seen, &mut wrong);
        self.check_volumes(&seen, &mut wrong);
        self.check_mounts(&seen, &mut wrong);
        wrong.extend(self.breaches().into_iter().map(|breach| (Broken::Breach, breach)));
        wrong
    }

    /// Returns the breaches of CSI's rules. In a cluster a controller call that a server has made may overlap a question, and a call of this host to
    /// its node plugin (rule 18).
    fn breaches(&mut self) -> Vec<String> {
        let breaches = self.witness.verdict().expect("the witness' log").breaches;
        if breaches.is_empty() || !clustered::is_used() {
            return breaches.iter().map(|breach| format!("{breach:?}")).collect();
        }
        let log = self.site.w.plugin("p").directory.join(WITNESS_LOG);
        let report = csi_witness::report::Report::read(&[log]).expect("the witness' log");
        let is_question = |rpc: &str| rpc == "ValidateVolumeCapabilities";
        let is_excused = |proof: &Proof| {
            let of_node = proof.calls.iter().filter(|call| call.rpc.starts_with("Node")).count();
            proof.rule == 18 && (of_node == 1 || proof.calls.iter().any(|call| is_question(&call.rpc)))
        };
        let left = report.breaches.iter().filter(|proof| !is_excused(proof));
        left.map(|proof| format!("{proof:?}")).collect()
    }

    /// The plugin's volumes that CreateVolume made.
    pub(super) fn made_volumes(&mut self) -> BTreeSet<String> {
        let made = self.site.w.plugin("p").backend().made().expect("the backend");
        made.into_iter().filter(|made| made.starts_with("volume ")).collect()
    }

    /// Checks, also before csid is at rest, that a row has each volume that was and is there, at least by its name (CSI rule 39).
    pub(super) async fn check_known(&mut self, before: &BTreeSet<String>) {
        let rows = self.volume_rows().await;
        let known = |row: &VolumeRow| match row.external_id.as_str() {
            "" => format!("volume {}", backend::id_of("id", &row.name)),
            id => format!("volume {id}"),
        };
        let known: BTreeSet<_> = rows.iter().map(known).collect();
        let there = self.made_volumes();
        // Servers show no volume that is being created.
        let is_kept = |made: &str| {
            let volumes = self.volumes.iter().enumerate();
            let mut named = volumes.filter(|(_, volume)| made == format!("volume {}", volume.external_id));
            named.any(|(number, _)| self.items[first_of(number)].allowed == [State::Kept].into())
        };
        let is_due = |made: &&String| !known.contains(*made) && (!clustered::is_used() || is_kept(made));
        let unknown: Vec<_> = before.intersection(&there).filter(is_due).collect();
        if !unknown.is_empty() {
            self.report.wrong(Broken::Leftover);
            panic!("no row knows {unknown:?}: {rows:#?}");
        }
    }

    fn check_items(&mut self, seen: &Seen, wrong: &mut Vec<(Broken, String)>) {
        for number in 0..self.items.len() {
            let state = self.state_of(number, seen, wrong);
            let name = self.say(number);
            let item = &mut self.items[number];
            if !item.allowed.contains(&state) {
                let lost = !item.allowed.contains(&State::Absent);
                let what = format!("{name} is {state:?}, not one of {:?}", item.allowed);
                wrong.push((if lost { Broken::LostClaim } else { Broken::Leftover }, what));
            }
            for (path, number) in &item.holds {
                let now = kernel::mount_id(path).ok();
                if now != Some(*number) {
                    let what = format!("{}: mount {number} is {now:?} now", path.display());
                    wrong.push((Broken::WrongUnmount, what));
                }
            }
            item.allowed = [state].into();
            item.holds.clear();
        }
        let known = |row: &ClaimRow| {
            let is_its =
                |thing: &Thing| matches!(thing, Thing::Use { consumer, .. } if *consumer == row.consumer);
            super::THINGS.iter().any(is_its)
        };
        for row in seen.claims.iter().filter(|row| !known(row)) {
            wrong.push((Broken::Leftover, format!("a claim that nobody asked for: {row:?}")));
        }
    }

    /// The state that rows, or for what has none the plugin, show.
    fn state_of(&self, item: usize, seen: &Seen, wrong: &mut Vec<(Broken, String)>) -> State {
        let item = &self.items[item];
        let name = &self.volumes[item.volume].name;
        match item.thing {
            Thing::Registration if seen.volumes.iter().any(|row| row.id == *name) => State::Kept,
            Thing::Registration => State::Absent,
            Thing::Attachment { node } => {
                let by_claim = node == HERE && seen.claims.iter().any(|row| row.volume == *name);
                let attached = seen.made.contains(&attachment(&self.volumes[item.volume], node));
                if attached && !by_claim { State::Kept } else { State::Absent }
            }
            Thing::Use { consumer, .. } => {
                let claim = seen.claims.iter().find(|row| row.volume == *name && row.consumer == consumer);
                let mount = seen.mounts.iter().find(|row| row.volume == *name && row.consumer == consumer);
                match (claim.map(|claim| claim.by_mount), mount.is_some()) {
                    (None, false) => State::Absent,
                    (Some(false), false) => State::Kept,
                    (Some(true), true) => State::Mounted,
                    (Some(false), true) => State::KeptMounted,
                    (None, true) => {
                        wrong.push((Broken::LostClaim, format!("without its claim: {mount:?}")));
                        State::Mounted
                    }
                    (Some(true), false) => {
                        wrong.push((Broken::Leftover, format!("without its mount: {claim:?}")));
                        State::Absent
                    }
                }
            }
        }
    }

    fn check_volumes(&self, seen: &Seen, wrong: &mut Vec<(Broken, String)>) {
        let (mut explained, mut due) = (BTreeSet::new(), BTreeSet::new());
        for (number, volume) in self.volumes.iter().enumerate() {
            let name = &volume.name;
            let claims: Vec<_> = seen.claims.iter().filter(|row| row.volume == *name).collect();
            let writers = claims.iter().filter(|row| row.mode == "write").count();
            let by_call = items_of(number).filter(|item| self.items[*item].state() == State::Kept);
            let by_call: Vec<_> = by_call
                .filter_map(|item| match self.items[item].thing {
                    Thing::Attachment { node } => Some(attachment(volume, node)),
                    _ => None,
                })
                .collect();
            let many = match volume.access_mode {
                AccessMode::SingleNodeWriter => claims.len() > 1,
                AccessMode::MultiNodeSingleWriter => writers > 1,
                _ => false,
            };
            if many || (!claims.is_empty() && !by_call.is_empty()) {
                wrong.push((Broken::Breach, format!("{name} is had by {claims:?} and {by_call:?}")));
            }
            explained.extend(by_call.iter().cloned());
            explained.extend((!claims.is_empty()).then(|| attachment(volume, HERE)));
            // An attachment of another boot is made again before its use. csid reports where that has failed.
            let is_used = !self.rebooted || seen.mounts.iter().any(|row| row.volume == *name);
            due.extend(by_call);
            due.extend((!claims.is_empty() && is_used).then(|| attachment(volume, HERE)));
            let row = seen.volumes.iter().find(|row| row.id == *name);
            if row.is_some_and(|row| row.capacity < volume.bytes && volume.bytes > super::BYTES) {
                wrong.push((Broken::LostClaim, format!("{} bytes were answered: {row:?}", volume.bytes)));
            }
            let lost = volume.snapshots.iter().filter(|id| !seen.made.contains(&format!("snapshot {id}")));
            wrong.extend(lost.map(|id| (Broken::LostClaim, format!("snapshot {id} was answered"))));
            let kept = seen.kept.iter().find(|kept| kept.id == volume.external_id);
            if row.is_some() && kept.is_none_or(|kept| (kept.bytes as u64) < volume.bytes) {
                wrong.push((Broken::LostClaim, format!("{name} at the plugin: {kept:?}")));
            }
        }
        let rows: BTreeSet<_> =
            seen.volumes.iter().map(|row| format!("volume {}", row.external_id)).collect();
        let unknown = seen.made.iter().filter(|made| made.starts_with("volume ") && !rows.contains(*made));
        wrong.extend(unknown.map(|made| (Broken::Leftover, format!("no row knows {made}"))));
        let attached: BTreeSet<_> =
            seen.made.iter().filter(|made| made.starts_with("attachment ")).cloned().collect();
        let not_explained = attached.difference(&explained).map(|what| (Broken::Leftover, what.clone()));
        due.extend(seen.attached.iter().cloned());
        let lost = due.difference(&attached).map(|what| (Broken::LostClaim, format!("no {what}")));
        wrong.extend(not_explained.chain(lost));
    }

    fn check_mounts(&mut self, seen: &Seen, wrong: &mut Vec<(Broken, String)>) {
        let (mut points, mut paths) = (BTreeSet::new(), BTreeSet::new());
        for row in &seen.mounts {
            let (source, staging) = (Path::new(&row.source), PathBuf::from(&row.staging));
            points.extend([source.to_owned(), private(source), staging.clone()]);
            paths.extend(own_paths(source));
            paths.insert(staging);
            let shows: String = row.external_id.bytes().map(|byte| format!("{byte:02x}")).collect();
            let mut here = seen.table.iter().filter(|mount| mount.point == source);
            let is_shown = here.next().is_some_and(|mount| mount.root.file_name() == Some(shows.as_ref()));
            if !row.healthy || !is_shown || here.next().is_some() {
                wrong.push((Broken::LostMount, format!("not shown once, or another volume: {row:?}")));
            }
            let is_its =
                |thing: Thing| matches!(thing, Thing::Use { consumer, .. } if consumer == row.consumer);
            let volumes = &self.volumes;
            let item = self
                .items
                .iter_mut()
                .find(|item| volumes[item.volume].name == row.volume && is_its(item.thing));
            match (item, kernel::mount_id(source)) {
                (Some(item), Ok(id)) => item.holds = vec![(source.to_owned(), id)],
                _ => wrong.push((Broken::Leftover, format!("a row that nobody asked for: {row:?}"))),
            }
        }
        for left in self.site.w.leftovers() {
            let is_explained = match left.split_once(' ') {
                Some(("mount", path)) => points.contains(Path::new(path)),
                Some(("path", path)) => paths.contains(Path::new(path)),
                // Looked at with the volumes.
                _ => true,
            };
            if !is_explained {
                wrong.push((Broken::Leftover, format!("no row explains {left}")));
            }
        }
    }
}

fn attachment(volume: &Volume, node: &str) -> String {
    format!("attachment {} {node}", volume.external_id)
}
