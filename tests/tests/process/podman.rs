//! Podman containers that mount a volume. The containers are Podman's and crun's own; their image is one static program.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use csid_client::{AccessMode, Kind, MountOptions, ReleaseOptions};
use csid_tests::ask::*;
use csid_tests::elsewhere::{PROBE, Probe, give_probes};
use csid_tests::kernel;
use csid_tests::world::{World, count, eventually, refusal, world};
use rustix::mount::{MountFlags, UnmountFlags, mount as mount_at, unmount as unmount_at};

/// Podman with its storage and its state in a world's directory. Dropping it removes its containers.
struct Podman {
    directory: PathBuf,
}

/// A container that runs.
struct Container {
    name: &'static str,
    /// Its first process, as the host numbers it.
    pid: u32,
}

impl Container {
    /// Whether its mount namespace shows a mount whose path ends with this.
    fn shows(&self, end: &Path) -> bool {
        let table = fs::read_to_string(format!("/proc/{}/mountinfo", self.pid)).expect("it runs");
        table.lines().filter_map(|line| line.split(' ').nth(4)).any(|path| Path::new(path).ends_with(end))
    }
}

impl Podman {
    fn new(w: &World) -> Self {
        let directory = w.path("podman");
        fs::create_dir(&directory).unwrap();
        // Podman's package does not make it: its first run does.
        fs::create_dir_all("/var/lib/containers").unwrap();
        let mounts = [
            // crun 1.8 refuses a host with both versions of control groups.
            ("cgroup2", Path::new("/sys/fs/cgroup")),
            // Podman keeps a cache here, wherever its storage is.
            ("tmpfs", Path::new("/var/lib/containers")),
            // crun makes private what a container's root is on; the other mounts are not to be.
            ("tmpfs", &directory),
        ];
        for (kind, path) in mounts {
            mount_at(kind, path, kind, MountFlags::empty(), None).expect(kind);
        }
        let image = directory.join("image");
        fs::create_dir_all(image.join("bin")).unwrap();
        fs::create_dir(directory.join("tmp")).unwrap();
        fs::copy("/bin/busybox", image.join("bin/busybox")).expect("busybox-static is installed");
        for applet in ["sh", "sleep"] {
            symlink("busybox", image.join("bin").join(applet)).unwrap();
        }
        // For programs of the host, where its /usr is a volume.
        for libraries in ["lib", "lib64"] {
            symlink(Path::new("usr").join(libraries), image.join(libraries)).unwrap();
        }
        let archive = directory.join("image.tar");
        let packed = Command::new("tar").arg("-C").arg(&image).arg("-cf").arg(&archive).arg(".").status();
        assert!(packed.expect("tar").success());
        let podman = Podman { directory };
        podman.says(&["import", "--quiet", archive.to_str().unwrap(), "csid-test"]);
        podman
    }

    fn call(&self, arguments: &[&str]) -> Output {
        let at = |name: &str| self.directory.join(name);
        let path = std::env::var_os("PATH").unwrap_or_default();
        let mut command = Command::new("podman");
        command.env_clear().env("PATH", path).env("TMPDIR", at("tmp"));
        command
            .arg("--root")
            .arg(at("storage"))
            .arg("--runroot")
            .arg(at("run"))
            .arg("--tmpdir")
            .arg(at("libpod"));
        command.args(["--storage-driver", "vfs", "--cgroup-manager", "cgroupfs", "--events-backend", "none"]);
        let state = format!("root={}", at("crun").display());
        command.args(["--runtime", "crun", "--runtime-flag", &state]).args(arguments);
        command.output().expect("podman is installed")
    }

