//! mount(8) and umount(8), which run csictl as mount.csi and umount.csi.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use csid_client::{AccessMode, Client, MountRow};
use csid_tests::ask::*;
use csid_tests::kernel;
use csid_tests::script::{Act, Rule};
use csid_tests::world::{World, child, eventually, program, world};
use rustix::mount::{MountFlags, mount as mount_at, mount_bind};
use rustix::process::{Pid, Signal, kill_process};
use tokio::process::Command;

/// A host's helpers, fstab and csid's usual socket, in the mount namespace of a world.
pub struct Host {
    targets: PathBuf,
    fstab: PathBuf,
}

/// How a program ended: its code and its standard error.
type Ended = (i32, String);

impl Host {
    pub fn new(w: &World) -> Self {
        let [upper, work, fstab] = ["sbin", "sbin.work", "fstab"].map(|name| w.path(name));
        for directory in [&upper, &work] {
            fs::create_dir(directory).unwrap();
        }
        for helper in ["mount.csi", "umount.csi"] {
            symlink(program("csictl"), upper.join(helper)).unwrap();
        }
        let layers = format!("lowerdir=/usr/sbin,upperdir={},workdir={}", upper.display(), work.display());
        let layers = std::ffi::CString::new(layers).unwrap();
        mount_at("overlay", "/usr/sbin", "overlay", MountFlags::empty(), layers.as_c_str()).expect("overlay");
        // utab is here, too.
        mount_at("tmpfs", "/run", "tmpfs", MountFlags::empty(), c"mode=0755").unwrap();
        fs::create_dir("/run/csid").unwrap();
        mount_bind(w.path("run"), "/run/csid").unwrap();
        fs::write(&fstab, "").unwrap();
        mount_bind(&fstab, "/etc/fstab").unwrap();
        Host { targets: w.path("targets"), fstab }
    }

    /// Makes a directory to mount at.
    pub fn target(&self, name: &str) -> String {
        let path = self.targets.join(name);
        fs::create_dir(&path).unwrap();
        path.to_str().unwrap().to_owned()
    }

    /// Adds a line of the type csi.
    fn line(&self, source: &str, target: &str, options: &str) {
        let lines = fs::read_to_string(&self.fstab).unwrap();
        let target = target.replace(' ', r"\040");
        fs::write(&self.fstab, format!("{lines}{source} {target} csi {options} 0 0\n")).unwrap();
    }

    async fn run(&self, words: &[&str]) -> Ended {
        ended(command(words)).await
    }

    pub async fn succeeds(&self, words: &[&str]) {
        assert_eq!(self.run(words).await, (0, String::new()), "{words:?}");
    }
}

fn command(words: &[&str]) -> Command {
    let mut command = Command::from(child(Path::new(words[0])));
    command.args(&words[1..]).current_dir("/").env("LC_ALL", "C");
    command.env("DBUS_SYSTEM_BUS_ADDRESS", "unix:path=/run/no-bus");
    command
}

async fn ended(mut command: Command) -> Ended {
    let output = command.output().await.expect("it runs");
    (output.status.code().expect("no signal"), String::from_utf8(output.stderr).unwrap())
}

/// Returns how many lines of utab have umount(8) run umount.csi.
pub fn noted() -> usize {
    utab().lines().filter(|line| line.contains("helper=csi")).count()
}

fn utab() -> String {
    fs::read_to_string("/run/mount/utab").unwrap_or_default()
}

pub async fn only_row(client: &Client) -> MountRow {
    let mut rows = rows(client).await;
    assert_eq!(rows.len(), 1, "{rows:?}");
    rows.remove(0)
}

pub const OPTIONS: &str = "_netdev,noatime,csi.plugin=p,csi.external-id=v";

