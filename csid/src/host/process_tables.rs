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
    let own_line = first_line(Path::new("/proc/self"), &mut text)?.map(|(_, line)| line).unwrap_or_default();
    let mut but_of: Vec<HashSet<Vec<u8>>> = Vec::new();
    for question in search.questions {
        let mut lines = HashSet::new();
        for process in &question.but_of {
            lines.extend(first_line(&directory(*process), &mut text)?.map(|(_, line)| line));
        }
        but_of.push(lines);
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
    let mut new = processes()?;
    let mut read: BTreeSet<u32> = BTreeSet::new();
    // A process may leave a namespace for a copy of it, or to a child, after it was listed.
    let mut lists = 1;
    while let Some(process) = next(&mut new, &mut read, &mut lists)? {
        // A process that has ended has no namespace.
        let Some((mut file, line)) = first_line(&directory(process), &mut text)? else { continue };
        if seen.contains(&line) {
            continue;
        }
        match read_rest(&mut file, &mut text, budget.of_namespace()) {
            Ok(true) => {}
            Ok(false) => unread.push((MountElsewhere::unsearched(Holder::Process(process)), line.clone())),
            Err(error) if has_ended(&error) => continue,
            Err(source) => {
                let path = directory(process).join("mountinfo");
                return Err(HostError::Os { step: "read".into(), path, source });
            }
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

/// Lists of processes that one search reads at most.
const LISTS: u32 = 8;

/// Returns the next process to read. `None`: no process has come since the last list, or there were many lists.
fn next(
    new: &mut BTreeSet<u32>,
    read: &mut BTreeSet<u32>,
    lists: &mut u32,
) -> Result<Option<u32>, HostError> {
    if new.is_empty() && *lists < LISTS {
        *lists += 1;
        *new = processes()?;
        new.retain(|process| !read.contains(process));
    }
    let process = new.pop_first();
    read.extend(process);
    Ok(process)
}

/// Returns whether a process has ended, or has left its namespace at its end.
fn has_ended(error: &std::io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH | libc::EINVAL))
}

fn directory(process: u32) -> PathBuf {
    PathBuf::from(format!("/proc/{process}"))
}

/// Returns the processes, the first ones first.
pub(super) fn processes() -> Result<BTreeSet<u32>, HostError> {
    let unread = |source| HostError::Os { step: "read".into(), path: "/proc".into(), source };
    let mut processes = BTreeSet::new();
    for entry in std::fs::read_dir("/proc").map_err(unread)? {
        let name = entry.map_err(unread)?.file_name();
        processes.extend(name.to_str().and_then(|name| name.parse::<u32>().ok()));
    }
    Ok(processes)
}

/// Opens a process' table of mounts and reads its first line, which identifies the namespace and how much of it the process'
/// root shows. What was read is in `text`. `None`: the process has ended, or sees no mount. Fails if csid cannot read the table.
fn first_line(process: &Path, text: &mut Vec<u8>) -> Result<Option<(File, Vec<u8>)>, HostError> {
    text.clear();
    let path = process.join("mountinfo");
    match read_line(&path, text) {
        Ok(None) => Ok(None),
        Ok(Some((file, end))) => Ok(Some((file, text[..end].to_vec()))),
        Err(error) if has_ended(&error) => Ok(None),
        Err(source) => Err(HostError::Os { step: "read".into(), path, source }),
    }
}

/// Reads the first line, and returns its length.
fn read_line(path: &Path, text: &mut Vec<u8>) -> std::io::Result<Option<(File, usize)>> {
    let mut file = File::open(path)?;
    // The kernel writes no more lines than are asked for.
    let mut part = [0; 256];
    loop {
        let count = file.read(&mut part)?;
        if count == 0 {
            return Ok(None);
        }
        text.extend_from_slice(&part[..count]);
        if let Some(end) = text.iter().position(|&byte| byte == b'\n') {
            return Ok(Some((file, end)));
        }
    }
}

/// Returns the id of the first mount that a process sees, to name the process. `None`: it has ended, or sees no mount, or csid cannot
/// read its table.
pub(super) fn first_id(process: u32) -> Option<u64> {
    first_id_in(&directory(process))
}

fn first_id_in(directory: &Path) -> Option<u64> {
    let (_, line) = first_line(directory, &mut Vec::new()).ok()??;
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
