//! `csid exec-helper`: the other side of [`super::exec`], in a unit of its own. It goes to where a unit's main process is,
//! runs the command there as its child, waits, and keeps how it ended. It has one thread: a process with several changes no
//! mount namespace.
//!
//! The process that is meant is held by a descriptor. What was read of it under `/proc` is its own if it is there
//! afterwards: a pid may be given again. When it ends the command is ended too, which would else hold what the
//! plugin has left.

#![expect(clippy::disallowed_types, reason = "this process is not csid: a command is all that it is for")]

use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::process::{DumpableBehavior, Pid, PidfdFlags, Signal, pidfd_open};
use rustix::thread::{
    CapabilitySet, ThreadNameSpaceType, move_into_thread_name_spaces, remove_capability_from_bounding_set,
};
use tokio::io::unix::AsyncFd;
use tokio::process::{Child, Command};
use tokio::signal::unix::{SignalKind, signal};

use crate::host::exec::{End, ExecRecord, ExecRequest};
use crate::host::sealed;

/// Exit statuses of a shell and a container's runtime for a command that did not start.
const NOT_THERE: i32 = 125;
const NOT_EXECUTABLE: i32 = 126;
const NOT_FOUND: i32 = 127;
/// The time from SIGTERM to SIGKILL of a command. It is less than the stop of its unit may take.
const GRACE: Duration = Duration::from_secs(5);
const LAST_CAPABILITY: &str = "/proc/sys/kernel/cap_last_cap";
const CGROUPS: &str = "/sys/fs/cgroup";
/// By their names below `/proc/PID/ns`.
const NAMESPACES: [(&str, ThreadNameSpaceType); 7] = [
    ("cgroup", ThreadNameSpaceType::CONTROL_GROUP),
    ("ipc", ThreadNameSpaceType::INTER_PROCESS_COMMUNICATION),
    ("mnt", ThreadNameSpaceType::MOUNT),
    ("net", ThreadNameSpaceType::NETWORK),
    ("pid", ThreadNameSpaceType::PROCESS_ID),
    ("user", ThreadNameSpaceType::USER),
    ("uts", ThreadNameSpaceType::HOST_NAME_AND_NIS_DOMAIN_NAME),
];

/// Why the command was not run. Its standard error shows this.
#[derive(Debug, thiserror::Error)]
enum EnterError {
    #[error("the plugin's process has ended")]
    Ended,
    #[error("process {pid} is not one of {unit}")]
    Another { unit: String, pid: u32 },
    #[error(
        "the plugin's process has a user namespace of its own, in which a command would be root of the host all the same"
    )]
    UserNamespace,
    #[error("{}: {source}", path.display())]
    Path { path: PathBuf, source: io::Error },
    #[error("{step}: {source}")]
    Os { step: &'static str, source: io::Error },
}

fn at<E: Into<io::Error>>(path: impl Into<PathBuf>) -> impl FnOnce(E) -> EnterError {
    move |source| EnterError::Path { path: path.into(), source: source.into() }
}

fn os<E: Into<io::Error>>(step: &'static str) -> impl FnOnce(E) -> EnterError {
    move |source| EnterError::Os { step, source: source.into() }
}

/// The name of [`HELPER`](super::exec::HELPER) when it runs from the copy.
pub const COPY: &str = "exec-helper-copy";

/// Runs the helper from a copy of this program: in the plugin's root `/proc/PID/exe` leads to that, not to the host's file.
pub fn begin(record: &Path) -> ExitCode {
    let error = sealed::run(&[COPY.as_ref(), record.as_os_str()]);
    eprintln!("csid: a copy of the program cannot be run: {error}");
    ExitCode::FAILURE
}

/// `record`: the file of the command that is to be run.
pub fn main(record: &Path) -> ExitCode {
    // Else the name would be that of a descriptor.
    let _ = rustix::thread::set_name(c"csid");
    if let Err(error) = hide() {
        eprintln!("csid: {error}");
        return ExitCode::FAILURE;
    }
    let (mut kept, request) = match Kept::take(record) {
        Ok(taken) => taken,
        Err(error) => {
            eprintln!("csid: {}: {error}", record.display());
            return ExitCode::FAILURE;
        }
    };
    let end = run(&request).unwrap_or_else(|error| {
        eprintln!("csid: {error}");
        End { exited: true, status: NOT_THERE }
    });
    kept.record.end = Some(end);
    match kept.write() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("csid: how the command ended cannot be kept: {error}");
            ExitCode::FAILURE
        }
    }
}