#[test]
fn fstab_line_is_mounted_once_and_unmounted() {
    world(async |w| {
        let client = running(w).await;
        let host = Host::new(w);
        let target = host.target("my-db");
        host.line("default/v", &target, OPTIONS);
        host.succeeds(&["mount", &target]).await;
        let row = only_row(&client).await;
        assert_eq!(
            (row.namespace.as_str(), row.volume.as_str(), row.target.as_str()),
            ("default", "v", target.as_str())
        );
        assert_eq!((row.state.as_str(), row.restore.as_str(), row.read_only), ("mounted", "hold", false));
        let unit = ended_text(&["systemd-escape", "--path", "--suffix=mount", &target]).await;
        assert_eq!(row.consumer, unit);
        assert_eq!((kernel::stacked(Path::new(&target)).unwrap(), noted()), (1, 1));
        fs::write(Path::new(&target).join("file"), "data").unwrap();

        for _ in 0..2 {
            host.succeeds(&["mount", "--all", "--types", "csi"]).await;
        }
        only_row(&client).await;
        assert_eq!((kernel::stacked(Path::new(&target)).unwrap(), noted()), (1, 1));
        assert_eq!(w.plugin("p").count("NodePublishVolume", "v"), 1);
        let found =
            ended_text(&["findmnt", "--noheadings", "--output", "TARGET", "--mountpoint", &target]).await;
        assert_eq!(found, target);

        host.succeeds(&["umount", &target]).await;
        assert_eq!((kernel::stacked(Path::new(&target)).unwrap(), utab().as_str()), (0, ""));

        // What csid alone ends leaves its lines until the next mount.
        for _ in 0..2 {
            host.succeeds(&["mount", &target]).await;
            unmount(&client, "v", &unit).await.unwrap();
        }
        host.succeeds(&["mount", &target]).await;
        assert_eq!(noted(), 1);
        host.succeeds(&["umount", &target]).await;
        assert_eq!(utab(), "");
        w.nothing_left(&client).await;
    });
}

async fn ended_text(words: &[&str]) -> String {
    let output = command(words).output().await.expect("it runs");
    assert!(output.status.success(), "{words:?}");
    String::from_utf8(output.stdout).unwrap().trim_end().to_owned()
}

#[test]
fn remount_succeeds_only_with_the_same_options() {
    world(async |w| {
        let client = running(w).await;
        let host = Host::new(w);
        let target = host.target("t");
        host.line("default/v", &target, OPTIONS);
        host.succeeds(&["mount", &target]).await;
        host.succeeds(&["mount", "-o", "remount", &target]).await;
        // As systemctl reload of the mount unit does it.
        let full = format!("remount,{OPTIONS}");
        host.succeeds(&["mount", "-t", "csi", "-o", &full, "default/v", &target]).await;
        let (code, text) = host.run(&["mount", "-o", "remount,ro", &target]).await;
        assert!(code == 32 && text.starts_with("mount.csi: AlreadyExists: "), "{code} {text}");
        let row = only_row(&client).await;
        assert!(!row.read_only && row.state == "mounted");
        host.succeeds(&["umount", &target]).await;
        w.nothing_left(&client).await;
    });
}

#[test]
fn claim_of_another_consumer_is_named() {
    world(async |w| {
        let client = running(w).await;
        registered(&client, "v", &[AccessMode::SingleNodeWriter]).await;
        claim(&client, "v", "backup").await.unwrap();
        let host = Host::new(w);
        let target = host.target("t");
        host.line("default/v", &target, "_netdev");
        let (code, text) = host.run(&["mount", &target]).await;
        assert_eq!(code, 32, "{text}");
        assert!(text.starts_with("mount.csi: ClaimConflict: ") && text.contains("backup"), "{text}");
        assert!(text.contains("`csictl claims`"), "{text}");
        release(&client, "v", "backup").await.unwrap();
        host.succeeds(&["mount", &target]).await;
        assert_eq!(claims(&client).await.len(), 1);
        host.succeeds(&["umount", &target]).await;
        assert!(claims(&client).await.is_empty());
        w.nothing_left(&client).await;
    });
}

