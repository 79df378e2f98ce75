//! The rpms: their files are those of the debs, and they come and go cleanly. Needs `make deb rpm PROFILE=dev` before.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use csid_tests::world::count;

use crate::machine::Machine;

fn package(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target").join(name);
    assert!(path.exists(), "{} is missing: make deb rpm PROFILE=dev", path.display());
    path
}

fn output(program: &str, arguments: &[&str], file: &Path) -> String {
    let output = Command::new(program).args(arguments).arg(file).output().expect(program);
    assert!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

/// Returns mode and path of each file of a deb, as an rpm has them.
fn files_of_deb(deb: &Path) -> BTreeSet<String> {
    let listed = output("dpkg-deb", &["--contents"], deb);
    let files = listed.lines().filter(|line| line.starts_with('-')).map(|line| {
        let (mode, path) = (line.split_whitespace().next().unwrap(), line.split(" ./").nth(1).unwrap());
        let bits = mode[1..].bytes().fold(0, |bits, letter| bits << 1 | u32::from(letter != b'-'));
        let path = path.strip_suffix(".gz").unwrap_or(path);
        let path = path.replace("/zsh/vendor-completions/", "/zsh/site-functions/");
        format!("{bits:o} /{path}")
    });
    // dpkg's form of the license.
    files.filter(|file| !file.ends_with("/copyright")).collect()
}

/// Returns mode and path of each file of an rpm.
fn files_of_rpm(rpm: &Path) -> BTreeSet<String> {
    let listed = output(
        "rpm",
        &["--query", "--queryformat", "[%{FILEMODES:octal} %{FILENAMES}\\n]", "--package"],
        rpm,
    );
    let files = listed.lines().map(|line| line.strip_prefix("100").expect("a file").to_owned());
    files.filter(|file| !file.contains("/usr/share/licenses/")).collect()
}

fn lines(text: &str) -> BTreeSet<String> {
    text.lines().map(str::to_owned).collect()
}

#[test]
fn rpms_have_the_files_of_the_debs() {
    for name in ["csid", "csid-volume-plugin", "csid-cluster", "csid-server"] {
        let (deb, rpm) = (package(&format!("{name}.deb")), package(&format!("{name}.rpm")));
        let files = files_of_rpm(&rpm);
        assert_eq!(files, files_of_deb(&deb), "{name}");
        count(&format!("files of {name}.rpm"), files.len());

        // What an administrator edits is replaced by neither.
        let kept = output(
            "rpm",
            &["--query", "--queryformat", "[%{FILEFLAGS:fflags} %{FILENAMES}\\n]", "--package"],
            &rpm,
        );
        let kept = kept.lines().filter_map(|line| line.strip_prefix("cn ")).map(str::to_owned);
        let conffiles =
            Command::new("dpkg-deb").arg("--info").arg(&deb).arg("conffiles").output().expect("dpkg-deb");
        assert_eq!(
            kept.collect::<BTreeSet<_>>(),
            lines(&String::from_utf8_lossy(&conffiles.stdout)),
            "{name}"
        );
    }
    let needed = output("rpm", &["--query", "--requires", "--package"], &package("csid.rpm"));
    for word in ["systemd", "dbus", "e2fsprogs", "xfsprogs", "libc.so.6(GLIBC_2.34)(64bit)"] {
        assert!(lines(&needed).contains(word), "{word}: {needed}");
    }
}

/// Debian's rpm knows no package of Debian's, so it finds no dependency.
const RPM: &str = "rpm --nodeps --force-debian";

#[test]
fn rpms_of_a_cluster_come_and_go_with_keys_left() {
    let m = Machine::boot();
    let all = ["csid", "csid-cluster", "csid-server"];
    for name in all {
        let name = format!("{name}.rpm");
        std::fs::copy(package(&name), m.path(&format!("/root/{name}"))).expect("a package is copied");
    }
    m.run(&format!("cd /root && {RPM} --install csid.rpm csid-cluster.rpm csid-server.rpm"));
    assert_eq!(m.run(&format!("rpm --verify --nodeps {}", all.join(" "))), "", "the files are as packaged");
    assert_eq!(m.run("stat --format %a /etc/csid/link /etc/csid-server"), "700\n755");
    // An administrator enables the server. csid starts the link, which does nothing without its file.
    assert_eq!(m.run("systemctl is-enabled csid-server || true"), "disabled");
    m.run("systemctl enable --quiet --now csid && csictl wait local");
    assert_eq!(m.run("systemctl is-active csid-link csid-server || true"), "inactive\ninactive");
    assert!(m.run("systemctl show csid --property Wants").contains("csid-link.service"));
    assert!(m.run("csid-server --version && csid-link --version").contains("csid-link"));
    for unit in ["csid-link", "csid-server"] {
        m.run(&format!("systemd-analyze security --threshold 15 --no-pager {unit} >/dev/null"));
    }
    m.run("touch /etc/csid/link/node.key /etc/csid-server/server.key");
    m.run(&format!("cd /root && {RPM} --upgrade --replacepkgs csid-cluster.rpm csid-server.rpm"));
    m.run(&format!("{RPM} --erase csid-server csid-cluster"));
    assert_eq!(
        m.run("ls /etc/csid/link /etc/csid-server"),
        "/etc/csid-server:\nserver.key\n\n/etc/csid/link:\nnode.key"
    );
    assert_eq!(m.run("systemctl is-active csid"), "active");
    assert!(!m.run("systemctl show csid --property Wants").contains("csid-link.service"));
    m.run(&format!("{RPM} --erase csid"));
}

#[test]
fn rpm_is_upgraded_and_erased_below_a_mount() {
    let m = Machine::boot();
    for name in ["csid.rpm", "csid-volume-plugin.rpm"] {
        std::fs::copy(package(name), m.path(&format!("/root/{name}"))).expect("a package is copied");
    }
    m.run(&format!("{RPM} --install /root/csid.rpm /root/csid-volume-plugin.rpm"));
    assert_eq!(m.run("rpm --verify --nodeps csid csid-volume-plugin"), "", "the files are as packaged");
    // Presets enable it; nothing starts it.
    assert_eq!(m.run("systemctl is-enabled csid.service csid-volume-plugin.socket"), "enabled\nenabled");
    assert_eq!(m.run("systemctl is-active csid.service || true"), "inactive");
    m.run("systemctl enable --quiet --now csid csid-volume-plugin.socket && csictl wait local");
    m.run("csictl volume create demo data --plugin local --access-mode single-node-writer --capacity 64MiB");
    m.run("mkdir /srv/data && mount -t csi demo/data /srv/data && echo here >/srv/data/file");
    m.run("echo '# mine' >>/etc/csid/csid.toml");
    let pid = |unit: &str| m.run(&format!("systemctl show {unit} --property MainPID --value"));
    let (csid, plugin) = (pid("csid"), pid("csi-plugin-local-default"));
    let has_file = || assert_eq!(m.run("mountpoint -q /srv/data && cat /srv/data/file"), "here");

    // An upgrade, here to the same version.
    m.run(&format!("{RPM} --upgrade --replacepkgs /root/csid.rpm /root/csid-volume-plugin.rpm"));
    has_file();
    m.until("csictl wait local");
    assert_ne!(pid("csid"), csid, "csid is the new one");
    assert_eq!(pid("csi-plugin-local-default"), plugin, "the plugin still serves its volume");
    assert_eq!(m.run("tail -n 1 /etc/csid/csid.toml"), "# mine");
    assert_eq!(m.run("systemctl is-active csid-volume-plugin.socket"), "active");
    m.run("umount /srv/data && mount -t csi demo/data /srv/data");

    let files = m.run("rpm --query --list csid csid-volume-plugin");
    m.run(&format!("{RPM} --erase csid-volume-plugin csid"));
    has_file();
    assert_eq!(
        m.run(&format!("ls -d /usr/sbin/*mount.csi {} 2>/dev/null || true", files.replace('\n', " "))),
        ""
    );
    assert_eq!(m.run("tail -n 1 /etc/csid/csid.toml.rpmsave"), "# mine");
    assert_eq!(
        m.run("systemctl is-active csid.service csid.socket csid-volume-plugin.socket || true"),
        "inactive\n".repeat(3).trim_end()
    );
    assert_eq!(m.run("ls /run/docker/plugins"), "");

    m.run(&format!("{RPM} --install /root/csid.rpm && systemctl enable --now csid && csictl wait local"));
    has_file();
    let known = m.run("csictl mounts --target /srv/data");
    assert!(known.contains("srv-data.mount") && known.contains("mounted"), "{known}");
    m.run("umount /srv/data && csictl volume delete demo data --yes demo/data");
    m.run(&format!("{RPM} --erase csid"));
    assert_eq!(m.run("systemctl list-units --all --plain --no-legend 'csi-plugin-*' || true"), "");
    assert_eq!(m.loops(), "");
}
