//! Consumers in mount namespaces of their own, each a real process: it says when its mounts are made, and has them until it is
//! dropped.

use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};

use crate::world::child;

/// A Perl program that tries, as the user that runs it, what a volume's content may not do in `$ARGV[0]`, which has the files of
/// [`give_probes`]. It prints a line for each: the uid of a set-uid program, and how the rest ended.
pub const PROBE: &str = r#"
my $at = $ARGV[0];
chomp(my $uid = `"$at/id" -u`);
print "setuid: $uid\n";
for my $node ("character", "block") {
    my ($file, $byte);
    print "$node: ", open($file, "<", "$at/$node") && sysread($file, $byte, 1) ? "read" : $!, "\n";
}
print "write: ", open(my $file, ">", "$at/written") ? "written" : $!, "\n";
"#;

/// The output of [`PROBE`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Probe {
    setuid: String,
    character: String,
    block: String,
    write: String,
}

impl Probe {
    pub fn of(printed: &str) -> Self {
        let ended = |what: &str| {
            let found = printed.lines().find_map(|line| line.strip_prefix(what)?.strip_prefix(": "));
            found.unwrap_or_else(|| panic!("no {what} in {printed}")).to_owned()
        };
        let [setuid, character, block, write] = ["setuid", "character", "block", "write"].map(ended);
        Probe { setuid, character, block, write }
    }

    /// Returns what `nobody` gets of a read-only mount: its own uid, and errors.
    pub fn refused() -> Self {
        let [setuid, node] = ["65534", "Permission denied"].map(str::to_owned);
        Probe { setuid, character: node.clone(), block: node, write: "Read-only file system".to_owned() }
    }

    /// Returns what `nobody` gets where nothing is forbidden.
    pub fn permitted() -> Self {
        let [setuid, node, write] = ["0", "read", "written"].map(str::to_owned);
        Probe { setuid, character: node.clone(), block: node, write }
    }

    /// Returns the same of a mount that is not read-only.
    pub fn writes(self) -> Self {
        Probe { write: Probe::permitted().write, ..self }
    }

    /// Returns how many of the four tries were refused.
    pub fn refusals(&self) -> usize {
        let all = Probe::permitted();
        let tries = [
            (&self.setuid, &all.setuid),
            (&self.character, &all.character),
            (&self.block, &all.block),
            (&self.write, &all.write),
        ];
        tries.iter().filter(|(ended, permitted)| ended != permitted).count()
    }
}

/// Gives a volume the files of [`PROBE`]: a set-uid program, and nodes of /dev/zero and of `disk` that everybody may read.
pub fn give_probes(volume: &Path, disk: &Path) {
    let program = volume.join("id");
    fs::copy("/usr/bin/id", &program).unwrap();
    fs::set_permissions(&program, Permissions::from_mode(0o4755)).unwrap();
    let disk = fs::metadata(disk).unwrap().rdev();
    for (name, kind, device) in
        [("character", FileType::CharacterDevice, makedev(1, 5)), ("block", FileType::BlockDevice, disk)]
    {
        let node = volume.join(name);
        mknodat(CWD, &node, kind, Mode::from_raw_mode(0o666), device).unwrap();
        fs::set_permissions(&node, Permissions::from_mode(0o666)).unwrap();
    }
    fs::set_permissions(volume, Permissions::from_mode(0o1777)).unwrap();
}

/// A process in a mount namespace of its own.
pub struct Consumer {
    process: Child,
}

impl Consumer {
    /// A namespace whose copies of the host's mounts have this propagation: `private`, `slave` or `unchanged`.
    pub fn copy(propagation: &str) -> Self {
        Self::after(propagation, "", &[])
    }

    /// As a container's runtime does: `source` is bound at `target`, whose propagation is then `how` (`private`, `rslave`), in a
    /// namespace that receives the host's mounts and unmounts.
    pub fn bind(source: &Path, target: &Path, how: &str) -> Self {
        let script = r#"mount --bind "$1" "$2" && mount --make-"$3" "$2""#;
        Self::after("slave", script, &[source.as_os_str(), target.as_os_str(), how.as_ref()])
    }

