//! `csid-bench count`: what csid executes for one mount and for one unmount, against the figures that are kept in `count.toml`, so
//! that a change which makes them dearer is seen. Time says that only on a machine at rest; a count says it on any.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result};
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getcpu, sched_setaffinity};
use serde::{Deserialize, Serialize};

use crate::host::Host;
use crate::paths::Way;
use crate::trace::{Count, Tracee};

/// Before anything is counted: statements are prepared, directories made, threads started.
const WARM: usize = 20;
/// Of each.
const COUNTED: usize = 7;

/// Instructions may be more by this part. One machine repeats them within 1 %; a processor without AVX-512, for which the C
/// library has other string functions, needs 3 % more; and which ones there are is not known.
const TOLERANCE: f64 = 0.10;
/// Of these there may be so many more, by how csid's threads happen to meet; all others repeat exactly. How often csid waits depends on
/// when the plugin, the caller and the helper read what csid sent, and answer: each wakes it, alone or with another one.
const WAKING: [(&str, u64); 3] = [("epoll_wait", 3), ("futex", 1), ("write", 1)];

const FIGURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/count.toml");
const PREFACE: &str = "\
# What csid executes in user space for one mount and for one unmount, and its system calls: the release build, the least of some.
# docs/performance.md says how it is counted. Written by `make count-renew`.

";

#[derive(Debug, Deserialize, Serialize)]
struct Figures {
    mount: Figure,
    unmount: Figure,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
struct Figure {
    instructions: u64,
    /// System calls, by name.
    calls: BTreeMap<String, u64>,
}

/// What is to be said of a figure against the kept one.
#[derive(Debug, Default, PartialEq, Eq)]
struct Difference {
    dearer: Vec<String>,
    cheaper: Vec<String>,
}

impl Figure {
    /// Each number for itself the least: what is not of the operation (threads that meet otherwise, memory that is asked for) only adds.
    fn least(counts: &[Count]) -> Self {
        let numbers: BTreeSet<u64> = counts.iter().flat_map(|count| count.calls.keys().copied()).collect();
        let least = |of: &dyn Fn(&Count) -> u64| counts.iter().map(of).min().unwrap_or(0);
        let calls = numbers
            .into_iter()
            .map(|number| (name(number), least(&|count| count.calls.get(&number).copied().unwrap_or(0))));
        Figure {
            instructions: least(&|count| count.instructions),
            calls: calls.filter(|(name, n)| *n > 0 && name != CLOCK).collect(),
        }
    }

    fn more_than(&self, kept: &Figure) -> f64 {
        self.instructions as f64 / kept.instructions as f64 - 1.0
    }