/// No process of the plugin's traces this one, which is the host's root among them, or reads its memory. A command is
/// not bound by it.
fn hide() -> Result<(), EnterError> {
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable).map_err(os("PR_SET_DUMPABLE"))
}

/// The command's file, by its directory's descriptor: where the helper goes no path leads to it.
struct Kept {
    directory: OwnedFd,
    name: String,
    record: ExecRecord,
}

impl Kept {
    /// Take the request out of the file, so that it is carried out once, and its arguments are kept nowhere.
    fn take(path: &Path) -> io::Result<(Kept, ExecRequest)> {
        let mut record = ExecRecord::read(path)?;
        let request = record.request.take();
        let request = request.ok_or_else(|| io::Error::other("the command was begun before"))?;
        let (Some(directory), Some(name)) = (path.parent(), path.file_name().and_then(|name| name.to_str()))
        else {
            return Err(ErrorKind::InvalidInput.into());
        };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = rustix::fs::open(directory, flags, Mode::empty())?;
        let kept = Kept { directory, name: name.to_owned(), record };
        kept.write()?;
        Ok((kept, request))
    }

    fn write(&self) -> io::Result<()> {
        let new = format!("{}.new", self.name);
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&self.directory, &new, flags, Mode::RUSR | Mode::WUSR)?;
        File::from(file).write_all(&serde_json::to_vec(&self.record)?)?;
        Ok(rustix::fs::renameat(&self.directory, &new, &self.directory, &self.name)?)
    }
}

fn run(request: &ExecRequest) -> Result<End, EnterError> {
    let place = Place::of(request)?;
    place.enter(request.directory.as_deref().unwrap_or("/"))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(os("the helper's runtime"))?.block_on(place.run(request))
}

/// The place of a process, held by descriptors.
struct Place {
    process: OwnedFd,
    root: OwnedFd,
    namespaces: ThreadNameSpaceType,
    groups: Vec<Group>,
    bounds: Bounds,
}

/// The limits of the process, which hold for the command, too: the plugin may have put the command's program there.
struct Bounds {
    /// CapBnd of `/proc/PID/status`.
    capabilities: u64,
    /// The kernel's last capability. The kernel has every one up to it, so each refusal to drop one is an error.
    last: u32,
    no_new_privileges: bool,
}

impl Bounds {
    fn of(process: &Path) -> Result<Bounds, EnterError> {
        let path = process.join("status");
        let status = std::fs::read_to_string(&path).map_err(at(&path))?;
        let last = std::fs::read_to_string(LAST_CAPABILITY).map_err(at(LAST_CAPABILITY))?;
        Bounds::read(&status, &last).ok_or_else(|| at(path)(io::Error::from(ErrorKind::InvalidData)))
    }

    /// Returns the bounds from the texts of `/proc/PID/status` and [`LAST_CAPABILITY`].
    fn read(status: &str, last: &str) -> Option<Bounds> {
        let field = |name: &str| Some(status.lines().find_map(|line| line.strip_prefix(name))?.trim());
        Some(Bounds {
            capabilities: u64::from_str_radix(field("CapBnd:")?, 16).ok()?,
            last: last.trim().parse().ok().filter(|last| *last < u64::BITS)?,
            no_new_privileges: field("NoNewPrivs:")? == "1",
        })
    }

    /// Sets the limits of this thread, and of the processes that it starts from now on.
    fn set(&self) -> Result<(), EnterError> {
        let dropped = (0..=self.last).map(|bit| 1 << bit).filter(|bit| self.capabilities & bit == 0);
        for bit in dropped {
            remove_capability_from_bounding_set(CapabilitySet::from_bits_retain(bit))
                .map_err(os("the plugin's capabilities"))?;
        }
        if self.no_new_privileges {
            rustix::thread::set_no_new_privs(true).map_err(os("NoNewPrivileges"))?;
        }
        Ok(())
    }
}

/// A control group in which the process is and the helper is not: `cgroup.procs` of both.
struct Group {
    theirs: File,
    own: File,
}

