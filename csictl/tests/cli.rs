//! The program itself against a stand-in for csid: its output and exit codes.

use std::{
    collections::HashMap,
    io::Read,
    os::fd::AsFd,
    process::Stdio,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::Duration,
};

use serde_json::Value;
use tokio::{net::UnixListener, process::Command, time::timeout};
use zbus::{
    DBusError, Guid, Message, OwnedObjectPath, OwnedVariant, Variant, connection::Builder, interface,
    message::Header, names::ErrorName,
};

type Dict = HashMap<String, OwnedVariant>;

struct Failure(&'static str, &'static str, Dict);

impl DBusError for Failure {
    fn create_reply(&self, header: &Header<'_>) -> zbus::Result<Message> {
        Message::error(header, self.0).build(&(self.1, &self.2))
    }

    fn name(&self) -> ErrorName<'_> {
        ErrorName::from_static_str_unchecked(self.0)
    }

    fn description(&self) -> Option<&str> {
        Some(self.1)
    }
}

fn dict<const N: usize>(entries: [(&str, Variant<'static>); N]) -> Dict {
    entries.into_iter().map(|(key, value)| (key.to_owned(), value.try_into_owned().unwrap())).collect()
}

#[derive(Clone, Default)]
struct Csid {
    mounting: Arc<AtomicBool>,
    /// Volumes, and whether by force.
    released: Arc<Mutex<Vec<String>>>,
    /// Each call's flags and times, in the order of their names.
    given: Arc<Mutex<Vec<String>>>,
    /// The access and attachment modes of the capabilities that are to be validated.
    validated: Arc<Mutex<Vec<String>>>,
}

impl Csid {
    fn note(&self, options: &Dict) {
        let mut given: Vec<_> = options
            .iter()
            .filter_map(|(key, value)| match &**value {
                Variant::Bool(value) => Some(format!("{key}={value}")),
                Variant::U64(value) => Some(format!("{key}={value}")),
                _ => None,
            })
            .collect();
        given.sort();
        self.given.lock().unwrap().push(given.join(" "));
    }
}

#[interface(name = "org.csid1.Manager")]
impl Csid {
    async fn mount(
        &self,
        _namespace: String,
        volume: String,
        _consumer: String,
        options: Dict,
    ) -> Result<(String, bool), Failure> {
        assert!(options.contains_key("operation-id"), "csictl makes one when none is given");
        self.note(&options);
        match volume.as_str() {
            "held" => {
                let holders = Variant::from(vec!["job-1", "job\u{7}-2"]).try_into_owned().unwrap();
                let details = HashMap::from([("holders".to_owned(), holders)]);
                Err(Failure("org.csid1.Error.ClaimConflict", "volume default/held is in use", details))
            }
            "slow" => {
                self.mounting.store(true, SeqCst);
                std::future::pending().await
            }
            _ => Ok(("/published/1".to_owned(), false)),
        }
    }

    fn adopt_mount(
        &self,
        _namespace: String,
        volume: String,
        _consumer: String,
        options: Dict,
    ) -> Result<(String, bool), Failure> {
        let path = |key: &str| options.get(key).map(|path| <&str>::try_from(&**path).unwrap().to_owned());
        let published = path("published-path").unwrap();
        match path("staging-path").as_deref() {
            Some("/s") if volume == "v" => Ok((published, false)),
            _ => Err(Failure("org.csid1.Error.NotFound", "nothing is mounted there", Dict::new())),
        }
    }

    async fn claim(
        &self,
        _n: String,
        volume: String,
        _consumer: String,
        options: Dict,
    ) -> Result<Dict, Failure> {
        assert!(options.contains_key("operation-id"));
        match volume.as_str() {
            "held" => Err(Failure("org.csid1.Error.ClaimConflict", "it is claimed", Dict::new())),
            _ => {
                Ok(dict([("id", volume.into()), ("namespace", "default".into()), ("state", "taken".into())]))
            }
        }
    }

    fn release(&self, _namespace: String, volume: String, _consumer: String, options: Dict) {
        self.note(&options);
        self.released.lock().unwrap().push(format!("{volume} {}", options.contains_key("force")));
    }

    fn unmount(&self, _namespace: String, _volume: String, _consumer: String, options: Dict) {
        self.note(&options);
    }

    fn attach_volume(
        &self,
        _namespace: String,
        _volume: String,
        node: String,
        options: Dict,
    ) -> HashMap<String, String> {
        self.note(&options);
        [("device".to_owned(), format!("hunter2 of {node}"))].into()
    }

    fn detach_volume(&self, _namespace: String, _volume: String, _node: String, options: Dict) {
        self.note(&options);
    }

    fn deregister_volume(&self, _namespace: String, _volume: String, options: Dict) {
        self.note(&options);
    }

    fn list_claims(&self, _filter: Dict) -> Vec<Dict> {
        let claim = |volume: &'static str| {
            let of = [("namespace", "default"), ("volume", volume), ("consumer", "job"), ("state", "taken")];
            dict(of.map(|(key, value)| (key, value.into())))
        };
        vec![claim("v"), claim("of-another-plugin")]
    }

    fn list_volumes(&self, _filter: Dict) -> Vec<Dict> {
        let of = [("namespace", "default"), ("id", "v"), ("plugin", "p"), ("provider", "P")];
        let mut volume = dict(of.map(|(key, value)| (key, value.into())));
        volume.extend(dict([("write-claims", vec!["job"].into()), ("read-claims", vec!["reader"].into())]));
        vec![volume]
    }

    fn explain(&self, _namespace: String, _volume: String, _options: Dict) -> Dict {
        dict([("waiting-for", "the mount of web, which is uncertain".into())])
    }

    fn list_mounts(&self, filter: Dict) -> Vec<Dict> {
        let of_volume: Option<&str> = filter.get("volume").and_then(|name| name.downcast_ref().ok());
        if of_volume == Some("tagged") {
            let of = [("consumer", "web"), ("tag", "blue"), ("state", "uncertain")];
            return vec![dict(of.map(|(key, value)| (key, value.into())))];
        }
        let of = [("namespace", "default"), ("volume", "v"), ("consumer", "web"), ("state", "mounted")];
        let mount = |plugin: &'static str| {
            let mut row = dict(of.map(|(key, value)| (key, value.into())));
            row.extend(dict([("plugin", plugin.into()), ("healthy", true.into())]));
            row
        };
        vec![mount("p"), mount("gone")]
    }

    fn list_plugins(&self) -> Vec<(String, String, String, String, OwnedObjectPath)> {
        let [id, state, provider, supervision] = ["p", "ready", "P", "external"].map(str::to_owned);
        vec![(id, state, provider, supervision, OwnedObjectPath::try_from("/org/csid1/plugin/p").unwrap())]
    }

    fn expand_volume(&self, _n: String, _v: String, least: u64, _most: u64, _options: Dict) -> (u64, bool) {
        (least, true)
    }

    fn validate_volume(&self, _n: String, _volume: String, mut options: Dict) -> (bool, String) {
        let asked = options.remove("capabilities").map(|asked| Vec::<Dict>::try_from(asked).unwrap());
        let mode = |capability: &Dict, key: &str| capability[key].downcast_ref::<&str>().unwrap().to_owned();
        let mut validated = self.validated.lock().unwrap();
        for capability in asked.iter().flatten() {
            validated.push(["access-mode", "attachment-mode"].map(|key| mode(capability, key)).join(" "));
        }
        (false, "no".to_owned())
    }

    fn create_snapshot(&self, _n: String, _volume: String, name: String, options: Dict) -> (Dict,) {
        self.note(&options);
        (dict([("id", format!("id-{name}").into())]),)
    }

    fn has_mount(&self, source: String) -> bool {
        source == "/published/1"
    }

    fn list_operations(&self) -> Vec<Dict> {
        Vec::new()
    }
}

