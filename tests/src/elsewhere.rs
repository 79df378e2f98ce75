//! Consumers in mount namespaces of their own, each a real process: it says when its mounts are made, and has them until it is
//! dropped.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Stdio};

use crate::world::child;

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

    /// A service with `PrivateTmp=`: its namespace receives the host's mounts and unmounts, and it works in `directory`.
    pub fn working_in(directory: &Path) -> Self {
        Self::after("slave", r#"cd "$1""#, &[directory.as_os_str()])
    }

    fn after(propagation: &str, script: &str, arguments: &[&std::ffi::OsStr]) -> Self {
        let script = format!("set -e\ncd /\n{script}\necho ready\nexec sleep 3600");
        let mut command = child(Path::new("unshare"));
        command.args(["--mount", "--propagation", propagation, "sh", "-c", &script, "sh"]).args(arguments);
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
        std::fs::read_to_string(format!("/proc/{}/mountinfo", self.pid())).expect("it runs")
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
