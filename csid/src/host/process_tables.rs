//! Search through the mount namespaces by `/proc/PID/mountinfo`, where the kernel does not list them. csid may not read
//! `/proc/PID/ns/mnt` (that takes CAP_SYS_PTRACE), so the first line of a table identifies a namespace: a mount has one id in the
//! kernel and one namespace. This search misses a namespace without a process, one that only a thread of a process is in, and,
//! where `/proc` is mounted with `hidepid`, those of other users' processes.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::host::copies::{ForeignMount, Masters, Search, place_on};
use crate::host::error::HostError;
use crate::host::namespaces::{Budget, Holder, MountElsewhere};
use crate::host::table::{self, Brief, MountEntry};

/// Bytes of one table of mounts that csid reads; a namespace has 100,000 mounts at most (fs.mount-max). A larger table may show anything,
/// so its namespace counts as one that shows the volume. So does a table that takes too long.
const LARGEST: usize = 64 << 20;

/// Reads the mounts of all namespaces once, and returns the answers in the order of the questions.
pub(super) fn search(
    search: &mut Search<'_>,
    budget: &Budget,
) -> Result<Vec<Vec<MountElsewhere>>, HostError> {
    let mut text = Vec::new();
    let own_line = first_line(Path::new("/proc/self"), &mut text).map(|(_, line)| line).unwrap_or_default();
    let mut but_of: Vec<HashSet<Vec<u8>>> = Vec::new();
    for question in search.questions {
        let lines = question.but_of.iter().filter_map(|process| first_line(&directory(*process), &mut text));
        but_of.push(lines.map(|(_, line)| line).collect());
    }

    let own = table::entries()?;
    let own_ids: HashMap<u64, &MountEntry> = own.iter().map(|entry| (entry.id, entry)).collect();
    for entry in &own {
        if let Some(on) = own_ids.get(&entry.parent) {
            search.note_own(entry, on);
        }
    }

    let mut seen: HashSet<Vec<u8>> = HashSet::from([own_line]);
    let mut masters = Masters::default();
    let mut found: BTreeMap<u64, ForeignMount> = BTreeMap::new();
    let mut unread: Vec<(MountElsewhere, Vec<u8>)> = Vec::new();
    for process in processes() {
        // A process that has ended has no namespace.
        let Some((mut file, line)) = first_line(&directory(process), &mut text) else { continue };
        if seen.contains(&line) {
            continue;
        }
        match read_rest(&mut file, &mut text, budget.of_namespace()) {
            Ok(true) => {}
            Ok(false) => unread.push((MountElsewhere::unsearched(Holder::Process(process)), line.clone())),
            Err(_) => continue,
        }
        let briefs: Vec<Brief<'_>> = table::briefs(&text).collect();
        let mut by_id: Option<(HashMap<u64, &Brief<'_>>, HashSet<u64>)> = None;
        for brief in &briefs {
            masters.add(brief.groups);
            if !search.is_about(brief.device) || own_ids.contains_key(&brief.id) {
                continue;
            }
            let Some(entry) = brief.entry() else { continue };
            let mut of = search.asking(&entry);
            of.retain(|number| !but_of[*number].contains(&line));
            if of.is_empty() {
                continue;
            }
            let (by_id, parents) = by_id.get_or_insert_with(|| {
                let is_root = |other: &&Brief<'_>| other.parent == other.id;
                let parents = briefs.iter().filter(|other| !is_root(other)).map(|other| other.parent);
                (briefs.iter().map(|on| (on.id, on)).collect(), parents.collect())
            });
            let is_parent = parents.contains(&entry.id);
            let parent = by_id.get(&entry.parent).filter(|on| on.id != entry.id);
            let parent = parent.and_then(|on| Some((on.groups, place_on(&entry, &on.entry()?)?)));
            let copy = MountElsewhere {
                holder: Holder::Process(process),
                path: Some(entry.path.clone()),
                read_only: entry.read_only,
            };
            let device = entry.device;
            let known = found.entry(entry.id).or_insert_with(|| ForeignMount {
                copy,
                of: BTreeSet::new(),
                device,
                parent: None,
                is_parent: false,
            });
            known.of.extend(of);
            known.is_parent |= is_parent;
            known.parent = known.parent.take().or(parent);
        }
        seen.insert(line);
    }

    let held = found.into_values().filter(|found| !search.goes_along(found, &masters));
    let mut answers = search.answers(held);
    for (copy, line) in unread {
        let asking = answers.iter_mut().zip(&but_of).filter(|(_, but_of)| !but_of.contains(&line));
        asking.for_each(|(answer, _)| answer.push(copy.clone()));
    }
    Ok(answers)
}

/// Reads the rest of a table of mounts. Returns whether that was all of it: it may be larger than [`LARGEST`], or take longer than `end`.
fn read_rest(file: &mut File, text: &mut Vec<u8>, end: Instant) -> std::io::Result<bool> {
    // The kernel writes some lines at each call, and takes longer for each the more mounts are stacked below it.
    let mut part = vec![0; 64 << 10];
    while text.len() < LARGEST && Instant::now() < end {
        match file.read(&mut part)? {
            0 => return Ok(true),
            count => text.extend_from_slice(&part[..count]),
        }
    }
    Ok(false)
}

fn directory(process: u32) -> PathBuf {
    PathBuf::from(format!("/proc/{process}"))
}

/// Returns the processes, the first ones first.
pub(super) fn processes() -> BTreeSet<u32> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten();
    entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect()
}