/// A plugin whose lists have two pages, and which forgets the token of the first one once.
#[derive(Clone, Default)]
struct Plugin {
    forgot: Arc<AtomicBool>,
    endless: Arc<AtomicBool>,
    deleted: Arc<Mutex<Vec<String>>>,
    secrets: Arc<Mutex<Vec<String>>>,
}

impl Plugin {
    fn page(&self, token: &str, first: Dict, last: Dict) -> Result<(Vec<Dict>, String), Failure> {
        match token {
            "" => Ok((vec![first], "more".to_owned())),
            _ if self.endless.load(SeqCst) => Ok((vec![last], "more".to_owned())),
            _ if self.forgot.swap(true, SeqCst) => Ok((vec![last], String::new())),
            _ => {
                let details = dict([("grpc-code", 10u32.into()), ("retryable", true.into())]);
                Err(Failure("org.csid1.Error.PluginError", "ListVolumes: ABORTED: what token?", details))
            }
        }
    }
}

#[interface(name = "org.csid1.Plugin")]
impl Plugin {
    #[zbus(property)]
    fn id(&self) -> String {
        "p".to_owned()
    }

    fn get_capacity(&self, options: Dict) -> u64 {
        let mut keys: Vec<_> = options.keys().map(String::as_str).collect();
        keys.sort();
        if keys == ["capabilities", "parameters", "topology"] { 10 << 30 } else { 0 }
    }

