//! Reads the resources that a unit's processes use, as the kernel counts them for their control group: version 2, version 1, and
//! systemd's mixture of both. A resource that is not counted is absent, not 0.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::host::enter::is_within;
use crate::host::units::{Units, UnitsError};

/// The directory where systemd mounts control groups.
const ROOT: &str = "/sys/fs/cgroup";

/// systemd's names of the hierarchies.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Resources {
    pub cpu_usage_nsec: Option<u64>,
    pub memory_current: Option<u64>,
    pub memory_peak: Option<u64>,
    pub io_read_bytes: Option<u64>,
    pub io_write_bytes: Option<u64>,
    pub io_read_operations: Option<u64>,
    pub io_write_operations: Option<u64>,
    pub tasks_current: Option<u64>,
    pub cpu_pressure: Pressure,
    pub memory_pressure: Pressure,
    pub io_pressure: Pressure,
}

/// Pressure stall information: time in which some of the tasks, or all of them, were stalled for want of something.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Pressure {
    pub some: Option<Stall>,
    pub full: Option<Stall>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Stall {
    /// Percent of the last ten seconds.
    pub avg10: f64,
    pub total_usec: u64,
}

impl Units {
    /// Whether a process is in a unit's control group, or in one below it.
    pub async fn has_process(&self, unit: &str, pid: u32) -> Result<bool, UnitsError> {
        let Some((group, _)) = self.control_group(unit).await? else { return Ok(false) };
        let member = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
        Ok(is_within(&member, &group))
    }

    /// Returns the resources that the processes of a unit use now. `None`: the unit is not loaded, or has no process.
    pub async fn resources(&self, unit: &str) -> Result<Option<Resources>, UnitsError> {
        let Some((group, main_pid)) = self.control_group(unit).await? else { return Ok(None) };
        // The kernel may take its time to add up.
        let permit = Arc::clone(&self.measuring).acquire_owned().await;
        let read = tokio::task::spawn_blocking(move || {
            let member = std::fs::read_to_string(format!("/proc/{main_pid}/cgroup")).unwrap_or_default();
            let resources = Resources::read(Path::new(ROOT), &group, &member);
            drop(permit);
            resources
        });
        Ok(read.await.ok())
    }
}

impl Resources {
    /// Reads the resources of `group`, an absolute name, in the hierarchies that are mounted at or below `root`. `member`: the groups
    /// of the main process, as in /proc/PID/cgroup.
    fn read(root: &Path, group: &str, member: &str) -> Resources {
        match root.join("cgroup.controllers").exists() {
            true => v2(&root.join(group.trim_start_matches('/'))),
            false => v1(root, group, member),
        }
    }
}

fn v2(group: &Path) -> Resources {
    let io = nested(group, "io.stat");
    Resources {
        cpu_usage_nsec: keyed(group, "cpu.stat", "usage_usec").map(|usec| usec.saturating_mul(1000)),
        memory_current: number(group, "memory.current"),
        memory_peak: number(group, "memory.peak"),
        io_read_bytes: io.as_ref().map(|io| io.sum("rbytes=")),
        io_write_bytes: io.as_ref().map(|io| io.sum("wbytes=")),
        io_read_operations: io.as_ref().map(|io| io.sum("rios=")),
        io_write_operations: io.as_ref().map(|io| io.sum("wios=")),
        tasks_current: number(group, "pids.current"),
        ..pressures(group)
    }
}