impl Place {
    fn of(request: &ExecRequest) -> Result<Place, EnterError> {
        let pid = i32::try_from(request.pid).ok().and_then(Pid::from_raw).ok_or(EnterError::Ended)?;
        let process = match pidfd_open(pid, PidfdFlags::empty()) {
            Err(rustix::io::Errno::SRCH) => return Err(EnterError::Ended),
            opened => opened.map_err(os("pidfd_open"))?,
        };
        let directory = PathBuf::from(format!("/proc/{}", request.pid));
        let read = || {
            let root = directory.join("root");
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
            let root = rustix::fs::open(&root, flags, Mode::empty()).map_err(at(root))?;
            Ok((root, namespaces(&directory)?, groups(&directory, request)?, Bounds::of(&directory)?))
        };
        let read = read();
        if has_ended(&process)? {
            return Err(EnterError::Ended);
        }
        let (root, namespaces, groups, bounds) = read?;
        if namespaces.contains(ThreadNameSpaceType::USER) {
            return Err(EnterError::UserNamespace);
        }
        Ok(Place { process, root, namespaces, groups, bounds })
    }

    fn enter(&self, directory: &str) -> Result<(), EnterError> {
        if !self.namespaces.is_empty() {
            move_into_thread_name_spaces(self.process.as_fd(), self.namespaces)
                .map_err(os("the plugin's namespaces"))?;
        }
        rustix::process::fchdir(&self.root).map_err(os("the plugin's root"))?;
        rustix::process::chroot(".").map_err(os("the plugin's root"))?;
        rustix::process::chdir(directory).map_err(at(directory))
    }

    /// The command, to its end.
    async fn run(self, request: &ExecRequest) -> Result<End, EnterError> {
        let mut hang_up = signal(SignalKind::hangup()).map_err(os("SIGHUP"))?;
        let mut terminate = signal(SignalKind::terminate()).map_err(os("SIGTERM"))?;
        // A terminal's keys reach both; they are for the command.
        let _interrupt = signal(SignalKind::interrupt()).map_err(os("SIGINT"))?;
        let _quit = signal(SignalKind::quit()).map_err(os("SIGQUIT"))?;
        #[expect(deprecated, reason = "safe for an OwnedFd; what replaces it is unsafe for every type")]
        let process = AsyncFd::new(self.process).map_err(os("the plugin's process"))?;

        let own_group = !rustix::termios::isatty(io::stdin());
        let mut child = match spawn(request, own_group, &self.groups, &self.bounds)? {
            Ok(child) => child,
            Err(error) => {
                eprintln!("csid: {}: {error}", request.argv[0]);
                let status = if error.kind() == ErrorKind::NotFound { NOT_FOUND } else { NOT_EXECUTABLE };
                return Ok(End { exited: true, status });
            }
        };
        let pid = child.id().and_then(|pid| i32::try_from(pid).ok()).and_then(Pid::from_raw);
        let tell = |signal: Signal| {
            // A process that has just ended gets no signal.
            let _ = match (pid, own_group) {
                (Some(pid), true) => rustix::process::kill_process_group(pid, signal),
                (Some(pid), false) => rustix::process::kill_process(pid, signal),
                (None, _) => Ok(()),
            };
        };
        loop {
            tokio::select! {
                biased;
                ended = child.wait() => return end(ended),
                _ = process.readable() => break,
                _ = terminate.recv() => break,
                _ = hang_up.recv() => tell(Signal::HUP),
            }
        }
        tell(Signal::TERM);
        tell(Signal::CONT);
        if let Ok(ended) = tokio::time::timeout(GRACE, child.wait()).await {
            return end(ended);
        }
        tell(Signal::KILL);
        end(child.wait().await)
    }
}

/// The inner error: the program cannot be run.
fn spawn(
    request: &ExecRequest,
    own_group: bool,
    groups: &[Group],
    bounds: &Bounds,
) -> Result<io::Result<Child>, EnterError> {
    let Some((program, arguments)) = request.argv.split_first() else {
        return Err(EnterError::Os { step: "argv", source: ErrorKind::InvalidInput.into() });
    };
    let mut command = Command::new(program);
    command.args(arguments).env_clear();
    for name in ["PATH", "LANG"] {
        command.envs(std::env::var_os(name).map(|value| (name, value)));
    }
    if own_group {
        // With all that it starts, as far as that stays together.
        command.process_group(0);
    } else {
        command.env("TERM", "xterm");
    }
    command.envs(&request.environment);
    // A child begins where its parent is; the helper's own unit keeps the helper.
    let enter = |mut file: &File| file.write_all(b"0").map_err(os("the plugin's control group"));
    groups.iter().try_for_each(|group| enter(&group.theirs))?;
    let child = bounds.set().map(|()| command.spawn());
    groups.iter().try_for_each(|group| enter(&group.own))?;
    child
}

