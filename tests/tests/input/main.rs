//! Bad input to everything that is served on the private socket. None of it is believed, and nothing is changed by it.

mod bytes;

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use csid_client::{Client, MountFilter, MountOptions, UnmountOptions};
use csid_tests::ask::*;
use csid_tests::raw::{self, MANAGER, MANAGER_PATH, Member, MemberKind, PLUGIN, call, dict, text, value};
use csid_tests::world::{World, count, world};
use zbus::{Connection, Variant};

const INVALID: &str = "org.csid1.Error.InvalidArgument";
/// The library's answer to wrong types.
const INVALID_ARGS: &str = "org.freedesktop.DBus.Error.InvalidArgs";
const PLUGIN_PATH: &str = "/org/csid1/plugin/p";

/// All that input could change.
#[derive(Debug, PartialEq)]
struct Everything {
    rows: Vec<csid_client::MountRow>,
    plugins: Vec<String>,
    volumes: Vec<csid_client::VolumeRow>,
    claims: Vec<csid_client::ClaimRow>,
    events: Vec<(u64, String, String)>,
    operations: Vec<String>,
    paths: Vec<PathBuf>,
    mounts: Vec<String>,
    calls: usize,
}

async fn everything(w: &mut World, client: &Client) -> Everything {
    let paths = ["state/plugins", "targets", "etc", "credentials"];
    Everything {
        rows: client.list_mounts(MountFilter::default()).await.unwrap(),
        plugins: client.list_plugins().await.unwrap().into_iter().map(|p| p.id).collect(),
        volumes: client.list_volumes(Default::default()).await.unwrap(),
        claims: client.list_claims(Default::default()).await.unwrap(),
        // A plugin's health has events of its own, independent of callers.
        events: events(client, 0)
            .await
            .into_iter()
            .filter(|e| !["plugin-health", "plugin-fingerprint"].contains(&e.kind.as_str()))
            .map(|e| (e.sequence, e.kind, e.subject))
            .collect(),
        operations: client.list_operations().await.unwrap().into_iter().map(|o| o.id).collect(),
        paths: paths.iter().flat_map(|p| csid_tests::kernel::tree(&w.path(p)).unwrap()).collect(),
        mounts: w.leftovers(),
        calls: w.plugin("p").volume_calls().len(),
    }
}