/// Each controller is a hierarchy of its own, and in the mixture there is one of version 2 without controllers. systemd puts the
/// processes into its group in some of them; in another there may be one of that name, which counts nothing of theirs.
fn v1(root: &Path, group: &str, member: &str) -> Resources {
    let of = |directory: &str, controller: &str| {
        let is_in = |line: &str| {
            let mut parts = line.splitn(3, ':').skip(1);
            let (controllers, name) = (parts.next()?, parts.next()?);
            let is_its = controllers.split(',').any(|one| one == controller);
            (is_its && Path::new(name).starts_with(group)).then_some(())
        };
        let is_in = member.lines().find_map(is_in).is_some();
        is_in.then(|| root.join(directory).join(group.trim_start_matches('/')))
    };
    let [cpu, memory, io, tasks] =
        ["cpuacct", "memory", "blkio", "pids"].map(|controller| of(controller, controller));
    let bytes = io.as_deref().and_then(|io| nested(io, "blkio.throttle.io_service_bytes"));
    let operations = io.as_deref().and_then(|io| nested(io, "blkio.throttle.io_serviced"));
    let number = |group: &Option<PathBuf>, file: &str| number(group.as_deref()?, file);
    Resources {
        cpu_usage_nsec: number(&cpu, "cpuacct.usage"),
        memory_current: number(&memory, "memory.usage_in_bytes"),
        memory_peak: number(&memory, "memory.max_usage_in_bytes"),
        io_read_bytes: bytes.as_ref().map(|io| io.sum("Read ")),
        io_write_bytes: bytes.as_ref().map(|io| io.sum("Write ")),
        io_read_operations: operations.as_ref().map(|io| io.sum("Read ")),
        io_write_operations: operations.as_ref().map(|io| io.sum("Write ")),
        tasks_current: number(&tasks, "pids.current"),
        ..of("unified", "").as_deref().map(pressures).unwrap_or_default()
    }
}

fn pressures(group: &Path) -> Resources {
    Resources {
        cpu_pressure: pressure(group, "cpu.pressure"),
        memory_pressure: pressure(group, "memory.pressure"),
        io_pressure: pressure(group, "io.pressure"),
        ..Resources::default()
    }
}

/// A file that is not there, cannot be read or says something else counts nothing.
fn text(group: &Path, file: &str) -> Option<String> {
    std::fs::read_to_string(group.join(file)).ok()
}

fn number(group: &Path, file: &str) -> Option<u64> {
    text(group, file)?.trim().parse().ok()
}

/// Returns the number of a key from lines `KEY NUMBER`.
fn keyed(group: &Path, file: &str, key: &str) -> Option<u64> {
    let text = text(group, file)?;
    let mut values = text.lines().filter_map(|line| line.strip_prefix(key)?.strip_prefix(' '));
    values.next()?.trim().parse().ok()
}

/// Lines `DEVICE …`, one or several a device. None: nothing was read or written yet.
struct Nested(String);

fn nested(group: &Path, file: &str) -> Option<Nested> {
    text(group, file).map(Nested)
}

impl Nested {
    /// The numbers after `mark`, of all devices together.
    fn sum(&self, mark: &str) -> u64 {
        let after = |line: &str| {
            // `8:0 rbytes=1 wbytes=2`, or `8:0 Read 1`; `Total 3` has no device.
            let (_, counts) = line.split_once(' ')?;
            let at = counts.match_indices(mark).find(|(at, _)| *at == 0 || counts[..*at].ends_with(' '))?.0;
            counts[at + mark.len()..].split_whitespace().next()?.parse::<u64>().ok()
        };
        self.0.lines().filter_map(after).fold(0, u64::saturating_add)
    }
}