    fn says(&self, arguments: &[&str]) -> String {
        let output = self.call(arguments);
        assert!(output.status.success(), "podman {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("UTF-8").trim_end().to_owned()
    }

    /// A container with this volume (`PATH:PATH[:OPTIONS]`) that runs `script`, then sleeps.
    fn run(&self, name: &'static str, volume: &str, script: &str) -> Container {
        self.run_with(name, &[volume], script)
    }

    fn run_with(&self, name: &'static str, volumes: &[&str], script: &str) -> Container {
        let script = format!("{script}\nexec sleep 600");
        let run = ["run", "--detach", "--name", name, "--network", "none", "--cgroups", "disabled"];
        // More than some test environments permit is Podman's default.
        let limits = ["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024"];
        let volumes: Vec<&str> = volumes.iter().flat_map(|volume| ["--volume", volume]).collect();
        let rest = ["csid-test", "sh", "-e", "-c", &script];
        self.says(&[&run[..], &limits, &volumes, &rest].concat());
        let pid = self.says(&["inspect", name, "--format", "{{.State.Pid}}"]);
        Container { name, pid: pid.parse().expect("a pid") }
    }

    /// Runs [`PROBE`] as `nobody` in the container, on this directory there.
    fn probe(&self, container: &Container, directory: &str) -> Probe {
        let run = ["exec", "--user", "65534:65534", container.name, "/usr/bin/perl", "-e", PROBE, directory];
        Probe::of(&self.says(&run))
    }

    fn end(&self, container: &Container) {
        self.says(&["rm", "--force", "--time", "0", container.name]);
    }
}

impl Drop for Podman {
    fn drop(&mut self) {
        let _ = self.call(&["rm", "--force", "--time", "0", "--all"]);
        let _ = unmount_at(&self.directory, UnmountFlags::DETACH);
    }
}

#[test]
fn volume_is_busy_while_a_container_has_it() {
    world(async |w| {
        let client = running(w).await;
        let podman = Podman::new(w);
        registered(&client, "v", &[AccessMode::SingleNodeWriter]).await;
        client.claim(NAMESPACE, "v", "job", Default::default()).await.unwrap();
        let mut refused = 0;
        for call in ["unmount", "release"] {
            let mounted = client.mount(NAMESPACE, "v", "job", MountOptions::default()).await.unwrap();
            let source = PathBuf::from(mounted.source);
            let volume = format!("{}:/data", source.display());
            let container = podman.run("job", &volume, "echo written >/data/file");
            let written = || fs::read_to_string(source.join("file")).unwrap_or_default() == "written\n";
            eventually("the container writes", async || written()).await;
            let asked = async || match call {
                "unmount" => unmount(&client, "v", "job").await,
                _ => client.release(NAMESPACE, "v", "job", ReleaseOptions::default()).await,
            };
            let removals = |w: &mut World| {
                ["NodeUnpublishVolume", "NodeUnstageVolume"].map(|rpc| w.plugin("p").count(rpc, ""))
            };
            let before = removals(w);
            let (kind, error) = refusal(asked().await);
            assert_eq!(kind, Kind::Busy, "{call}: {error}");
            let own = format!("{} sleep", container.pid);
            assert!(error.details.holders.iter().any(|holder| holder.starts_with(&own)), "{own}: {error:?}");
            assert!(error.message.contains(&own), "{own}: {error}");
            refused += 1;
            assert_eq!(removals(w), before, "no RPC was made");
            assert_eq!(state(&client, "v", "job").await, "mounted");
            assert_eq!(client.list_claims(Default::default()).await.unwrap().len(), 1, "the claim is kept");
            assert_eq!(kernel::stacked(&source).unwrap(), 1);
            podman.end(&container);
            asked().await.unwrap();
            assert_eq!(state(&client, "v", "job").await, "none");
        }
        count("calls refused while a container had the volume", refused);
        drop(podman);
        w.nothing_left(&client).await;
        assert!(client.list_claims(Default::default()).await.unwrap().is_empty());
    });
}

#[test]
fn container_older_than_a_mount_does_not_hold_it() {
    world(async |w| {
        let client = running(w).await;
        let podman = Podman::new(w);
        let earlier = mounted(&client, "job", inline("earlier")).await;
        let host = w.path("state");
        let private = podman.run("private", &format!("{}:/host", host.display()), "");
        let slave = podman.run("slave", &format!("{}:/host:rslave", host.display()), "");
        let source = mounted(&client, "job", inline("v")).await;
        let inside = |path: &Path| path.strip_prefix(&host).expect("below the state directory").to_owned();
        assert!(
            slave.shows(&inside(&source)),
            "{}",
            fs::read_to_string(format!("/proc/{}/mountinfo", slave.pid)).unwrap()
        );
        assert!(!private.shows(&inside(&source)));
        unmount(&client, "v", "job").await.unwrap();
        assert!(!slave.shows(&inside(&source)), "it is unmounted there, too");
        // Of the mount that was there before it has a copy that stays.
        assert!(private.shows(&inside(&earlier)) && slave.shows(&inside(&earlier)));
        let (kind, error) = refusal(unmount(&client, "earlier", "job").await);
        assert_eq!(kind, Kind::Busy, "{error}");
        let names = |container: &Container| error.message.contains(&format!("{} sleep", container.pid));
        assert!(names(&private) && !names(&slave), "{error}");
        podman.end(&private);
        unmount(&client, "earlier", "job").await.unwrap();
        assert!(!slave.shows(&inside(&earlier)));
        podman.end(&slave);
        drop(podman);
        w.nothing_left(&client).await;
    });
}

/// At a target with `suid` and `dev` nothing is refused: the probes work.
#[test]
fn older_container_gets_no_setuid_no_device() {
    world(async |w| {
        let client = running(w).await;
        let podman = Podman::new(w);
        let disk = w.add_device("p", "disk").writable;
        let [state, targets] = ["state", "targets"].map(|name| w.path(name).display().to_string());
        let volumes =
            [format!("{state}:{state}:rslave"), format!("{targets}:{targets}:rslave"), "/usr:/usr:ro".into()];
        let volumes: Vec<&str> = volumes.iter().map(String::as_str).collect();
        let container = podman.run_with("early", &volumes, "");

        give_probes(&mounted(&client, "setup", shared("v")).await, &disk);
        unmount(&client, "v", "setup").await.unwrap();
        let at = |name: &str, options: MountOptions| {
            let target = w.path("targets").join(name);
            fs::create_dir(&target).unwrap();
            MountOptions { target: Some(target.to_str().unwrap().to_owned()), ..options }
        };
        let loose = MountOptions { suid: Some(true), dev: Some(true), ..shared("v") };
        let reading = || MountOptions { read_only: Some(true), ..shared("v") };
        let mut refused = 0;
        for (consumer, options, due) in [
            ("published", shared("v"), Probe::refused().writes()),
            ("target", at("target", shared("v")), Probe::refused().writes()),
            ("reads", reading(), Probe::refused()),
            ("reads-target", at("reads-target", reading()), Probe::refused()),
            ("loose", at("loose", loose), Probe::permitted()),
        ] {
            let target = options.target.clone();
            let source = mounted(&client, consumer, options).await;
            let path = target.unwrap_or_else(|| source.to_str().unwrap().to_owned());
            assert_eq!(podman.probe(&container, &path), due, "{consumer}");
            refused += due.refusals();
        }
        count("setuid programs, device nodes and writes refused to an older container", refused);
        for consumer in ["published", "target", "reads", "reads-target", "loose"] {
            unmount(&client, "v", consumer).await.unwrap();
        }
        podman.end(&container);
        drop(podman);
        w.nothing_left(&client).await;
    });
}