fn end(ended: io::Result<std::process::ExitStatus>) -> Result<End, EnterError> {
    let status = ended.map_err(os("the command's end"))?;
    Ok(match status.code() {
        Some(status) => End { exited: true, status },
        None => End { exited: false, status: status.signal().unwrap_or_default() },
    })
}

fn has_ended(process: &OwnedFd) -> Result<bool, EnterError> {
    let mut fds = [PollFd::new(process, PollFlags::IN)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    Ok(poll(&mut fds, Some(&now)).map_err(os("the plugin's process"))? > 0)
}

/// Returns the namespaces of the process that differ from the helper's. The kernel lets none be entered twice.
fn namespaces(process: &Path) -> Result<ThreadNameSpaceType, EnterError> {
    let mut differ = ThreadNameSpaceType::empty();
    for (name, kind) in NAMESPACES {
        let of = |process: &Path| {
            let path = process.join("ns").join(name);
            let file = std::fs::metadata(&path).map_err(at(path))?;
            Ok((file.dev(), file.ino()))
        };
        if of(process)? != of(Path::new("/proc/self"))? {
            differ |= kind;
        }
    }
    Ok(differ)
}

fn groups(process: &Path, request: &ExecRequest) -> Result<Vec<Group>, EnterError> {
    let text = |process: &Path| {
        let path = process.join("cgroup");
        std::fs::read_to_string(&path).map_err(at(path))
    };
    let (theirs, own) = (text(process)?, text(Path::new("/proc/self"))?);
    if !is_within(&theirs, &request.group) {
        return Err(EnterError::Another { unit: request.unit.clone(), pid: request.pid });
    }
    let open = |path: PathBuf| File::options().write(true).open(&path).map_err(at(path));
    let root = Path::new(CGROUPS);
    let pairs = differing(&theirs, &own).map(|(controllers, theirs, own)| {
        let group = |group: &str| open(procs(root, controllers, group));
        Ok(Group { theirs: group(theirs)?, own: group(own)? })
    });
    pairs.collect()
}

/// Whether this `/proc/PID/cgroup` is of a process in `group`, or in one below it, in systemd's own hierarchy.
pub(super) fn is_within(theirs: &str, group: &str) -> bool {
    let of =
        |controllers: &str| theirs.lines().find_map(|line| line.split_once(':')?.1.strip_prefix(controllers));
    let theirs = of("name=systemd:").or_else(|| of(":")).and_then(|theirs| theirs.strip_prefix(group));
    group.len() > 1 && theirs.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// Returns the hierarchies in which two processes are in different groups. The texts are their `/proc/PID/cgroup`, with lines
/// `ID:CONTROLLERS:GROUP`.
fn differing<'t>(theirs: &'t str, own: &'t str) -> impl Iterator<Item = (&'t str, &'t str, &'t str)> {
    let split = |line: &'t str| {
        let (_, rest) = line.split_once(':')?;
        rest.split_once(':')
    };
    theirs.lines().filter_map(split).filter_map(move |(controllers, group)| {
        let own = own.lines().filter_map(split).find(|(of, _)| *of == controllers)?.1;
        (own != group).then_some((controllers, group, own))
    })
}