#[test]
fn line_that_would_end_the_boot_is_refused() {
    world(async |w| {
        let client = running(w).await;
        let host = Host::new(w);
        let target = host.target("t");
        host.line("default/v", &target, "defaults,csi.plugin=p,csi.external-id=v");
        let (code, text) = host.run(&["mount", &target]).await;
        let due = format!(
            "mount.csi: /etc/fstab: the line of {target} needs _netdev: without it the next boot tries it before csid runs, and \
             ends in the emergency shell\n"
        );
        assert_eq!((code, text), (1, due));
        let mut check = command(&[program("csictl").to_str().unwrap(), "check-config"]);
        let path = format!("{}:/usr/bin", program("csid").parent().unwrap().display());
        check.env("PATH", path).env("CONFIGURATION_DIRECTORY", w.path("etc"));
        let checked = check.output().await.unwrap();
        assert!(!checked.status.success());
        assert!(String::from_utf8(checked.stderr).unwrap().contains("needs _netdev"));
        assert!(rows(&client).await.is_empty());
        // A mount by hand that has no line harms no boot.
        let other = host.target("other");
        host.succeeds(&["mount", "-t", "csi", "-o", "csi.plugin=p,csi.external-id=v", "default/v", &other])
            .await;
        host.succeeds(&["umount", &other]).await;
        w.nothing_left(&client).await;
    });
}

#[test]
fn wrong_arguments_change_nothing() {
    world(async |w| {
        let client = running(w).await;
        let host = Host::new(w);
        let target = host.target("t");
        let mount = |source: &'static str, options: &'static str| {
            command(&["mount", "-t", "csi", "-o", options, source, &target])
        };
        for (source, options, words) in [
            ("v", "rw", "the source v is not NAMESPACE/VOLUME"),
            ("default/v", "csi.tags=a", "unknown option csi.tags=a"),
            ("default/v", "csi.deadline=soon", "csi.deadline=soon"),
            ("default/v", "csi.consumer=", "InvalidArgument"),
        ] {
            let (code, text) = ended(mount(source, options)).await;
            assert!(code == 1 && text.contains(words), "{source} {options}: {code} {text}");
        }
        let (code, text) = ended(mount("default/none", "rw")).await;
        assert!(code == 32 && text.contains("NotFound"), "{code} {text}");
        let fake = ["mount", "-f", "-t", "csi", "default/none", &target];
        host.succeeds(&fake).await;
        let helper = ["/sbin/mount.csi", "default/v", &target, "-o", "rw"];
        let mut nobody = vec!["setpriv", "--reuid=65534", "--clear-groups"];
        nobody.extend(helper);
        let (code, text) = host.run(&nobody).await;
        assert!(code == 1 && text.contains("only root mounts"), "{code} {text}");
        // mount(8) gives up its rights before it runs the helper.
        let of_users = host.target("users");
        host.line("default/v", &of_users, "users,_netdev,csi.plugin=p,csi.external-id=v");
        let (code, text) =
            host.run(&["setpriv", "--reuid=65534", "--clear-groups", "mount", &of_users]).await;
        assert!(code == 1 && text.contains("only root mounts"), "{code} {text}");
        for words in [&["/sbin/mount.csi"][..], &["/sbin/umount.csi"]] {
            assert_eq!(host.run(words).await.0, 1, "{words:?}");
        }
        w.nothing_left(&client).await;
    });
}

#[test]
fn signal_cancels_the_mount() {
    world(async |w| {
        let client = running(w).await;
        let host = Host::new(w);
        let target = host.target("t");
        w.plugin("p").rules([Rule::always("NodeStageVolume", Act::Hold)]);
        for signal in [Signal::TERM, Signal::INT] {
            // Not by setpriv, whose process is the helper's only after exec.
            let mut helper = Command::new("/sbin/mount.csi");
            helper.args(["default/v", &target, "-o", OPTIONS]);
            let helper = helper.stderr(std::process::Stdio::piped()).kill_on_drop(true).spawn().unwrap();
            eventually("the plugin is asked", async || !rows(&client).await.is_empty()).await;
            assert_eq!(only_row(&client).await.state, "mounting");
            let pid = Pid::from_raw(helper.id().unwrap().cast_signed()).unwrap();
            kill_process(pid, signal).unwrap();
            let output = helper.wait_with_output().await.unwrap();
            let text = String::from_utf8(output.stderr).unwrap();
            assert_eq!(
                (output.status.code(), text.as_str()),
                (Some(8), "mount.csi: cancelled; nothing is mounted\n")
            );
            assert!(rows(&client).await.is_empty(), "nothing comes later");
        }
        w.honest();
        w.nothing_left(&client).await;
        assert_eq!((kernel::stacked(Path::new(&target)).unwrap(), noted()), (0, 0));
    });
}

