//! A booted machine, thrown away with this value.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::process::{Pid, Signal, kill_process};

static NEXT: AtomicU32 = AtomicU32::new(0);

pub struct Machine {
    dir: PathBuf,
}

fn container(dir: &Path, arguments: &[&str]) -> Output {
    let tool = Path::new(env!("CARGO_MANIFEST_DIR")).join("container");
    let verb = arguments[0];
    // Nothing here takes longer; what hangs is ended.
    Command::new("timeout")
        .args(["--kill-after=10", "180"])
        .arg(tool)
        .arg(verb)
        .arg(dir)
        .args(&arguments[1..])
        .output()
        .expect("tests/container")
}

/// Returns the path of a thing that `make test` makes once for a machine, and not for each target directory.
pub fn cached(name: &str) -> PathBuf {
    let cache = std::env::var_os("XDG_CACHE_HOME").filter(|path| !path.is_empty()).map(PathBuf::from);
    let home = std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache"));
    let path = cache.or(home).expect("a home").join("csid-tests").join(name);
    assert!(path.exists(), "{} is missing: make cfgd-csi machine-packages", path.display());
    path
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).trim_end().to_owned()
}

impl Machine {
    pub fn boot() -> Self {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("csid-system-{}-{number}", std::process::id()));
        let machine = Machine { dir };
        let up = container(&machine.dir, &["up"]);
        assert!(up.status.success(), "no machine: {}", text(&up.stderr));
        machine
    }

    /// With the package installed, as `dpkg --install` leaves it.
    pub fn with_csid() -> Self {
        let machine = Machine::boot();
        machine.install();
        machine.run("systemctl is-active csid");
        machine
    }

    pub fn install(&self) {
        self.install_package("csid");
    }

    pub fn install_package(&self, name: &str) {
        self.copy_package(name);
        self.run(&format!("dpkg --install /root/{name}.deb"));
    }

    /// Copies a package of target/ into /root.
    pub fn copy_package(&self, name: &str) {
        let deb = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../target/{name}.deb"));
        assert!(deb.exists(), "{} is missing: make deb PROFILE=dev", deb.display());
        std::fs::copy(deb, self.path(&format!("/root/{name}.deb"))).expect("the package is copied");
    }

    /// Has Debian's packages at hand, as a network would: what `make machine-packages` has downloaded.
    pub fn with_archive(&self) {
        let files = std::fs::read_dir(cached("debs")).expect("make machine-packages");
        for file in files {
            let file = file.expect("a file");
            let to = self.path("/var/cache/apt/archives").join(file.file_name());
            std::fs::copy(file.path(), to).expect("a package is copied");
        }
        // A Debian made for containers deletes what it has installed. Nobody answers a question here.
        self.run("rm -f /etc/apt/apt.conf.d/docker-clean");
        self.write(
            "/etc/apt/apt.conf.d/90machine",
            "APT::Get::Assume-Yes \"true\";\nAPT::Install-Recommends \"false\";\nAPT::Sandbox::User \"root\";\n\
             DPkg::Options { \"--force-unsafe-io\"; };\nDPkg::Use-Pty \"false\";\n",
        );
    }

    /// A path in the machine, seen from here.
    pub fn path(&self, inside: &str) -> PathBuf {
        self.dir.join("root").join(inside.trim_start_matches('/'))
    }

    pub fn write(&self, inside: &str, content: &str) {
        std::fs::write(self.path(inside), content).expect("a file in the machine");
    }

    /// Writes a program. The file that runs is a copy: the kernel refuses to run one that is open for writing, and a process that
    /// another test has just started may still have the written one open.
    pub fn write_program(&self, inside: &str, content: &str) {
        self.write("/root/program", content);
        self.run(&format!("install -D -m 755 /root/program {inside}"));
    }

    pub fn try_run(&self, command: &str) -> Output {
        container(&self.dir, &["exec", "bash", "-c", command])
    }

    /// Runs a command, which has to succeed. Returns its output.
    pub fn run(&self, command: &str) -> String {
        let output = self.try_run(command);
        assert!(
            output.status.success(),
            "{command}: {}\n{}\n{}",
            output.status,
            text(&output.stdout),
            text(&output.stderr)
        );
        text(&output.stdout)
    }

    /// The bytes that a command writes.
    pub fn bytes(&self, command: &str) -> Vec<u8> {
        let output = self.try_run(command);
        assert!(output.status.success(), "{command}: {}", text(&output.stderr));
        output.stdout
    }

    /// Runs a command until it succeeds, for at most 30 seconds. A failure shows its last output and the end of the journal.
    pub fn until(&self, command: &str) {
        let poll = format!(
            "for i in {{1..300}}; do if last=$({{ {command}; }} 2>&1); then exit; fi; sleep 0.1; done; \
             echo \"$last\"; journalctl --no-pager --output short-precise --lines 60; exit 1"
        );
        let output = self.try_run(&poll);
        let (said, failed) = (text(&output.stdout), text(&output.stderr));
        assert!(output.status.success(), "in 30 s not: {command}\n{failed}\n{said}");
    }

    /// Fails if units are ordered in a cycle. The journal has the cycles of a shutdown and of later transactions.
    pub fn has_no_ordering_cycle(&self) {
        let journal = self.run("journalctl --no-pager --merge | grep -A3 'ordering cycle' || true");
        assert_eq!((journal, self.cycles_of_boot()), (String::new(), String::new()));
    }

    /// Returns the ordering cycles of the next boot, with their units: systemd begins at any of them. It finds them before journald runs, so no
    /// journal has those of the last one.
    pub fn cycles_of_boot(&self) -> String {
        let verify = "systemd-analyze --generators=yes --man=no verify multi-user.target";
        self.run(&format!("{verify} 2>&1 | grep -E 'ordering cycle|Found dependency' || true"))
    }

    /// Returns how many milliseconds the last start of a unit took.
    pub fn start_time(&self, unit: &str) -> usize {
        let stamp = |property: &str| -> usize {
            let micros = self.run(&format!("systemctl show {unit} --property {property}Monotonic --value"));
            micros.parse().expect("microseconds")
        };
        let (from, to) = (stamp("InactiveExitTimestamp"), stamp("ActiveEnterTimestamp"));
        assert!(from > 0 && to > from, "{unit} did not start");
        (to - from) / 1000
    }

    /// Reboots in order. PID 1 reads the mount table up to a second late after many changes. It stops no unit whose mount it has not seen
    /// yet, so this waits until PID 1 has seen each mount.
    pub fn reboot(&self) {
        let mounted = "awk '!/ - autofs / && $5 ~ \"^/(var/lib/csid|srv)/\" { print $5 }' /proc/1/mountinfo";
        let units =
            "xargs --no-run-if-empty systemd-escape --path --suffix mount | tr ' ' '\\n' | sort --unique";
        let seen =
            "systemctl list-units --plain --no-legend --type mount --state active | cut -d ' ' -f 1 | sort";
        self.until(&format!("! comm -23 <({mounted} | {units}) <({seen}) | grep ."));
        let output = container(&self.dir, &["reboot"]);
        assert!(output.status.success(), "no reboot: {}", text(&output.stderr));
    }

    pub fn kill(&self) {
        let output = container(&self.dir, &["kill"]);
        assert!(output.status.success(), "no kill: {}", text(&output.stderr));
    }

    /// Sends PID 1 a signal.
    pub fn signal(&self, signal: Signal) {
        let pid: i32 = text(&container(&self.dir, &["pid"]).stdout).parse().expect("it runs");
        kill_process(Pid::from_raw(pid).expect("a process"), signal).expect("a signal");
    }

    /// The loop devices that hold files of this machine.
    pub fn loops(&self) -> String {
        text(&container(&self.dir, &["loops"]).stdout)
    }

    /// Returns mounts, paths and rows that a volume could leave. csid's own tmpfs with its directories of volumes stays until a reboot.
    /// PID 1 reads the mount table a few times a second at most, so this waits until PID 1 knows of the last unmount.
    pub fn inventory(&self) -> String {
        self.until(
            "for unit in $(systemctl list-units --plain --no-legend --type mount '*csid*' | cut -d ' ' -f 1); do
                 mountpoint --quiet \"$(systemctl show --property Where --value \"$unit\")\" || exit 1
             done",
        );
        self.run(
            "awk '!/ - tmpfs csid-live / { print $5 }' /proc/self/mountinfo | grep -E '/var/lib/csi|/srv' || true
             find /var/lib/csid/plugins -mindepth 3 2>/dev/null | grep -vE '/live/(staging|private|publish)$' || true
             find /var/lib/csi-local -type f -name '*image*' 2>/dev/null || true
             csictl mounts --json
             systemctl list-units --plain --no-legend --type mount '*csid*' | grep -v -e '-live.mount ' || true",
        )
    }

    /// Returns how many mounts of volumes are below the plugins' roots.
    pub fn volumes_below_roots(&self) -> String {
        self.run("grep /var/lib/csid/plugins/ /proc/1/mountinfo | grep -vc ' - tmpfs csid-live ' || true")
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let log = self.try_run("journalctl --no-pager -n 100 -u csid -u csid.socket -u 'csi-plugin-*'");
            eprintln!("---- the machine's journal\n{}", text(&log.stdout));
        }
        let down = container(&self.dir, &["down"]);
        if !down.status.success() {
            eprintln!("{} is still there: {}", self.dir.display(), text(&down.stderr));
        }
    }
}