/// Returns the file `cgroup.procs` of a group, where systemd mounts its hierarchy. Version 2 names no controllers; version 1 has a
/// link for each.
fn procs(root: &Path, controllers: &str, group: &str) -> PathBuf {
    let hierarchy = match controllers.split(',').next().unwrap_or_default() {
        "" if root.join("cgroup.controllers").exists() => root.to_owned(),
        "" => root.join("unified"),
        first => root.join(first.strip_prefix("name=").unwrap_or(first)),
    };
    hierarchy.join(group.trim_start_matches('/')).join("cgroup.procs")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_bounds_are_read() {
        let status = "Name:\tp\nCapEff:\t000001ffffffffff\nCapBnd:\t0000000000200001\nNoNewPrivs:\t1\n";
        let bounds = Bounds::read(status, "40\n").unwrap();
        assert_eq!((bounds.capabilities, bounds.no_new_privileges), (1 << 21 | 1, true));
        assert_eq!(bounds.last, 40);
        assert!(Bounds::read("Name:\tp\n", "40\n").is_none());
        assert!(Bounds::read(status, "").is_none() && Bounds::read(status, "64\n").is_none());
    }

    #[test]
    fn undroppable_capability_is_an_error() {
        let set = |change: fn(&mut Bounds)| {
            // A bounding set is a thread's.
            let thread = std::thread::spawn(move || {
                let mut bounds = Bounds::of(Path::new("/proc/thread-self")).unwrap();
                bounds.no_new_privileges = false;
                change(&mut bounds);
                let set = bounds.set();
                (set.map_err(|error| error.to_string()), Bounds::of(Path::new("/proc/thread-self")).unwrap())
            });
            thread.join().unwrap()
        };
        let (dropped, after) = set(|bounds| bounds.capabilities = 1 << 21);
        dropped.unwrap();
        assert_eq!(after.capabilities, 1 << 21);
        // The kernel answers EINVAL for a number that it takes for none of its own.
        let (refused, _) = set(|bounds| (bounds.capabilities, bounds.last) = (!0 >> 1, 63));
        assert!(refused.unwrap_err().contains("capabilities"));
    }

    #[test]
    fn a_process_enters_the_groups_that_it_is_not_in() {
        let theirs = "5:cpu,cpuacct:/system.slice/p.service\n2:freezer:/\n1:name=systemd:/system.slice/p.service\n0::/system.slice/p.service";
        let own = "5:cpu,cpuacct:/system.slice\n2:freezer:/\n1:name=systemd:/system.slice/x.service\n0::/system.slice/x.service";
        let root = Path::new("/none");
        let files: Vec<String> = differing(theirs, own)
            .map(|(controllers, theirs, _)| procs(root, controllers, theirs).display().to_string())
            .collect();
        let wanted = ["cpu", "systemd", "unified"]
            .map(|hierarchy| format!("/none/{hierarchy}/system.slice/p.service/cgroup.procs"));
        assert_eq!(files, wanted);
    }

    #[test]
    fn unit_process_is_matched_by_whole_cgroup() {
        let driver = "/system.slice/driver.service";
        let within = |group: &str| {
            let hybrid = format!("2:freezer:{driver}\n1:name=systemd:{group}\n0::/x\n");
            let both = [is_within(&hybrid, driver), is_within(&format!("0::{group}\n"), driver)];
            assert_eq!(both[0], both[1], "{group}");
            both[0]
        };
        assert!(within(driver) && within(&format!("{driver}/supervisor")));
        for other in
            ["/", "/system.slice", "/user.slice/u.service/driver.service", "/system.slice/driver.services"]
        {
            assert!(!within(other), "{other}");
        }
        assert!(!within(&format!("/user.slice{driver}")));
        assert!(!is_within("0::/system.slice/x.service\n", "") && !is_within("0::/x\n", "/"));
    }

    #[test]
    fn the_helpers_memory_is_nobodys_to_read() {
        hide().unwrap();
        let behaviour = rustix::process::dumpable_behavior().unwrap();
        assert_eq!(behaviour, DumpableBehavior::NotDumpable);
    }

    fn request(directory: &Path) -> PathBuf {
        let record = ExecRecord {
            plugin: "p".into(),
            uid: 0,
            terminal: None,
            request: Some(ExecRequest {
                unit: "no-such.service".into(),
                group: "/system.slice/no-such.service".into(),
                pid: std::process::id(),
                argv: vec!["c4n4ry".into()],
                environment: Default::default(),
                directory: None,
            }),
            end: None,
        };
        let path = directory.join("csi-exec-0.json");
        std::fs::write(&path, serde_json::to_vec(&record).unwrap()).unwrap();
        path
    }

    #[test]
    fn request_is_read_once_and_arguments_are_not_kept() {
        let directory = tempfile::tempdir().unwrap();
        let path = request(directory.path());
        let (mut kept, request) = Kept::take(&path).unwrap();
        assert_eq!(request.argv, ["c4n4ry"]);
        assert!(!std::fs::read_to_string(&path).unwrap().contains("c4n4ry"));
        assert!(Kept::take(&path).is_err());
        kept.record.end = Some(End { exited: false, status: 9 });
        kept.write().unwrap();
        assert_eq!(ExecRecord::read(&path).unwrap().end, Some(End { exited: false, status: 9 }));
        assert_eq!(std::fs::read_dir(&directory).unwrap().count(), 1);
    }

    #[test]
    fn a_process_of_another_unit_is_not_entered() {
        let directory = tempfile::tempdir().unwrap();
        let (_, request) = Kept::take(&request(directory.path())).unwrap();
        let refused = Place::of(&request).err().expect("it is this process");
        assert!(matches!(refused, EnterError::Another { .. }), "{refused}");
    }
}