    fn list_external_volumes(&self, token: String, _max: u32) -> Result<(Vec<Dict>, String), Failure> {
        let volume = |id: &'static str| dict([("external-id", id.into()), ("capacity", (1u64 << 20).into())]);
        self.page(&token, volume("vol-1"), volume("vol-2"))
    }

    fn list_snapshots(&self, options: Dict) -> Result<(Vec<Dict>, String), Failure> {
        if let Some(Variant::Fd(fd)) = options.get("secrets").map(|value| &**value) {
            let mut file = std::fs::File::from(fd.as_fd().try_clone_to_owned().unwrap());
            let mut text = String::new();
            file.read_to_string(&mut text).unwrap();
            self.secrets.lock().unwrap().push(text);
        }
        let snapshot = |id: &'static str| dict([("id", id.into()), ("ready", true.into())]);
        self.page(options["token"].downcast_ref().unwrap(), snapshot("snap-1"), snapshot("snap-2"))
    }

    fn delete_snapshot(&self, snapshot: String, _options: Dict) {
        self.deleted.lock().unwrap().push(snapshot);
    }
}

struct Fixture {
    directory: tempfile::TempDir,
    csid: Csid,
    plugin: Plugin,
}

impl Fixture {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(directory.path().join("csid.sock")).unwrap();
        let csid = Csid::default();
        let plugin = Plugin::default();
        let served = (csid.clone(), plugin.clone());
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let connection = Builder::unix_stream(stream.into_std().unwrap())
                    .server(Guid::generate().as_str())
                    .p2p()
                    .serve_at("/org/csid1", served.0.clone())
                    .serve_at("/org/csid1/plugin/p", served.1.clone())
                    .build()
                    .await
                    .unwrap();
                tokio::spawn(async move { connection.closed().await });
            }
        });
        Self { directory, csid, plugin }
    }

    fn command(&self, line: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_csictl"));
        command
            .args(line.split_whitespace())
            .env("CSID_SOCKET", self.directory.path().join("csid.sock"))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    /// Exit code, standard output, standard error.
    async fn run(&self, line: &str) -> (i32, String, String) {
        let output = timeout(Duration::from_secs(20), self.command(line).output()).await.unwrap().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
    }
}