/// Opens a process' table of mounts and reads its first line, which identifies the namespace and how much of it the process'
/// root shows. What was read is in `text`. `None`: the process has ended, or sees no mount.
fn first_line(process: &Path, text: &mut Vec<u8>) -> Option<(File, Vec<u8>)> {
    let mut file = File::open(process.join("mountinfo")).ok()?;
    text.clear();
    // The kernel writes no more lines than are asked for.
    let mut part = [0; 256];
    loop {
        let count = file.read(&mut part).ok().filter(|count| *count > 0)?;
        text.extend_from_slice(&part[..count]);
        if let Some(end) = text.iter().position(|&byte| byte == b'\n') {
            return Some((file, text[..end].to_vec()));
        }
    }
}

/// Returns the id of the first mount that a process sees. `None`: it has ended, or sees no mount.
pub(super) fn first_id(process: u32) -> Option<u64> {
    first_id_in(&directory(process))
}

fn first_id_in(directory: &Path) -> Option<u64> {
    let (_, line) = first_line(directory, &mut Vec::new())?;
    table::briefs(&line).next().map(|brief| brief.id)
}

/// Returns, for each thread of a process, the process and the id of the first mount that the thread sees.
pub(super) fn threads(process: u32) -> Vec<(u32, Option<u64>)> {
    let entries = std::fs::read_dir(directory(process).join("task")).into_iter().flatten();
    entries.filter_map(|entry| Some((process, first_id_in(&entry.ok()?.path())))).collect()
}

/// Returns the name of a process for an error, as `PID COMMAND (UNIT)`.
pub(super) fn described(process: u32) -> String {
    let directory = directory(process);
    let command = std::fs::read(directory.join("comm")).unwrap_or_default();
    let name = table::presentable(&process.to_string(), command.trim_ascii_end());
    let groups = std::fs::read_to_string(directory.join("cgroup")).unwrap_or_default();
    match unit(&groups) {
        Some(unit) => format!("{name} ({})", unit.replace(char::is_control, " ")),
        None => name,
    }
}

/// Returns the systemd unit, or the control group where there is none, of a process whose `/proc/PID/cgroup` says this. Of a user's
/// unit its own, not that of the user's systemd.
fn unit(groups: &str) -> Option<&str> {
    let named = |prefix: &str| groups.lines().find_map(|line| line.split_once(prefix)).map(|(_, path)| path);
    let path = named("0::").filter(|path| *path != "/").or_else(|| named(":name=systemd:"))?;
    let is_unit = |part: &&str| part.ends_with(".service") || part.ends_with(".scope");
    let of_user = |part: &&str| !part.starts_with("user@");
    let mut units = path.split('/').filter(is_unit);
    let first = units.next();
    first.filter(of_user).or_else(|| units.next()).or(first).or(Some(path).filter(|path| *path != "/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_named_with_its_unit() {
        for (groups, due) in [
            ("0::/system.slice/cron.service\n", Some("cron.service")),
            ("0::/machine.slice/libpod-ab.scope/container\n", Some("libpod-ab.scope")),
            ("0::/user.slice/user-1.slice/user@1.service/app.slice/app-x.scope\n", Some("app-x.scope")),
            ("0::/user.slice/user-1.slice/user@1.service\n", Some("user@1.service")),
            ("1:name=systemd:/system.slice/a.service\n0::/\n", Some("a.service")),
            ("0::/docker/ab\n", Some("/docker/ab")),
            ("0::/\n", None),
            ("", None),
        ] {
            assert_eq!(unit(groups), due, "{groups}");
        }
    }
}