    fn against(&self, kept: &Figure) -> Difference {
        let mut difference = Difference::default();
        let more = self.more_than(kept);
        if more > TOLERANCE {
            difference.dearer.push("instructions".to_owned());
        } else if more < -TOLERANCE {
            difference.cheaper.push("instructions".to_owned());
        }
        for name in BTreeSet::from_iter(self.calls.keys().chain(kept.calls.keys())) {
            let of = |figure: &Figure| figure.calls.get(name).copied().unwrap_or(0);
            let (now, kept) = (of(self), of(kept));
            let slack = WAKING.iter().find(|(waking, _)| waking == name).map_or(0, |(_, slack)| *slack);
            if now > kept + slack {
                difference.dearer.push(format!("{name} ({now}, kept {kept})"));
            } else if now + slack < kept {
                difference.cheaper.push(format!("{name} ({now}, kept {kept})"));
            }
        }
        difference
    }
}

/// Count, and compare with what is kept or keep it; or write the instructions of each call stack into the directory `stacks`.
pub fn run(host: &Host, renew: bool, stacks: Option<&Path>) -> Result<ExitCode> {
    let now = count(host, stacks)?;
    if stacks.is_some() {
        return Ok(ExitCode::SUCCESS);
    }
    if renew {
        fs::write(FIGURES, PREFACE.to_owned() + &toml::to_string(&now)?).context(FIGURES)?;
        println!("{FIGURES} is written: commit it with the reason");
        return Ok(ExitCode::SUCCESS);
    }
    let kept: Figures = toml::from_str(&fs::read_to_string(FIGURES).context(FIGURES)?).context(FIGURES)?;
    let mut dearer = false;
    for (what, now, kept) in
        [("a mount", &now.mount, &kept.mount), ("an unmount", &now.unmount, &kept.unmount)]
    {
        let calls = |figure: &Figure| figure.calls.values().sum::<u64>();
        println!(
            "{what}: {} instructions, kept {} ({:+.1} %, +{:.0} % may be); {} system calls, kept {}",
            now.instructions,
            kept.instructions,
            100.0 * now.more_than(kept),
            100.0 * TOLERANCE,
            calls(now),
            calls(kept),
        );
        let difference = now.against(kept);
        if !difference.dearer.is_empty() {
            dearer = true;
            println!("{what} is DEARER: {}", difference.dearer.join(", "));
        }
        if !difference.cheaper.is_empty() {
            println!("{what} is cheaper: {}", difference.cheaper.join(", "));
            println!("keep it: `make count-renew`, and commit tests/bench/count.toml");
        }
    }
    if dearer {
        println!(
            "Find out what the change added. If it is worth that, `make count-renew`, and commit tests/bench/count.toml with the \
             reason. If nothing was added, another compiler, C library or processor may be: count an older commit here too."
        );
        return Ok(ExitCode::FAILURE);
    }
    Ok(ExitCode::SUCCESS)
}

fn count(host: &Host, stacks: Option<&Path>) -> Result<Figures> {
    let _plugin = host.plugin("bench")?;
    let _bus = host.bus()?;
    // How often csid would poll depends on the others' speed, and not on csid.
    fs::write(host.path("etc/csid.toml"), "busy-poll-usec = 0\n")?;
    let csid = host.start()?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let way = Way::Csid(runtime.block_on(host.client(&host.private(), "bench"))?);
    runtime.block_on(async {
        for _ in 0..WARM {
            way.mount(0).await?;
            way.unmount(0).await?;
        }
        anyhow::Ok(())
    })?;
    let (mut mounts, mut unmounts) = (Vec::new(), Vec::new());
    let (mut mount_stacks, mut unmount_stacks) = (BTreeMap::new(), BTreeMap::new());
    let counted = || {
        one_processor(csid.pid())?;
        let mut tracee = Tracee::attach(csid.pid())
            .context("csid cannot be traced: that needs CAP_SYS_PTRACE, and ptrace allowed in a container")?;
        if stacks.is_some() {
            tracee.count_stacks(csid.pid())?;
        }
        for _ in 0..COUNTED {
            let its = way.clone();
            let mount = runtime.spawn(async move { its.mount(0).await });
            mounts.push(tracee.count(|| mount.is_finished())?);
            runtime.block_on(mount)??;
            add(&mut mount_stacks, tracee.take_stacks());
            let its = way.clone();
            let unmount = runtime.spawn(async move { its.unmount(0).await });
            unmounts.push(tracee.count(|| unmount.is_finished())?);
            runtime.block_on(unmount)??;
            add(&mut unmount_stacks, tracee.take_stacks());
        }
        anyhow::Ok(())
    };
    // In a thread that ends: a tracer learns of its tracee's end before the parent does.
    std::thread::scope(|scope| scope.spawn(counted).join()).expect("no panic")?;
    if let Some(directory) = stacks {
        fs::create_dir_all(directory)?;
        fs::write(directory.join("mount.folded"), folded(&mount_stacks))?;
        fs::write(directory.join("unmount.folded"), folded(&unmount_stacks))?;
    }
    Ok(Figures { mount: Figure::least(&mounts), unmount: Figure::least(&unmounts) })
}

fn add(sum: &mut BTreeMap<String, u64>, stacks: BTreeMap<String, u64>) {
    for (stack, instructions) in stacks {
        *sum.entry(stack).or_default() += instructions;
    }
}

/// Returns a line `STACK INSTRUCTIONS` for each stack: the mean of what was counted. A stack with less than one is left out.
fn folded(stacks: &BTreeMap<String, u64>) -> String {
    let means = stacks.iter().map(|(stack, instructions)| (stack, instructions / COUNTED as u64));
    means.filter(|(_, mean)| *mean > 0).map(|(stack, mean)| format!("{stack} {mean}\n")).collect()
}

/// The threads of `pid` and this one share a processor: to wake another one is slow, and threads that run at once meet less
/// regularly.
fn one_processor(pid: u32) -> Result<()> {
    let mut this = CpuSet::new();
    this.set(sched_getcpu());
    sched_setaffinity(None, &this)?;
    for entry in fs::read_dir(format!("/proc/{pid}/task"))? {
        let tid = entry?.file_name().to_string_lossy().parse()?;
        sched_setaffinity(Pid::from_raw(tid), &this)?;
    }
    Ok(())
}

/// A system call only because the clocks are stopped.
const CLOCK: &str = "clock_gettime";

/// A system call's name, if a mount or an unmount is likely to make it.
fn name(number: u64) -> String {
    macro_rules! known {
        ($($call:ident)*) => { [$((libc::$call, stringify!($call))),*] };
    }
    // libc does not name the last two.
    let recent = [(457, "SYS_statmount"), (458, "SYS_listmount")];
    let known = known![
        SYS_brk SYS_clock_gettime SYS_clone3 SYS_close SYS_connect SYS_epoll_ctl SYS_epoll_wait SYS_fchmod SYS_fcntl SYS_fdatasync SYS_fstat
        SYS_fstatfs SYS_fsync SYS_ftruncate SYS_futex SYS_getdents64 SYS_geteuid SYS_getpid SYS_getrandom SYS_ioctl SYS_lseek SYS_madvise
        SYS_mkdirat SYS_mmap SYS_mount_setattr SYS_mprotect SYS_munmap SYS_name_to_handle_at SYS_newfstatat SYS_openat SYS_openat2
        SYS_ppoll SYS_pread64 SYS_pwrite64 SYS_read SYS_readlinkat SYS_recvfrom SYS_recvmsg SYS_sched_yield SYS_sendmsg SYS_sendto SYS_socket
        SYS_statfs SYS_statx SYS_umount2 SYS_unlinkat SYS_write SYS_writev
    ];
    let found = known.iter().chain(&recent).find(|(known, _)| u64::try_from(*known) == Ok(number));
    found.map_or_else(|| format!("call-{number}"), |(_, name)| name.trim_start_matches("SYS_").to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figure(instructions: u64, calls: &[(&str, u64)]) -> Figure {
        Figure { instructions, calls: calls.iter().map(|(name, n)| ((*name).to_owned(), *n)).collect() }
    }

    fn difference(now: Figure) -> (Vec<String>, Vec<String>) {
        let kept = figure(1_000_000, &[("futex", 12), ("openat2", 9)]);
        let Difference { dearer, cheaper } = now.against(&kept);
        (dearer, cheaper)
    }

    #[test]
    fn within_tolerance_nothing_is_reported() {
        for (instructions, futex) in [(900_001, 11), (1_000_000, 12), (1_099_999, 13)] {
            let now = figure(instructions, &[("futex", futex), ("openat2", 9)]);
            assert_eq!(difference(now), (vec![], vec![]));
        }
    }

    #[test]
    fn more_is_dearer() {
        let now = figure(1_100_001, &[("futex", 14), ("openat2", 10), ("statx", 1)]);
        let said = ["instructions", "futex (14, kept 12)", "openat2 (10, kept 9)", "statx (1, kept 0)"];
        assert_eq!(difference(now), (said.map(str::to_owned).to_vec(), vec![]));
    }

    #[test]
    fn less_is_to_be_kept() {
        let now = figure(899_999, &[("futex", 10)]);
        let said = ["instructions", "futex (10, kept 12)", "openat2 (0, kept 9)"].map(str::to_owned).to_vec();
        assert_eq!(difference(now), (vec![], said));
    }

    #[test]
    fn least_of_each_number_counts_without_clocks() {
        let count = |instructions, calls: [(i64, u64); 3]| Count {
            instructions,
            calls: calls.map(|(number, n)| (number.unsigned_abs(), n)).into(),
        };
        let counts = [
            count(7, [(libc::SYS_openat2, 9), (libc::SYS_futex, 3), (libc::SYS_clock_gettime, 1)]),
            count(8, [(libc::SYS_openat2, 9), (libc::SYS_futex, 2), (libc::SYS_clock_gettime, 1)]),
            count(9, [(libc::SYS_openat2, 9), (libc::SYS_futex, 4), (libc::SYS_mmap, 1)]),
        ];
        assert_eq!(Figure::least(&counts), figure(7, &[("futex", 2), ("openat2", 9)]));
    }

    #[test]
    fn kept_report_can_be_read() {
        let kept: Figures = toml::from_str(&fs::read_to_string(FIGURES).unwrap()).unwrap();
        assert!(kept.mount.instructions > 0 && kept.unmount.calls["fdatasync"] == 1);
        // The helper unmounts: a call that a file system's server may hold up is none of csid's process.
        assert!(!kept.unmount.calls.contains_key("umount2"));
    }
}