#[tokio::test]
async fn mount_prints_the_path_and_nothing_else() {
    let f = Fixture::new();
    let mount = "mount default v job --plugin p --external-id x";
    assert_eq!(f.run(mount).await, (0, "/published/1\n".into(), String::new()));
    let (code, out, _) = f.run(&format!("{mount} --json")).await;
    let answer: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, &answer["source"], &answer["is-device"]), (0, &"/published/1".into(), &false.into()));
}

#[tokio::test]
async fn adopt_mount_gives_both_paths_and_prints_one() {
    let f = Fixture::new();
    let adopt = "adopt-mount default v job --plugin p --external-id x --published-path /p";
    assert_eq!(f.run(&format!("{adopt} --staging-path /s")).await, (0, "/p\n".into(), String::new()));
    let (code, out, err) = f.run(adopt).await;
    assert_eq!((code, out.as_str()), (1, ""));
    assert!(err.starts_with("csictl: NotFound: nothing is mounted there\n"), "{err}");
    assert!(err.contains("findmnt"), "{err}");
}

#[tokio::test]
async fn an_error_names_the_holders_and_the_next_step() {
    let f = Fixture::new();
    let (code, out, err) = f.run("mount default held job --plugin p --external-id x").await;
    assert_eq!((code, out.as_str()), (1, ""));
    let said = "csictl: ClaimConflict: volume default/held is in use\nHeld by: job-1, job\u{fffd}-2\n";
    assert!(err.starts_with(said), "{err}");
    assert!(err.contains("Unmount it there first"), "{err}");

    let (code, _, err) =
        f.run("mount default held job --plugin p --external-id x --json --operation-id o").await;
    let error: Value = serde_json::from_str(&err).unwrap();
    assert_eq!(code, 1);
    assert_eq!((&error["error"], &error["operation-id"]), (&"ClaimConflict".into(), &"o".into()));
    assert_eq!(error["details"]["holders"][0], "job-1");
}

#[tokio::test]
async fn exit_codes_are_those_of_the_man_page() {
    let f = Fixture::new();
    assert_eq!(f.run("has-mount /published/1").await, (0, String::new(), String::new()));
    assert_eq!(f.run("has-mount /published/2").await.0, 1);
    assert_eq!(f.run("has-mount").await.0, 2);
    assert_eq!(f.run("has-mount /published/1 --csid-socket /nonexistent/s").await.0, 3);
    let (code, _, err) = f.run("reload").await;
    assert_eq!(code, 1);
    assert!(err.contains("does not serve Reload") && err.contains("csictl status"), "{err}");
}

