use super::*;
use crate::Kind;
use crate::config::Directories;
use crate::error::Error;
use crate::plugin::place::{HASH_BYTES, Location};

fn external() -> PluginSpec {
    PluginSpec {
        supervision: Supervision::External,
        argv: Vec::new(),
        environment: BTreeMap::new(),
        credentials: Vec::new(),
        unit: None,
        socket: Some("/run/p/csi.sock".into()),
        instance: None,
        plugin_root: None,
        plugin_view: None,
        log: Log::Journal,
        rpc_deadline: None,
        node_calls_at_once: None,
        ..PluginSpec::default()
    }
}

fn managed() -> PluginSpec {
    PluginSpec {
        supervision: Supervision::Managed,
        argv: vec!["/usr/bin/true".into(), "$HOME %n".into()],
        socket: None,
        ..external()
    }
}

fn unit(name: &str) -> PluginSpec {
    PluginSpec { supervision: Supervision::Unit, unit: Some(name.into()), ..external() }
}

fn in_namespace() -> PluginSpec {
    PluginSpec {
        network: Network::Namespace("storage".into()),
        network_prestart: vec!["/usr/bin/true".into(), "$HOME".into()],
        network_poststop: vec!["/usr/bin/true".into()],
        ..managed()
    }
}

fn environment(key: &str, value: &str) -> PluginSpec {
    PluginSpec { environment: [(key.into(), value.into())].into(), ..managed() }
}

#[test]
fn ids_are_letters_digits_and_inner_marks() {
    for good in ["a", "Z9", "csi.example.com", "a-b_c", &"x".repeat(63)] {
        validate_id(good).unwrap();
    }
    for wrong in
        ["", ".", "..", "a..b", "-a", "a-", "a/b", "../a", "a\n", "a\0", "ä", "a b", "_", &"x".repeat(64)]
    {
        assert_eq!(validate_id(wrong).unwrap_err().kind, Kind::InvalidArgument, "{wrong:?}");
    }
}

#[test]
fn good_specs() {
    let unix = "unix:///run/x/y.sock";
    let table = [
        external(),
        managed(),
        environment("_A9", "any = thing"),
        unit("my-driver.service"),
        unit(r"csi@a\x2db.service"),
        PluginSpec { plugin_root: Some("/srv/csi".into()), ..unit("a.b_c:d.service") },
        environment("CSI_ENDPOINT", unix),
        PluginSpec { instance: Some("0123456789abcdef".into()), ..managed() },
        PluginSpec { instance: Some("Node_1.b-2".into()), ..managed() },
        PluginSpec { instance: Some("x".repeat(64)), ..managed() },
        PluginSpec { credentials: vec!["key".into(), "csid.a:/etc/key".into()], ..managed() },
        PluginSpec { plugin_root: Some("/srv/csi".into()), plugin_view: Some("/csi".into()), ..external() },
        PluginSpec { rpc_deadline: Some("5min".into()), ..external() },
        PluginSpec { socket: Some(format!("/{}.sock", "x".repeat(101))), ..external() },
        PluginSpec { profile: Some(Profile::NodeFuse), network: Network::None, ..managed() },
        PluginSpec { propagation: Some(Propagation::Private), ..managed() },
        PluginSpec { network_poststop: Vec::new(), ..in_namespace() },
        in_namespace(),
    ];
    for spec in table {
        spec.validate("a").unwrap_or_else(|error| panic!("{spec:?}: {error}"));
    }
}