/// csid with plugin `p` and a mounted volume, and what the tests ask it with.
async fn busy(w: &mut World) -> (Client, Connection, Vec<(&'static str, Member)>) {
    let client = running(w).await;
    mounted(&client, "job", shared("in-use")).await;
    registered(&client, "kept", &[csid_client::AccessMode::SingleNodeWriter]).await;
    client.claim(NAMESPACE, "kept", "job", Default::default()).await.unwrap();
    settled(&client).await;
    let peer = raw::peer(raw::ROOT, &w.socket()).await.unwrap();
    let mut served = Vec::new();
    for path in [MANAGER_PATH, PLUGIN_PATH] {
        let xml = raw::introspect(&peer, path).await.unwrap();
        let ours = raw::members(&xml).into_iter().filter(|m| m.interface.starts_with("org.csid1."));
        served.extend(ours.map(|member| (path, member)));
    }
    assert!(
        served.iter().any(|(_, m)| m.name == "Mount") && served.iter().any(|(_, m)| m.interface == PLUGIN)
    );
    (client, peer, served)
}

/// Its path, itself, its in-arguments.
type Method = (&'static str, Member, Vec<(String, String)>);

fn methods(served: &[(&'static str, Member)]) -> Vec<Method> {
    served
        .iter()
        .filter_map(|(path, member)| match &member.kind {
            MemberKind::Method(arguments) => Some((*path, member.clone(), arguments.clone())),
            _ => None,
        })
        .collect()
}

/// Arguments that would be taken, so that the one that is changed is what is wrong.
fn good(method: &str, arguments: &[(String, String)]) -> Vec<Variant<'static>> {
    arguments
        .iter()
        .map(|(name, of)| match (method, name.as_str()) {
            ("Mount", "options") => dict(vec![
                ("plugin", text("p")),
                ("external-id", text("never")),
                ("access-mode", text("single-node-writer")),
                ("attachment-mode", text("file-system")),
            ]),
            ("RegisterPlugin", "spec") => {
                dict(vec![("supervision", text("external")), ("socket", text("/nowhere/csi.sock"))])
            }
            ("RegisterVolume", "spec") => registration(Vec::new()),
            ("Exec", "argv") => vec!["true".to_owned()].into(),
            (_, "namespace") => text(NAMESPACE),
            ("RegisterVolume", "id") => text("never"),
            (_, "volume") => text("kept"),
            ("Claim" | "Release" | "Unmount", "consumer") => text("job"),
            ("RegisterPlugin" | "UnregisterPlugin", "id") => text("unknown-plugin"),
            ("WaitForPlugin", "id") => text("p"),
            ("WaitForPlugin", "service") => text("node"),
            _ => value(of),
        })
        .collect()
}

/// A spec of RegisterVolume, with these keys.
fn registration(entries: Vec<(&str, Variant<'static>)>) -> Variant<'static> {
    let capability = HashMap::from([("access-mode".to_owned(), text("single-node-writer"))]);
    let mut all = BTreeMap::from([
        ("plugin", text("p")),
        ("external-id", text("never")),
        ("capabilities", vec![capability].into()),
    ]);
    all.extend(entries);
    dict(all.into_iter().collect())
}

/// `good`, with these keys in its options.
fn with_options(
    method: &str,
    arguments: &[(String, String)],
    entries: Vec<(&str, Variant<'static>)>,
) -> Vec<Variant<'static>> {
    let mut all: BTreeMap<String, Variant<'static>> = BTreeMap::new();
    let base: &[(&str, &str)] = match method {
        "Mount" => &[
            ("plugin", "p"),
            ("external-id", "never"),
            ("access-mode", "single-node-writer"),
            ("attachment-mode", "file-system"),
        ],
        "RegisterPlugin" => &[("supervision", "external"), ("socket", "/nowhere/csi.sock")],
        _ => &[],
    };
    all.extend(base.iter().map(|(key, word)| ((*key).to_owned(), text(word))));
    all.extend(entries.into_iter().map(|(key, value)| (key.to_owned(), value)));
    let entries = all.iter().map(|(key, value)| (key.as_str(), value.clone())).collect();
    let options = if method == "RegisterVolume" { registration(entries) } else { dict(entries) };
    let mut values = good(method, arguments);
    let place = arguments.iter().position(|(_, of)| of == "a{sv}").expect("options");
    values[place] = options;
    values
}

/// The keys of each method's options that a person types, by type: the contract's text.
fn keys(method: &str) -> Vec<(&'static str, &'static str)> {
    let common = [("deadline-usec", "t"), ("operation-id", "s"), ("secrets", "h"), ("credential", "s")];
    let own: &[(&str, &str)] = match method {
        "Mount" => &[
            ("read-only", "b"),
            ("access-mode", "s"),
            ("attachment-mode", "s"),
            ("fs-type", "s"),
            ("mount-flags", "as"),
            ("mount-group", "s"),
            ("tag", "s"),
            ("target", "s"),
            ("propagation", "s"),
            ("suid", "b"),
            ("dev", "b"),
            ("restore", "s"),
            ("plugin", "s"),
            ("external-id", "s"),
            ("volume-context", "a{ss}"),
            ("publish-context", "a{ss}"),
            ("capabilities", "aa{sv}"),
        ],
        "Unmount" => &[("tag", "s"), ("force", "b")],
        "ListMounts" => &[
            ("namespace", "s"),
            ("volume", "s"),
            ("consumer", "s"),
            ("tag", "s"),
            ("plugin", "s"),
            ("state", "s"),
            ("uid", "u"),
            ("after", "s"),
            ("max", "u"),
        ],
        "RegisterVolume" => &[
            ("plugin", "s"),
            ("name", "s"),
            ("external-id", "s"),
            ("capabilities", "aa{sv}"),
            ("fs-type", "s"),
            ("mount-flags", "as"),
            ("mount-group", "s"),
            ("context", "a{ss}"),
            ("parameters", "a{ss}"),
            ("topologies", "aa{ss}"),
            ("heal", "s"),
            ("suid", "b"),
            ("dev", "b"),
        ],
        "ListVolumes" => &[
            ("namespace", "s"),
            ("plugin", "s"),
            ("node", "s"),
            ("prefix", "s"),
            ("declared", "b"),
            ("after", "s"),
            ("max", "u"),
        ],
        "DeregisterVolume" => &[("force", "b")],
        "ValidateVolume" => &[("access-mode", "s"), ("attachment-mode", "s"), ("external-id", "s")],
        "ExpandVolume" => &[("part", "s"), ("plugin", "s"), ("external-id", "s"), ("fs-type", "s")],
        "CreateSnapshot" => &[("parameters", "a{ss}"), ("plugin", "s"), ("external-id", "s")],
        "AttachVolume" => {
            &[("read-only", "b"), ("access-mode", "s"), ("attachment-mode", "s"), ("plugin", "s")]
        }
        "DetachVolume" | "DeleteVolume" => {
            &[("plugin", "s"), ("external-id", "s"), ("capabilities", "aa{sv}")]
        }
        "Claim" => &[
            ("mode", "s"),
            ("access-mode", "s"),
            ("attachment-mode", "s"),
            ("node", "s"),
            ("wait-usec", "t"),
        ],
        "Release" => &[("force", "b"), ("node", "s")],
        "ListClaims" => &[
            ("namespace", "s"),
            ("volume", "s"),
            ("consumer", "s"),
            ("node", "s"),
            ("past", "b"),
            ("after", "s"),
            ("max", "u"),
        ],
        "Reconcile" => &[("dry-run", "b"), ("remove-orphans", "b"), ("new-journal", "b")],
        "UnregisterPlugin" => &[("instance", "s"), ("force", "b")],
        "RegisterPlugin" => &[
            ("supervision", "s"),
            ("argv", "as"),
            ("environment", "a{ss}"),
            ("credentials", "as"),
            ("socket", "s"),
            ("instance", "s"),
            ("plugin-root", "s"),
            ("plugin-view", "s"),
            ("log", "s"),
            ("profile", "s"),
            ("propagation", "s"),
            ("network", "s"),
        ],
        "Exec" => &[("tty", "b"), ("rows", "q"), ("columns", "q"), ("directory", "s")],
        _ => &[],
    };
    common.into_iter().chain(own.iter().copied()).collect()
}

fn bad_strings() -> Vec<String> {
    ["a\nb", "\n", "a\u{1}b", "\u{1b}[31m", "\u{7f}", "a\tb", "\u{85}"]
        .map(str::to_owned)
        .into_iter()
        .chain(["x".repeat(4096), "é".repeat(4096), "a b ".repeat(1024)])
        .collect()
}

/// Whether an error repeats more than 256 bytes of what was sent.
fn repeats(error: &(String, String), sent: &str) -> bool {
    error.1.as_bytes().windows(257).any(|shown| sent.as_bytes().windows(257).any(|sent| sent == shown))
}

#[test]
fn every_string_argument_of_every_method() {
    world(async |w| {
        let (client, peer, served) = busy(w).await;
        let before = everything(w, &client).await;
        let mut tried = 0;
        for (path, member, arguments) in methods(&served) {
            // A list's token is the plugin's own, and goes back to it as it came.
            let checked = |i: &usize| arguments[*i].1 == "s" && arguments[*i].0 != "token";
            for place in (0..arguments.len()).filter(checked) {
                for bad in bad_strings() {
                    let mut values = good(&member.name, &arguments);
                    values[place] = text(&bad);
                    let case = format!("{} {}={bad:.20?}", member.name, arguments[place].0);
                    let answer = call(&peer, path, &member.interface, &member.name, values).await;
                    let Err(error) = answer else { panic!("{case} was taken") };
                    assert_eq!(error.0, INVALID, "{case}: {error:?}");
                    assert!(!error.1.contains('\n'), "{case}: not repeated as it is: {error:?}");
                    assert!(!repeats(&error, &bad), "{case}: {error:?}");
                    tried += 1;
                }
            }
        }
        // Plugin ids become paths and unit names: traversal is not in their alphabet.
        for bad in
            ["..", "a/b", "../p", "/etc", "a..b", ".p", "-p", "p.", "", "p p", "p%n", "ü", &"x".repeat(64)]
        {
            for (path, member, arguments) in methods(&served) {
                let Some(place) = arguments.iter().position(|(name, _)| name == "id") else { continue };
                if !member.name.ends_with("Plugin") {
                    continue;
                }
                let mut values = good(&member.name, &arguments);
                values[place] = text(bad);
                let error = call(&peer, path, &member.interface, &member.name, values).await.unwrap_err();
                assert_eq!(error.0, INVALID, "{} {bad:?}: {error:?}", member.name);
                tried += 1;
            }
        }
        count("bad strings refused", tried);
        assert_eq!(everything(w, &client).await, before, "nothing is changed");
    });
}

#[test]
fn every_option() {
    world(async |w| {
        let (client, peer, served) = busy(w).await;
        let before = everything(w, &client).await;
        let (mut unknown, mut strings, mut types) = (0, 0, 0);
        for (path, member, arguments) in methods(&served) {
            if !arguments.iter().any(|(_, of)| of == "a{sv}") {
                continue;
            }
            let name = &member.name;
            let refused = async |entries: Vec<(&str, Variant<'static>)>, case: &str| {
                let values = with_options(name, &arguments, entries);
                let answer = call(&peer, path, &member.interface, name, values).await;
                let Err(error) = answer else { panic!("{name} {case}: was taken") };
                assert_eq!(error.0, INVALID, "{name} {case}: {error:?}");
            };
            for key in ["no-such-key", "", "Deadline-Usec", "deadline_usec", "read-only\n", "../x"] {
                refused(vec![(key, text("x"))], key).await;
                unknown += 1;
            }
            for (key, of) in keys(name) {
                // Which of the common keys a method has is its own affair; a bad one is never taken.
                if of == "s" {
                    for bad in bad_strings() {
                        refused(vec![(key, text(&bad))], &format!("{key}={bad:.20?}")).await;
                        strings += 1;
                    }
                }
                for wrong in ["s", "b", "u", "t", "x", "as", "a{ss}", "a{sv}", "aa{sv}", "o"] {
                    if wrong != of {
                        refused(vec![(key, value(wrong))], &format!("{key} as {wrong}")).await;
                        types += 1;
                    }
                }
            }
        }
        let refused = async |key: &str, value: Variant<'static>, case: &str| {
            let (_, _, arguments) = methods(&served).into_iter().find(|(_, m, _)| m.name == "Mount").unwrap();
            let values = with_options("Mount", &arguments, vec![(key, value)]);
            let error = call(&peer, MANAGER_PATH, MANAGER, "Mount", values).await.unwrap_err();
            assert_eq!(error.0, INVALID, "{key} {case}: {error:?}");
        };
        // co_rule_11: what the plugin must accept is bounded.
        let map = |entries: Vec<(String, String)>| Variant::from(BTreeMap::from_iter(entries));
        for key in ["volume-context", "publish-context"] {
            refused(key, map(vec![("k".to_owned(), "v".repeat(5000))]), "over 4 KiB").await;
            refused(key, map(vec![("a\nb".to_owned(), "v".to_owned())]), "a key with newline").await;
            refused(key, map(vec![("k".repeat(129), "v".to_owned())]), "a key over 128 bytes").await;
        }
        for flags in [vec!["x".repeat(5000)], vec!["a\nb".to_owned()], vec!["f".to_owned(); 3000]] {
            refused("mount-flags", Variant::from(flags), "too much or with newline").await;
        }
        for (key, word) in [
            ("access-mode", "read-write"),
            ("attachment-mode", "filesystem"),
            ("restore", "sometimes"),
            ("propagation", "shared"),
            ("fs-type", "../ext4"),
            ("target", "/a/../b"),
            ("target", "a"),
            ("credential", "../x"),
            ("credential", "a/b"),
            ("plugin", "../p"),
            ("external-id", ""),
        ] {
            refused(key, text(word), word).await;
        }
        count("unknown options refused", unknown);
        count("bad strings in options refused", strings);
        count("options of a wrong type refused", types);
        assert_eq!(everything(w, &client).await, before, "nothing is changed");
    });
}

#[test]
fn wrong_types_and_unknown_members_are_refused() {
    world(async |w| {
        let (client, peer, served) = busy(w).await;
        let before = everything(w, &client).await;
        let mut tried = 0;
        for (path, member, arguments) in methods(&served) {
            for place in 0..arguments.len() {
                for wrong in ["s", "u", "b", "a{ss}", "as"] {
                    if wrong == arguments[place].1 {
                        continue;
                    }
                    let mut values = good(&member.name, &arguments);
                    values[place] = value(wrong);
                    let error = call(&peer, path, &member.interface, &member.name, values).await.unwrap_err();
                    assert!(
                        [INVALID_ARGS, INVALID].contains(&error.0.as_str()),
                        "{}: {error:?}",
                        member.name
                    );
                    tried += 1;
                }
            }
            if !arguments.is_empty() {
                let error = call(&peer, path, &member.interface, &member.name, Vec::new()).await.unwrap_err();
                assert!([INVALID_ARGS, INVALID].contains(&error.0.as_str()), "{}: {error:?}", member.name);
                tried += 1;
            }
        }
        // Members of the contract that are not due yet, and nonsense.
        for member in raw::members(csi_proto::DBUS_INTERFACE_XML) {
            let MemberKind::Method(arguments) = &member.kind else { continue };
            if served.iter().any(|(_, m)| m.interface == member.interface && m.name == member.name) {
                continue;
            }
            let path = if member.interface == PLUGIN { PLUGIN_PATH } else { MANAGER_PATH };
            let values = arguments.iter().map(|(_, of)| value(of)).collect();
            let error = call(&peer, path, &member.interface, &member.name, values).await.unwrap_err();
            assert_eq!(error.0, "org.freedesktop.DBus.Error.UnknownMethod", "{}: {error:?}", member.name);
            tried += 1;
        }
        for (path, interface, member) in [
            (MANAGER_PATH, MANAGER, "Nonsense"),
            (MANAGER_PATH, "org.example.Nonsense", "Mount"),
            ("/nowhere", MANAGER, "ListPlugins"),
        ] {
            let error = call(&peer, path, interface, member, Vec::new()).await.unwrap_err();
            assert!(error.0.starts_with("org.freedesktop.DBus.Error.Unknown"), "{path} {member}: {error:?}");
            tried += 1;
        }
        let nobody_knows = "/org/csid1/plugin/nobody_2dknows";
        let error = call(&peer, nobody_knows, PLUGIN, "Probe", vec![value("a{sv}")]).await.unwrap_err();
        let due = ["org.csid1.Error.NotFound", "org.freedesktop.DBus.Error.UnknownObject"];
        assert!(due.contains(&error.0.as_str()), "{error:?}");
        // Properties are read and never set.
        for (path, member) in &served {
            if member.kind == MemberKind::Property {
                let values =
                    vec![text(&member.interface), text(&member.name), Variant::Variant(Box::new(text("x")))];
                let error = call(&peer, path, raw::PROPERTIES, "Set", values).await.unwrap_err();
                assert!(error.0.starts_with("org.freedesktop.DBus.Error."), "{}: {error:?}", member.name);
                tried += 1;
            }
        }
        count("calls with wrong types, members and properties refused", tried);
        assert_eq!(everything(w, &client).await, before, "nothing is changed");
    });
}

#[test]
fn every_kind_of_descriptor_that_is_no_secrets() {
    world(async |w| {
        let (client, peer, served) = busy(w).await;
        let before = everything(w, &client).await;
        let (_, _, arguments) = methods(&served).into_iter().find(|(_, m, _)| m.name == "Mount").unwrap();
        let memfd = |content: &[u8], seal: bool| -> OwnedFd {
            use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
            let fd =
                memfd_create("secrets", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC).expect("a memfd");
            let mut file = fs::File::from(fd);
            file.write_all(content).expect("the content");
            if seal {
                let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE | SealFlags::SEAL;
                fcntl_add_seals(&file, seals).expect("the seals");
            }
            file.into()
        };
        let huge: OwnedFd = {
            use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
            let fd = memfd_create("huge", MemfdFlags::ALLOW_SEALING).expect("a memfd");
            let file = fs::File::from(fd);
            file.set_len(1 << 30).expect("1 GiB");
            fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE)
                .expect("the seals");
            file.into()
        };
        let (silent, _writer) = std::io::pipe().expect("a pipe");
        let (endless, mut zero) = std::io::pipe().expect("a pipe");
        std::thread::spawn(move || while zero.write_all(&[b' '; 65536]).is_ok() {});
        let cases: Vec<(&str, OwnedFd)> = vec![
            ("a directory", fs::File::open("/").unwrap().into()),
            ("a regular file", fs::File::create_new(w.path("regular")).unwrap().into()),
            ("/dev/zero", fs::File::open("/dev/zero").unwrap().into()),
            ("a socket", UnixStream::pair().unwrap().0.into()),
            ("a memfd that is not sealed", memfd(br#"{"a":"b"}"#, false)),
            ("no JSON", memfd(b"hunter2", true)),
            ("not an object", memfd(br#"["hunter2"]"#, true)),
            ("not of strings", memfd(br#"{"a":1}"#, true)),
            ("co_rule_17: a key of other characters", memfd(br#"{"a b":"c"}"#, true)),
            ("an endless pipe", endless.into()),
            ("1 GiB", huge),
            ("a pipe without a writer's word", silent.into()),
        ];
        let number = cases.len();
        for (case, fd) in cases {
            let begun = Instant::now();
            let secrets = Variant::Fd(zbus::Fd::from(fd));
            let values = with_options("Mount", &arguments, vec![("secrets", secrets)]);
            let error = call(&peer, MANAGER_PATH, MANAGER, "Mount", values).await.unwrap_err();
            assert_eq!(error.0, INVALID, "{case}: {error:?}");
            assert!(!error.1.contains("hunter2"), "{case}: {error:?}");
            assert!(begun.elapsed() < Duration::from_secs(15), "{case}: {:?}", begun.elapsed());
        }
        fs::remove_file(w.path("regular")).unwrap();
        count("descriptors refused", number);
        assert_eq!(everything(w, &client).await, before, "nothing is changed");
    });
}

#[test]
fn traversal_in_names_is_only_data() {
    world(async |w| {
        let (client, _, _) = busy(w).await;
        let outside = || {
            let mut paths = csid_tests::kernel::tree(&w.dir).unwrap();
            paths.retain(|p| !["state", "run", "plugins"].iter().any(|d| p.starts_with(w.path(d))));
            paths
        };
        let before = outside();
        let names =
            ["..", "../../../etc", "/etc/passwd", "a/b", "vol[0]", "~", "$HOME", "%n", "-rf", ".", "ü 漢"];
        for name in names {
            let options = MountOptions { tag: Some(name.to_owned()), ..shared(name) };
            let answer = client.mount(name, name, name, options).await.unwrap();
            // The mount table has paths as they resolve.
            let source = PathBuf::from(&answer.source);
            assert_eq!(csid_tests::kernel::stacked(&source).unwrap(), 1, "{name}: no detour");
            assert!(source.starts_with(w.path("state/plugins/p/live/publish")), "{name}: {source:?}");
            assert!(!answer.source.contains("/../"), "{name}: {source:?}");
            assert_eq!(outside(), before, "{name}");
            let row = client.list_mounts(MountFilter { volume: Some(name.to_owned()), ..Default::default() });
            assert_eq!(row.await.unwrap()[0].consumer, name);
            let options = UnmountOptions { tag: Some(name.to_owned()), ..UnmountOptions::default() };
            client.unmount(name, name, name, options).await.unwrap();
        }
        count("names that look like paths", names.len());
        unmount(&client, "in-use", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}