#[tokio::test]
async fn interrupted_command_prints_how_to_cancel() {
    for (signal, code) in [("INT", 130), ("TERM", 143)] {
        let f = Fixture::new();
        let child = f.command("mount default slow job --plugin p --external-id x").spawn().unwrap();
        let waiting = async {
            while !f.csid.mounting.load(SeqCst) {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        timeout(Duration::from_secs(10), waiting).await.unwrap();
        let pid = child.id().unwrap().to_string();
        assert!(Command::new("kill").args(["-s", signal, &pid]).status().await.unwrap().success());
        let output = timeout(Duration::from_secs(10), child.wait_with_output()).await.unwrap().unwrap();
        let err = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{err}");
        assert!(err.contains("goes on in csid") && err.contains("`csictl cancel csictl-"), "{err}");
    }
}

#[tokio::test]
async fn claims_show_their_provider() {
    let f = Fixture::new();
    let (code, out, err) = f.run("claim default v job").await;
    assert_eq!((code, err.as_str()), (0, ""));
    assert!(out.contains("volume: default v\n") && out.contains("state: taken\n"), "{out}");
    let (code, _, err) = f.run("claim default held job").await;
    assert_eq!(code, 1);
    assert!(err.contains("--queue TIME"), "{err}");

    let (_, out, _) = f.run("claims --json").await;
    let rows: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((&rows[0]["provider"], &rows[1]["provider"]), (&"P".into(), &"".into()));
    let (_, out, _) = f.run("claims --plugin p").await;
    assert!(out.contains("default    v       job") && !out.contains("of-another-plugin"), "{out}");
    let (_, out, _) = f.run("volume list").await;
    assert!(out.starts_with("NAMESPACE  VOLUME  PLUGIN  PROVIDER"), "{out}");
}

#[tokio::test]
async fn mounts_have_providers_and_plugins_consumers() {
    let f = Fixture::new();
    let (code, out, err) = f.run("mounts").await;
    assert_eq!((code, err.as_str()), (0, ""));
    let header = "NAMESPACE  VOLUME  CONSUMER  TAG  PLUGIN  PROVIDER  STATE";
    assert!(out.starts_with(header) && out.contains("web       -    p       P         mounted"), "{out}");
    let (_, out, _) = f.run("mounts --json").await;
    let rows: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((&rows[0]["provider"], &rows[1]["provider"]), (&"P".into(), &"".into()));

    let (code, out, err) = f.run("plugin show p").await;
    assert_eq!((code, err.as_str()), (0, ""));
    assert!(out.ends_with("consumers: job (default/v), reader (default/v), web (default/v)\n"), "{out}");
    let (_, out, _) = f.run("plugin show p --json").await;
    let shown: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(shown["consumers"][2]["consumer"], "web");
}

#[tokio::test]
async fn list_restarts_when_the_plugin_drops_its_token() {
    let f = Fixture::new();
    let (code, out, err) = f.run("plugin volumes p").await;
    assert_eq!((code, err.as_str()), (0, ""));
    assert_eq!(
        out,
        "EXTERNAL-ID  CAPACITY  NODES  NOTE\nvol-1        1MiB      -      -\nvol-2        1MiB      -      -\n"
    );
    let (_, out, _) = f.run("snapshots p --json").await;
    let rows: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((rows.as_array().unwrap().len(), &rows[1]["id"]), (2, &"snap-2".into()));

    let secrets = f.directory.path().join("secrets");
    std::fs::write(&secrets, r#"{"a":"b"}"#).unwrap();
    f.plugin.forgot.store(false, SeqCst);
    let (code, out, _) = f.run(&format!("snapshots p --secrets-file {}", secrets.display())).await;
    assert_eq!((code, out.lines().count()), (0, 3));
    assert_eq!(*f.plugin.secrets.lock().unwrap(), [r#"{"a":"b"}"#; 4], "each call has them");

    f.plugin.endless.store(true, SeqCst);
    let (code, _, err) = f.run("plugin volumes p").await;
    assert!(code == 1 && err.contains("the plugin's list has no end"), "{err}");
}

#[tokio::test]
async fn capacity_and_snapshot_deletion_reach_the_plugin() {
    let f = Fixture::new();
    let capacity =
        "plugin capacity p --access-mode single-node-writer --parameter k=v --topology zone=a,rack=1";
    assert_eq!(f.run(capacity).await, (0, "10GiB\n".into(), String::new()));
    let (_, out, _) = f.run("plugin capacity p --json").await;
    assert_eq!(serde_json::from_str::<Value>(&out).unwrap()["available"], 0);

    let (code, _, err) = f.run("plugin delete-snapshot p snap-1").await;
    assert!(code == 1 && err.contains("--yes snap-1"), "{err}");
    assert_eq!(f.run("plugin delete-snapshot p snap-1 --yes snap-2").await.0, 1);
    assert!(f.plugin.deleted.lock().unwrap().is_empty());
    assert_eq!(
        f.run("plugin delete-snapshot p snap-1 --yes snap-1").await,
        (0, String::new(), String::new())
    );
    assert_eq!(*f.plugin.deleted.lock().unwrap(), ["snap-1"]);
}

#[tokio::test]
async fn irreversible_commands_ask_for_the_name() {
    let f = Fixture::new();
    let (code, _, err) = f.run("release default v job --force").await;
    assert_eq!(code, 1);
    assert!(err.contains("--yes default/v"), "{err}");
    let (code, _, err) = f.run("release default v job --force --yes default/w").await;
    assert_eq!(code, 1);
    assert!(err.contains("that is not default/v: nothing was done"), "{err}");
    for wrong in [
        "volume delete default v",
        "volume detach default v node-1 --forget",
        "volume deregister default v --force",
        "volume deregister default v --forget --yes default/w",
        "unmount default v job --forget",
        "release default v job --forget",
    ] {
        assert_eq!(f.run(wrong).await.0, 1, "{wrong}");
    }
    assert!(f.csid.given.lock().unwrap().is_empty());
    assert_eq!(f.run("release default v job --force --yes default/v").await.0, 0);
    assert_eq!(f.run("release default w job").await, (0, String::new(), String::new()));
    assert_eq!(*f.csid.released.lock().unwrap(), ["v true", "w false"]);
}

#[tokio::test]
async fn flags_of_a_command_reach_csid() {
    let f = Fixture::new();
    for (line, given) in [
        ("unmount default v job", ""),
        ("unmount default v job --no-wait", "wait=false"),
        ("unmount default v job --all-tags", "all-tags=true"),
        ("unmount default v job --must-exist", "must-exist=true"),
        ("unmount default v job --force-hung", "force-hung=true"),
        ("unmount default v job --forget --yes default/v", "forget=true must-exist=true"),
        ("mount default v job --plugin p --external-id x --wait 90s", "wait-usec=90000000"),
        ("release default v job --forget --yes default/v", "forget=true"),
        ("volume attach default v node-1", ""),
        ("volume attach default v node-1 --read-only", "read-only=true"),
        ("volume detach default v node-1", ""),
        ("volume detach default v node-1 --forget --yes default/v", "forget=true"),
        ("volume deregister default v --forget --yes default/v", "forget=true"),
        ("volume snapshot default v s", ""),
        ("volume snapshot default v s --no-wait", "wait=false"),
    ] {
        let (code, _, err) = f.run(line).await;
        assert_eq!((code, err.as_str()), (0, ""), "{line}");
        assert_eq!(f.csid.given.lock().unwrap().split_off(0), [given], "{line}");
    }
}

#[tokio::test]
async fn publish_context_is_printed_for_programs_alone() {
    let f = Fixture::new();
    assert_eq!(f.run("volume attach default v node-1").await, (0, String::new(), String::new()));
    let (code, out, _) = f.run("volume attach default v node-1 --json").await;
    let shown: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, &shown["publish-context"]["device"]), (0, &"hunter2 of node-1".into()));
}

#[tokio::test]
async fn explain_names_the_tag_of_the_awaited_mount() {
    let f = Fixture::new();
    let (code, out, _) = f.run("explain default tagged").await;
    assert_eq!(code, 0);
    assert!(out.contains("`csictl unmount --forget default tagged web --tag blue`"), "{out}");
}

#[tokio::test]
async fn expand_takes_units_and_validate_sets_the_exit_code() {
    let f = Fixture::new();
    let (code, out, _) = f.run("volume expand default v 20GiB").await;
    assert_eq!((code, out.as_str()), (0, "20GiB, when it is mounted next\n"));
    let (code, out, _) = f.run("volume validate default v").await;
    assert_eq!((code, out.as_str()), (1, "not confirmed: no\n"));
    assert_eq!(f.run("volume validate default v --csid-socket /nonexistent/s").await.0, 3);
    assert!(f.csid.validated.lock().unwrap().is_empty(), "all that it is registered with");
    let both = "--access-mode single-node-writer --access-mode multi-node-reader-only";
    for (more, attachment) in [("", "file-system"), ("--block", "block-device")] {
        assert_eq!(f.run(&format!("volume validate default v {both} {more}")).await.0, 1);
        let due =
            ["single-node-writer", "multi-node-reader-only"].map(|access| format!("{access} {attachment}"));
        assert_eq!(f.csid.validated.lock().unwrap().split_off(0), due);
    }
}