#[test]
fn wrong_specs() {
    let some = |text: &str| Some(text.to_owned());
    let argv = |program: &str| PluginSpec { argv: vec![program.into()], ..managed() };
    let socket = |path: &str| PluginSpec { socket: some(path), ..external() };
    let table = [
        ("an external plugin needs socket", PluginSpec { socket: None, ..external() }),
        ("socket is not", socket("run/a.sock")),
        ("socket is not", socket("/run/a.socket")),
        ("socket is not", socket("/run/../a.sock")),
        ("socket is not", socket("/run/a\n.sock")),
        ("socket is not", socket(&format!("/{}.sock", "x".repeat(102)))),
        ("for managed plugins", PluginSpec { argv: vec!["/bin/true".into()], ..external() }),
        ("for managed plugins", PluginSpec { credentials: vec!["a".into()], ..external() }),
        ("for external plugins", PluginSpec { socket: some("/run/a.sock"), ..managed() }),
        ("needs unit", PluginSpec { unit: None, ..unit("") }),
        ("not the name of a service", unit("driver.socket")),
        ("not the name of a service", unit(".service")),
        ("not the name of a service", unit("a/b.service")),
        ("not the name of a service", unit(&format!("{}.service", "x".repeat(248)))),
        ("is a template", unit("csi@.service")),
        ("csid's own", unit("csid.service")),
        ("csid's own", unit("csi-plugin-local-default.service")),
        ("needs socket", PluginSpec { socket: None, ..unit("a.service") }),
        ("for managed plugins", PluginSpec { argv: vec!["/bin/true".into()], ..unit("a.service") }),
        ("for supervision = \"unit\"", PluginSpec { unit: some("a.service"), ..external() }),
        ("for supervision = \"unit\"", PluginSpec { unit: some("a.service"), ..managed() }),
        ("needs argv", PluginSpec { argv: Vec::new(), ..managed() }),
        ("argv[0]", argv("true")),
        ("argv[0]", argv("/usr/../bin/true")),
        ("argv[0]", argv("")),
        ("argv holds control", PluginSpec { argv: vec!["/bin/true".into(), "a\nb".into()], ..managed() }),
        ("argv is longer", PluginSpec { argv: vec!["/bin/true".into(), "a".repeat(70_000)], ..managed() }),
        ("an environment key", environment("A-B", "")),
        ("an environment key", environment("", "")),
        ("an environment key", environment("9A", "")),
        ("reserved", environment("CSI_X", "")),
        ("control characters", environment("A", "a\nb")),
        ("environment is longer than 65536 bytes", environment("A", &"a".repeat(70_000))),
        ("CSI_ENDPOINT", environment("CSI_ENDPOINT", "tcp://127.0.0.1:1")),
        ("CSI_ENDPOINT", environment("CSI_ENDPOINT", "unix://run/a.sock")),
        ("a credential", PluginSpec { credentials: vec!["a/b".into()], ..managed() }),
        ("a credential", PluginSpec { credentials: vec!["..".into()], ..managed() }),
        ("credentials: a", PluginSpec { credentials: vec!["a:b".into()], ..managed() }),
        ("instance", PluginSpec { instance: some(""), ..external() }),
        ("instance", PluginSpec { instance: some(".a"), ..external() }),
        ("instance", PluginSpec { instance: some("a/b"), ..external() }),
        ("instance", PluginSpec { instance: Some("x".repeat(65)), ..external() }),
        ("plugin-root", PluginSpec { plugin_root: some("csi"), ..external() }),
        ("plugin-root", PluginSpec { plugin_root: some("/csi/../etc"), ..external() }),
        ("plugin-view", PluginSpec { plugin_view: some("/csi\n"), ..external() }),
        ("for managed plugins", PluginSpec { profile: Some(Profile::Controller), ..external() }),
        ("for managed plugins", PluginSpec { propagation: Some(Propagation::Bidirectional), ..external() }),
        ("for managed plugins", PluginSpec { network: Network::None, ..external() }),
        ("for managed plugins", PluginSpec { network_prestart: vec!["/bin/true".into()], ..external() }),
        ("network-prestart needs", PluginSpec { network: Network::None, ..in_namespace() }),
        ("network-poststop needs", PluginSpec { network_prestart: Vec::new(), ..in_namespace() }),
        ("network-prestart[0]", PluginSpec { network_prestart: vec!["ip".into()], ..in_namespace() }),
        ("network-poststop[0]", PluginSpec { network_poststop: vec!["/../ip".into()], ..in_namespace() }),
        (
            "network-poststop holds control",
            PluginSpec { network_poststop: vec!["/bin/ip".into(), "a\0".into()], ..in_namespace() },
        ),
        (
            "network-prestart is longer",
            PluginSpec { network_prestart: vec!["/bin/ip".into(), "a".repeat(70_000)], ..in_namespace() },
        ),
        ("rpc-deadline", PluginSpec { rpc_deadline: some("soon"), ..external() }),
        ("node-calls-at-once", PluginSpec { node_calls_at_once: Some(0), ..external() }),
        ("node-calls-at-once", PluginSpec { node_calls_at_once: Some(1025), ..external() }),
    ];
    for (expected, spec) in table {
        let error = Error::from(spec.validate("a").expect_err(expected));
        assert_eq!(error.kind, Kind::InvalidArgument);
        assert!(error.message.contains(expected), "{expected}: {error}");
    }
    let dashes = format!("a{}b", "-".repeat(61));
    assert!(matches!(managed().validate(&dashes), Err(SpecError::UnitName { limit: 255, .. })));
    external().validate(&dashes).unwrap();
}