    /// A private bind of `source` at `target` whose process goes on writing: each 10 ms a byte more in the volume's file `elsewhere`.
    pub fn writer(source: &Path, target: &Path) -> Self {
        let script = r#"mount --bind "$1" "$2" && mount --make-private "$2"
            exec perl -e 'open my $file, ">>", "$ARGV[0]/elsewhere" or die; syswrite STDOUT, "ready\n";
                while (1) { syswrite $file, "x" or die; select undef, undef, undef, 0.01 }' "$2""#;
        Self::after("slave", script, &[source.as_os_str(), target.as_os_str()])
    }

    /// An overlay at `target` whose upper directory is on `source`; the directory `lower` is below it.
    pub fn overlay(source: &Path, lower: &Path, target: &Path) -> Self {
        let script = r#"mkdir -p "$1"/upper "$1"/work &&
            mount -t overlay overlay -o lowerdir="$2",upperdir="$1"/upper,workdir="$1"/work "$3""#;
        Self::after("slave", script, &[source.as_os_str(), lower.as_os_str(), target.as_os_str()])
    }

    /// A container with file systems of its own at `place`, enough to get the lowest numbers that are free.
    pub fn with_tmpfs(place: &Path) -> Self {
        let script = r#"for i in 1 2 3 4 5 6 7 8; do mount -t tmpfs tmpfs "$1"; done"#;
        Self::after("slave", script, &[place.as_os_str()])
    }

    /// A service with `PrivateTmp=`: its namespace receives the host's mounts and unmounts, and it works in `directory`.
    pub fn working_in(directory: &Path) -> Self {
        Self::after("slave", r#"cd "$1""#, &[directory.as_os_str()])
    }

    /// A process that works in `directory`, in csid's own namespace until it [leaves](Self::leave).
    pub fn before_it_leaves(directory: &Path) -> Self {
        let script =
            r#"cd "$1" && echo ready && read line && exec unshare --mount --propagation private sleep 3600"#;
        let mut command = child(Path::new("sh"));
        command.args(["-c", script, "sh"]).arg(directory).stdin(Stdio::piped());
        Self::started(command)
    }

    /// Has a process [that works in csid's namespace](Self::before_it_leaves) leave it for a private copy.
    pub fn leave(&mut self) {
        self.process.stdin.take().expect("it has not left").write_all(b"\n").expect("it runs");
    }

    fn after(propagation: &str, script: &str, arguments: &[&std::ffi::OsStr]) -> Self {
        let script = format!("set -e\ncd /\n{script}\necho ready\nexec sleep 3600");
        let mut command = child(Path::new("unshare"));
        command.args(["--mount", "--propagation", propagation, "sh", "-c", &script, "sh"]).args(arguments);
        Self::started(command)
    }

    /// Starts the process, and waits until it is ready.
    fn started(mut command: Command) -> Self {
        let mut process = command.stdout(Stdio::piped()).spawn().expect("a consumer");
        let mut line = String::new();
        let said = BufReader::new(process.stdout.take().expect("its output")).read_line(&mut line);
        assert!(said.is_ok() && line == "ready\n", "the consumer did not come to be: {line:?}");
        Consumer { process }
    }

    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Returns the process's own mount table.
    pub fn mounts(&self) -> String {
        fs::read_to_string(format!("/proc/{}/mountinfo", self.pid())).expect("it runs")
    }

    /// Returns the uid that `id` prints when `nobody` runs it in this directory of the consumer's namespace. `None`: the directory
    /// cannot be reached.
    pub fn run_as_nobody(&self, directory: &Path) -> Option<u32> {
        let mut command = child(Path::new("nsenter"));
        command.arg(format!("--mount=/proc/{}/ns/mnt", self.pid()));
        command.args(["--setuid=65534", "--setgid=65534", "--"]);
        let ran = command.arg(directory.join("id")).arg("-u").output().expect("nsenter");
        let said = String::from_utf8_lossy(&ran.stderr).into_owned();
        assert!(ran.status.success() || said.contains("Permission denied"), "{said}");
        ran.status.success().then(|| String::from_utf8_lossy(&ran.stdout).trim().parse().expect("a uid"))
    }

    /// Ends the process, and with it its namespace.
    pub fn end(self) {
        drop(self);
    }
}

impl Drop for Consumer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