/// `some avg10=0.00 avg60=0.00 avg300=0.00 total=0`, and `full` alike.
fn pressure(group: &Path, file: &str) -> Pressure {
    let text = text(group, file).unwrap_or_default();
    let stall = |who: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(who)?.strip_prefix(' '))?;
        let value = |key: &str| line.split(' ').find_map(|word| word.strip_prefix(key)?.strip_prefix('='));
        Some(Stall { avg10: value("avg10")?.parse().ok()?, total_usec: value("total")?.trim().parse().ok()? })
    };
    Pressure { some: stall("some"), full: stall("full") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (file, text) in files {
            let path = root.path().join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        root
    }

    #[test]
    fn version_2_is_one_directory() {
        let root = tree(&[
            ("cgroup.controllers", "cpu io memory pids\n"),
            ("csi.slice/p.service/cpu.stat", "usage_usec 1500\nuser_usec 1000\nsystem_usec 500\n"),
            ("csi.slice/p.service/memory.current", "4096\n"),
            ("csi.slice/p.service/memory.peak", "8192\n"),
            (
                "csi.slice/p.service/io.stat",
                "8:0 rbytes=10 wbytes=20 rios=1 wios=2 dbytes=0 dios=0\n7:1 rbytes=5 wbytes=0 rios=1 wios=0 dbytes=0 dios=0\n",
            ),
            ("csi.slice/p.service/pids.current", "7\n"),
            ("csi.slice/p.service/cpu.pressure", "some avg10=1.50 avg60=0.10 avg300=0.00 total=42\n"),
            (
                "csi.slice/p.service/io.pressure",
                "some avg10=0.00 avg60=0.00 avg300=0.00 total=3\nfull avg10=2.00 avg60=0.00 avg300=0.00 total=2\n",
            ),
        ]);
        let stall = |avg10, total_usec| Some(Stall { avg10, total_usec });
        let expected = Resources {
            cpu_usage_nsec: Some(1_500_000),
            memory_current: Some(4096),
            memory_peak: Some(8192),
            io_read_bytes: Some(15),
            io_write_bytes: Some(20),
            io_read_operations: Some(2),
            io_write_operations: Some(2),
            tasks_current: Some(7),
            cpu_pressure: Pressure { some: stall(1.5, 42), full: None },
            memory_pressure: Pressure::default(),
            io_pressure: Pressure { some: stall(0.0, 3), full: stall(2.0, 2) },
        };
        assert_eq!(
            Resources::read(root.path(), "/csi.slice/p.service", "0::/csi.slice/p.service\n"),
            expected
        );
    }

    #[test]
    fn version_1_is_a_directory_a_controller() {
        let root = tree(&[
            ("cpuacct/a/p.service/cpuacct.usage", "12345\n"),
            ("memory/a/p.service/memory.usage_in_bytes", "4096\n"),
            ("memory/a/p.service/memory.max_usage_in_bytes", "8192\n"),
            (
                "blkio/a/p.service/blkio.throttle.io_service_bytes",
                "8:0 Read 10\n8:0 Write 20\n8:0 Sync 30\n8:0 Total 30\n7:1 Read 5\nTotal 35\n",
            ),
            (
                "blkio/a/p.service/blkio.throttle.io_serviced",
                "8:0 Read 1\n8:0 Write 2\n8:0 Total 3\nTotal 3\n",
            ),
            ("pids/a/p.service/pids.current", "7\n"),
            ("unified/a/p.service/memory.pressure", "some avg10=0.25 avg60=0.10 avg300=0.00 total=9\n"),
        ]);
        let expected = Resources {
            cpu_usage_nsec: Some(12_345),
            memory_current: Some(4096),
            memory_peak: Some(8192),
            io_read_bytes: Some(15),
            io_write_bytes: Some(20),
            io_read_operations: Some(1),
            io_write_operations: Some(2),
            tasks_current: Some(7),
            memory_pressure: Pressure { some: Some(Stall { avg10: 0.25, total_usec: 9 }), full: None },
            ..Resources::default()
        };
        let member = "9:pids:/a/p.service\n8:memory:/a/p.service\n5:cpu,cpuacct:/a/p.service/worker\n\
                      3:blkio:/a/p.service\n1:name=systemd:/a/p.service\n0::/a/p.service\n";
        let read = |member: &str| Resources::read(root.path(), "/a/p.service", member);
        assert_eq!(read(member), expected);
        // The process is in another group than the unit's, whatever is said of that.
        let elsewhere = member.replace("/a/p.service", "/a/p.service2");
        assert_eq!(read(&elsewhere), Resources::default());
        let unaccounted = member.replace("pids:/a/p.service", "pids:/");
        assert_eq!(read(&unaccounted), Resources { tasks_current: None, ..expected });
    }

    #[test]
    fn uncounted_resource_is_absent() {
        for controllers in [true, false] {
            let root = tree(&[
                ("p/memory.current", "max\n"),
                ("p/cpu.stat", "nr_periods 0\n"),
                ("p/io.pressure", ""),
            ]);
            if controllers {
                std::fs::write(root.path().join("cgroup.controllers"), "").unwrap();
            }
            for group in ["/p", "/gone"] {
                let member = format!("4:memory,pids,blkio,cpuacct:{group}\n0::{group}\n");
                assert_eq!(Resources::read(root.path(), group, &member), Resources::default());
            }
        }
        // Counted, and nothing was read yet.
        let root = tree(&[("cgroup.controllers", ""), ("p/io.stat", "")]);
        assert_eq!(Resources::read(root.path(), "/p", "").io_read_bytes, Some(0));
    }
}