/// Replaces systemctl by a script with this output. It makes the file `asked`.
fn replace_systemctl(w: &World, output: &str) {
    let path = w.path("sbin/systemctl");
    let script = format!("#!/bin/sh\ntouch {}\nprintf '{output}'\n", w.path("asked").display());
    fs::write(&path, script).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn signal_ends_the_wait_for_systemd_alone() {
    world(async |w| {
        let client = running(w).await;
        let host = Host::new(w);
        let target = host.target("t");
        replace_systemctl(w, "ActiveState=inactive\\nAfter=\\n");
        let mut helper = Command::new("/sbin/mount.csi");
        helper.args(["default/v", &target, "-o", OPTIONS]).env("PATH", "/usr/sbin:/usr/bin:/bin");
        let helper = helper.stderr(std::process::Stdio::piped()).kill_on_drop(true).spawn().unwrap();
        eventually("systemd is asked", async || w.path("asked").exists()).await;
        let begun = Instant::now();
        kill_process(Pid::from_raw(helper.id().unwrap().cast_signed()).unwrap(), Signal::TERM).unwrap();
        let output = helper.wait_with_output().await.unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(
            output.status.code() == Some(0) && text.contains("is mounted, but systemd does not know"),
            "{text}"
        );
        assert!(begun.elapsed() < Duration::from_secs(3), "{:?}", begun.elapsed());
        assert_eq!(only_row(&client).await.state, "mounted");
        host.succeeds(&["umount", &target]).await;
        w.nothing_left(&client).await;
    });
}

/// In a chroot systemctl prints nothing, and succeeds.
#[test]
fn mount_waits_for_no_silent_systemctl() {
    world(async |w| {
        let client = running(w).await;
        let host = Host::new(w);
        let target = host.target("t");
        replace_systemctl(w, "");
        let mut helper = Command::new("/sbin/mount.csi");
        helper.args(["default/v", &target, "-o", OPTIONS]).env("PATH", "/usr/sbin:/usr/bin:/bin");
        assert_eq!(ended(helper).await, (0, String::new()));
        assert!(w.path("asked").exists());
        host.succeeds(&["umount", &target]).await;
        w.nothing_left(&client).await;
    });
}

#[test]
fn helpers_outlive_a_kill_of_csid() {
    world(async |w| {
        let client = running(w).await;
        let host = Host::new(w);
        let target = host.target("t");
        host.line("default/v", &target, OPTIONS);
        w.plugin("p").rules([Rule::always("NodeStageVolume", Act::Delay(500))]);
        let mounting = tokio::spawn(ended(command(&["mount", &target])));
        eventually("the mount begins", async || !rows(&client).await.is_empty()).await;
        w.kill();
        let client = w.start().await;
        assert_eq!(mounting.await.unwrap(), (0, String::new()));
        assert_eq!(only_row(&client).await.state, "mounted");

        w.kill();
        let (code, text) = host.run(&["umount", &target]).await;
        assert!(code == 2 && text.starts_with("umount.csi: csid cannot be reached: "), "{code} {text}");
        assert_eq!(kernel::stacked(Path::new(&target)).unwrap(), 1, "the mount stays");
        let other = host.target("other");
        let (code, text) = host.run(&["mount", "-t", "csi", "default/v", &other]).await;
        assert!(code == 2 && text.starts_with("mount.csi: csid cannot be reached: "), "{code} {text}");
        let client = w.start().await;
        host.succeeds(&["umount", &target]).await;
        assert_eq!(noted(), 0);
        w.nothing_left(&client).await;
    });
}

#[test]
fn mount_in_another_namespace_is_undone() {
    world(async |w| {
        let client = running(w).await;
        let host = Host::new(w);
        let target = host.target("t");
        let mount = ["mount", "-t", "csi", "-o", OPTIONS, "default/v", &target];
        let mut words = vec!["unshare", "--mount", "--propagation", "private"];
        words.extend(mount);
        let (code, text) = host.run(&words).await;
        assert!(code == 32 && text.contains("is not mounted in this mount namespace"), "{code} {text}");
        w.nothing_left(&client).await;
        assert_eq!((w.plugin("p").count("NodePublishVolume", "v"), noted()), (1, 0));
        // A namespace that receives the host's mounts has it.
        words[3] = "slave";
        host.succeeds(&words).await;
        // What the host has stays.
        words[3] = "private";
        words.splice(4..4, ["sh", "-c", r#"umount -i -n "$1" && shift && exec "$@""#, "sh", &target]);
        let (code, text) = host.run(&words).await;
        assert!(code == 32 && text.ends_with("mounts in the host's\n"), "{code} {text}");
        assert_eq!(only_row(&client).await.state, "mounted");
        host.succeeds(&["umount", &target]).await;
        w.nothing_left(&client).await;
    });
}

#[test]
fn names_reach_csid_as_they_are() {
    world(async |w| {
        let client = running(w).await;
        let host = Host::new(w);
        for (number, name) in ["50%", r"a\040b", "größe", "a/b", "vol[0]"].into_iter().enumerate() {
            let volume = name.replace(r"\040", " ");
            let target = host.target(&format!("{} {}", volume.replace('/', "-"), number));
            host.line(&format!("default/{name}"), &target, OPTIONS);
            host.succeeds(&["mount", &target]).await;
            let row = only_row(&client).await;
            assert_eq!((row.volume, row.target.as_str()), (volume, target.as_str()));
            let unit = ended_text(&["systemd-escape", "--path", "--suffix=mount", &target]).await;
            assert_eq!(row.consumer, unit);
            host.succeeds(&["umount", &target]).await;
            assert_eq!((rows(&client).await.len(), noted()), (0, 0), "{name}");
        }
        w.nothing_left(&client).await;
    });
}

/// mount(8) makes a source an absolute path if a file of that name is below its current directory.
#[test]
fn source_that_is_a_path_too_is_a_volume() {
    world(async |w| {
        let client = running(w).await;
        let host = Host::new(w);
        let target = host.target("t");
        fs::create_dir_all(w.path("cwd/default/v")).unwrap();
        let options = ["-t", "csi", "-o", OPTIONS, "default/v", &target];
        for words in [&options[..], &[&target]] {
            host.line("default/v", &target, OPTIONS);
            let mut mount = command(&["mount"]);
            mount.args(words).current_dir(w.path("cwd"));
            assert_eq!(ended(mount).await, (0, String::new()), "{words:?}");
            assert_eq!(only_row(&client).await.volume, "v");
            host.succeeds(&["umount", &target]).await;
        }
        w.nothing_left(&client).await;
    });
}

#[test]
fn mount_without_a_row_is_unmounted_by_the_kernel() {
    world(async |w| {
        let client = running(w).await;
        let host = Host::new(w);
        let target = host.target("t");
        host.succeeds(&["mount", "-t", "tmpfs", "of-a-test", &target]).await;
        host.succeeds(&["mount", "-i", "-f", "-t", "tmpfs", "-o", "helper=csi", "of-a-test", &target]).await;
        assert_eq!(noted(), 1);
        host.succeeds(&["umount", &target]).await;
        assert_eq!((kernel::stacked(Path::new(&target)).unwrap(), noted()), (0, 0));
        let (code, text) = host.run(&["/sbin/umount.csi", &target]).await;
        assert_eq!((code, text), (32, format!("umount.csi: {target} is not mounted\n")));
        w.nothing_left(&client).await;
    });
}

#[test]
fn busy_mount_stays_also_for_a_lazy_umount() {
    world(async |w| {
        let client = running(w).await;
        let host = Host::new(w);
        let target = host.target("t");
        host.succeeds(&["mount", "-t", "csi", "-o", OPTIONS, "default/v", &target]).await;
        let file = fs::File::create(Path::new(&target).join("file")).unwrap();
        let (code, text) = host.run(&["umount", &target]).await;
        assert!(code == 32 && text.starts_with("umount.csi: Busy: "), "{code} {text}");
        let (code, text) = host.run(&["umount", "-l", &target]).await;
        assert!(code == 32 && text.contains(&format!("`umount -i -l {target}`")), "{code} {text}");
        assert_eq!((only_row(&client).await.state.as_str(), noted()), ("mounted", 1));
        drop(file);
        host.succeeds(&["umount", "-l", &target]).await;
        w.nothing_left(&client).await;
    });
}