#[test]
fn a_program_that_is_not_there_is_refused() {
    let spec = PluginSpec { argv: vec!["/usr/bin/no-such-program".into()], ..managed() };
    spec.validate("a").unwrap();
    assert!(spec.check_start().unwrap_err().to_string().contains("/usr/bin/no-such-program"));
    managed().check_start().unwrap();
    external().check_start().unwrap();
    in_namespace().check_start().unwrap();
    let spec = PluginSpec { network_poststop: vec!["/usr/bin/no-such-program".into()], ..in_namespace() };
    assert!(spec.check_start().unwrap_err().to_string().starts_with("network-poststop[0]"));
}

#[test]
fn a_default_that_is_written_out_changes_nothing() {
    let written = PluginSpec { instance: Some("default".into()), ..external() };
    assert!(external().same(&written));
    assert!(!external().same(&PluginSpec { plugin_view: Some("/csi".into()), ..external() }));
    assert!(managed().same_process(&PluginSpec { plugin_view: Some("/csi".into()), ..managed() }));
    assert!(!managed().same_process(&environment("A", "b")));
    let written = PluginSpec { propagation: Some(Propagation::Bidirectional), ..managed() };
    assert!(managed().same(&written) && managed().same_process(&written));
    for changed in [
        PluginSpec { profile: Some(Profile::NodeNet), ..managed() },
        PluginSpec { propagation: Some(Propagation::Private), ..managed() },
        PluginSpec { network: Network::None, ..managed() },
        in_namespace(),
    ] {
        assert!(!managed().same(&changed) && !managed().same_process(&changed), "{changed:?}");
        assert!(changed.needs_root());
    }
    let other = PluginSpec { network_prestart: vec!["/usr/bin/false".into()], ..in_namespace() };
    assert!(!in_namespace().same_process(&other));
}

#[test]
fn unset_keys_are_not_serialized() {
    let plain = serde_json::to_string(&managed()).unwrap();
    for key in ["profile", "propagation", "network"] {
        assert!(!plain.contains(key), "an older csid reads it too: {plain}");
    }
    let all = PluginSpec {
        profile: Some(Profile::NodeBlock),
        propagation: Some(Propagation::HostToTask),
        ..in_namespace()
    };
    for spec in [managed(), all] {
        let text = serde_json::to_string(&spec).unwrap();
        assert_eq!(serde_json::from_str::<PluginSpec>(&text).unwrap(), spec, "{text}");
    }
    for wrong in [
        r#"profile = "node""#,
        r#"propagation = "shared""#,
        r#"network = "bridge""#,
        r#"network = "netns:../x""#,
        r#"network-prestart = "/bin/true""#,
    ] {
        let file = format!("supervision = \"managed\"\nargv = [\"/bin/true\"]\n{wrong}\n");
        let error = toml::from_str::<PluginSpec>(&file).unwrap_err().to_string();
        assert!(error.contains("line 3"), "{error}");
    }
}

/// A caller may have put a secret into the wrong key.
#[test]
fn possible_secret_of_a_spec_is_not_quoted() {
    let some = || "hunter2".to_owned();
    let long = || "hunter2".repeat(10_000);
    for spec in [
        PluginSpec { argv: vec![some()], ..managed() },
        PluginSpec { argv: vec!["/bin/true".into(), "hunter2\n".into()], ..managed() },
        PluginSpec { argv: vec!["/bin/true".into(), long()], ..managed() },
        environment("A", "hunter2\n"),
        environment("A", &long()),
        environment("A=hunter2", ""),
        PluginSpec { credentials: vec!["key=hunter2".into()], ..managed() },
        PluginSpec { network_prestart: vec![some()], ..in_namespace() },
    ] {
        let error = spec.validate("a").unwrap_err().to_string();
        assert!(!error.contains("hunter2"), "{error}");
    }
}

