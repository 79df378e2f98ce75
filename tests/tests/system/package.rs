//! The package comes and goes cleanly.

use std::process::Command;

use csid_tests::world::count;

use crate::machine::Machine;

#[test]
fn removal_keeps_mounts_and_purge_refuses() {
    let m = Machine::with_csid();
    m.run("csictl wait local");
    let id = m.run("csi-local create data --size 64M");
    let mount = format!("csictl mount demo data web --plugin local --external-id {id}");
    let path = m.run(&mount);
    m.run(&format!("echo here >{path}/file"));

    // An upgrade, here to the same version.
    m.run("dpkg --install /root/csid.deb");
    assert_eq!(m.run(&mount), path);
    assert_eq!(m.run(&format!("cat {path}/file")), "here");

    m.run("dpkg --remove csid");
    assert_eq!(m.run(&format!("cat {path}/file")), "here", "removal unmounts nothing");
    assert_eq!(m.run("test -e /usr/sbin/csid && echo there || echo gone"), "gone");
    m.run("echo '# mine' >/etc/csid/plugins.d/mine.toml");
    let purge = m.try_run("dpkg --purge csid");
    assert!(!purge.status.success(), "a purge while a volume is mounted");
    let said = String::from_utf8_lossy(&purge.stderr);
    assert!(said.contains("csid.toml and plugins.d/local.toml"), "what dpkg deleted is named: {said}");
    assert_eq!(m.run("find /etc/csid -type f"), "/etc/csid/plugins.d/mine.toml", "and nothing else is gone");
    m.run("rm /etc/csid/plugins.d/mine.toml");
    assert_eq!(m.run(&format!("cat {path}/file")), "here");
    m.run("test -s /var/lib/csid/journal/csid.db");

    m.install();
    m.until("csictl wait local");
    assert_eq!(m.run(&mount), path, "installed again, it knows its mount");
    assert_eq!(m.run(&format!("cat {path}/file")), "here");
    m.run("csictl unmount demo data web");
    m.run(&format!("csi-local delete {id}"));
    m.run("dpkg --purge csid");
    let left = m.run("ls -d /var/lib/csid /etc/csid /run/csid /var/lib/csi-local 2>/dev/null || true");
    assert_eq!(left, "", "nothing is left");
    let units = m.run("systemctl list-units --all --plain --no-legend 'csi*' || true");
    assert_eq!(units, "", "no unit is left");
    assert_eq!(m.loops(), "");
}

#[test]
fn packages_have_the_documents_that_they_name() {
    let of_csid = ["README.md", "docs/volumes.md", "docs/troubleshooting.md", "docs/cluster-install.md"];
    // A machine of a server has no csid.
    let of_server =
        ["cluster.md", "cluster-install.md", "cluster-operations.md", "metrics.md", "troubleshooting.md"];
    for (package, documents) in [
        ("csid", of_csid.map(str::to_owned).to_vec()),
        ("csid-server", of_server.map(|name| format!("docs/{name}")).to_vec()),
    ] {
        let deb = format!("{}/../target/{package}.deb", env!("CARGO_MANIFEST_DIR"));
        let listed = Command::new("dpkg-deb").args(["--contents", &deb]).output().expect("dpkg-deb");
        let files = String::from_utf8_lossy(&listed.stdout);
        for file in documents {
            assert!(files.contains(&format!("/usr/share/doc/{package}/{file}\n")), "{file}:\n{files}");
        }
    }
}

#[test]
fn packages_name_their_sizes() {
    for name in ["csid", "csid-volume-plugin", "csid-cluster", "csid-server", "libcsi1", "libcsi-dev"] {
        let deb = format!("{}/../target/{name}.deb", env!("CARGO_MANIFEST_DIR"));
        let field =
            Command::new("dpkg-deb").args(["--field", &deb, "Installed-Size"]).output().expect("dpkg-deb");
        let kib: usize = String::from_utf8_lossy(&field.stdout).trim().parse().expect("KiB");
        assert!(kib > 0, "{name}");
        count(&format!("KiB installed by {name}.deb, as it was built here"), kib);
    }
}

#[test]
fn program_is_built_with_the_librarys_packages() {
    let m = Machine::with_csid();
    for package in ["libcsi1", "libcsi-dev"] {
        m.install_package(package);
    }
    m.run("csictl wait local");
    let ids: Vec<String> =
        ["a", "b", "c"].map(|name| m.run(&format!("csi-local create {name} --size 16M"))).into();
    let compile = "cc -std=c99 -Wall -Wextra -Werror /usr/share/doc/libcsi-dev/examples/mini_scheduler.c";
    m.run(&format!("{compile} $(pkg-config --cflags --libs csi) -o /root/shared"));
    m.run(&format!("{compile} $(pkg-config --variable=libdir csi)/libcsi.a -lm -o /root/static"));
    for (program, links) in [("shared", true), ("static", false)] {
        let linked = m.run(&format!("ldd /root/{program}"));
        assert_eq!(linked.contains("libcsi.so.1 => "), links, "{linked}");
        let said = m.run(&format!("/root/{program} local {} </dev/null", ids.join(" ")));
        let lines: Vec<&str> = said.lines().collect();
        let [mounted @ .., _, _, _] = &lines[..] else { panic!("{said}") };
        assert!(
            mounted.len() == 3 && mounted.iter().all(|line| line.starts_with("/var/lib/csid/")),
            "{said}"
        );
        assert_eq!(lines[3..], ["unmounted"; 3], "{said}");
    }
    m.run("gzip --test /usr/share/man/man3/libcsi.3.gz");
    m.run("dpkg --purge libcsi-dev libcsi1");
    assert_eq!(m.run("ls -d /usr/include/csi.h /usr/lib/libcsi* 2>/dev/null || true"), "");
}

#[test]
fn purge_keeps_volumes() {
    let m = Machine::with_csid();
    m.run("csictl wait local");
    m.run("csi-local create precious --size 16M");
    m.run("dpkg --purge csid");
    assert_ne!(m.run("find /var/lib/csi-local -type f"), "", "volumes are data");
    m.install();
    m.until("csictl wait local");
    assert!(m.run("csi-local list").contains("precious"));
}