#[test]
fn error_of_a_spec_quotes_256_bytes_of_a_value() {
    let long = || format!("a{}", "\u{1}".repeat(100_000));
    for spec in [
        PluginSpec { socket: Some(long()), ..external() },
        PluginSpec { plugin_root: Some(long()), ..external() },
        environment("CSI_ENDPOINT", &"x".repeat(60_000)),
        PluginSpec { unit: Some(long()), ..unit("") },
    ] {
        let error = spec.validate("a").unwrap_err().to_string();
        assert!(error.len() < 2_000 && !error.contains(char::is_control), "{error:.3000}");
    }
    let id = validate_id(&long()).unwrap_err().message;
    assert!(id.len() < 2_000 && !id.contains(char::is_control), "{id:.3000}");
}

#[test]
fn distrusted_program_is_the_source_of_a_spec_error() {
    let spec = PluginSpec { argv: vec!["/usr/bin/no-such-program".into()], ..managed() };
    let error = spec.check_start().unwrap_err();
    let cause = std::error::Error::source(&error).unwrap();
    assert!(matches!(cause.downcast_ref(), Some(trust::Distrust::Look { .. })), "{cause}");
    assert_eq!(error.to_string(), format!("argv[0]: {cause}"));
}

/// It would run as root, which reaches every other socket and may signal csid.
#[test]
fn controller_profile_has_no_endpoint_of_its_own() {
    let own = |profile| PluginSpec { profile, ..environment("CSI_ENDPOINT", "unix:///srv/p/csi.sock") };
    own(None).check_start().unwrap();
    own(Some(Profile::NodeNet)).check_start().unwrap();
    let error = Error::from(own(Some(Profile::Controller)).check_start().unwrap_err());
    assert_eq!(error.kind, Kind::InvalidArgument);
    assert!(error.message.contains("CSI_ENDPOINT") && error.message.contains("controller"), "{error}");
    PluginSpec { profile: Some(Profile::Controller), ..managed() }.check_start().unwrap();
}

#[test]
fn co_rules_1_2_and_5_the_socket_and_its_endpoint() {
    let directories =
        Directories { state: "/var/lib/csid".into(), runtime: "/run/csid".into(), configuration: "/".into() };
    let place = Location::of(&directories, "my-plugin.1", &managed());
    assert_eq!(place.unit, "csi-plugin-my\\x2dplugin.1-default.service");
    assert_eq!(place.socket, Path::new("/run/csid/plugins/my-plugin.1/default/csi.sock"));
    assert_eq!(place.directory.as_deref(), place.socket.parent());
    assert_eq!(place.root, Path::new("/var/lib/csid/plugins/my-plugin.1"));
    assert_eq!(place.view, place.root);
    assert_eq!(
        place.environment(&managed()).get("CSI_ENDPOINT").map(String::as_str),
        Some("unix:///run/csid/plugins/my-plugin.1/default/csi.sock")
    );
    let longest = Location::of(
        &directories,
        &"x".repeat(63),
        &PluginSpec { instance: Some("y".repeat(16)), ..managed() },
    );
    assert!(longest.socket.as_os_str().len() <= SOCKET_BYTES, "{}", longest.socket.display());
    assert!(longest.socket.ends_with(Path::new(&"y".repeat(16)).join("csi.sock")));

    let of = |instance: &str| {
        let spec = PluginSpec { instance: Some(instance.to_owned()), ..managed() };
        Location::of(&directories, &"x".repeat(63), &spec)
    };
    let [one, other] = ["a", "b"].map(|letter| of(&letter.repeat(64)));
    for place in [&one, &other] {
        let name = place.directory.as_deref().and_then(Path::file_name).unwrap().to_str().unwrap();
        assert!(name.starts_with('+') && name.len() == HASH_BYTES, "{name}");
        assert!(place.socket.as_os_str().len() <= SOCKET_BYTES, "{}", place.socket.display());
    }
    assert_ne!(one.socket, other.socket);
    assert_eq!(one.socket, of(&"a".repeat(64)).socket);
    assert_eq!(of("v1-2").unit, format!("csi-plugin-{}-v1\\x2d2.service", "x".repeat(63)));

    let own = environment("CSI_ENDPOINT", "unix:///srv/x.sock");
    let place = Location::of(&directories, "a", &own);
    assert_eq!((place.socket.to_str(), place.directory.as_deref()), (Some("/srv/x.sock"), None));
    assert_eq!(place.environment(&own), own.environment);
}
