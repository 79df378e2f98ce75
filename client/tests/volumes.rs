//! Volumes and claims over the wire: the contract's keys and types, and the results.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex},
};

use csid_client::{
    AccessMode, AttachOptions, AttachmentMode, CallOptions, Capability, ClaimFilter, ClaimMode, ClaimOptions,
    Client, CreateVolume, DeregisterOptions, DetachOptions, ExpandOptions, Heal, Part, RegisterVolume,
    ReleaseOptions, SnapshotOptions, Target, ValidateOptions, VolumeFilter, VolumeOptions,
};
use tokio::net::UnixListener;
use zbus::{Connection, Guid, OwnedVariant, Variant, connection::Builder, interface};

type Dict = HashMap<String, OwnedVariant>;
/// unit, available, total, used
type Usage = (String, u64, u64, u64);

#[derive(zbus::DBusError, Debug)]
#[zbus(prefix = "org.csid1.Error")]
enum Failure {
    #[zbus(error)]
    ZBus(zbus::Error),
    InvalidArgument(String),
}

/// The options of the last call, by key and type.
#[derive(Clone, Default)]
struct Server(Arc<Mutex<Vec<String>>>);

impl Server {
    fn asked(&self, options: &Dict) {
        let mut keys: Vec<_> =
            options.iter().map(|(key, value)| format!("{key} {}", value.value_signature())).collect();
        keys.sort();
        *self.0.lock().unwrap() = keys;
    }
}

fn dict<const N: usize>(entries: [(&str, Variant<'static>); N]) -> Dict {
    entries.into_iter().map(|(key, value)| (key.to_owned(), value.try_into_owned().unwrap())).collect()
}

fn map(key: &str, value: &str) -> BTreeMap<String, String> {
    BTreeMap::from([(key.to_owned(), value.to_owned())])
}

fn volume(id: String) -> Dict {
    let capability = HashMap::from([("access-mode".to_owned(), Variant::from("multi-node-reader-only"))]);
    dict([
        ("id", id.into()),
        ("context", map("pool", "ssd").into()),
        ("capabilities", vec![capability].into()),
        ("topologies", vec![map("zone", "a")].into()),
        ("read-claims", vec!["job".to_owned()].into()),
        ("capacity", 7u64.into()),
        ("schedulable", true.into()),
        ("of-tomorrow", 1u32.into()),
    ])
}

#[interface(name = "org.csid1.Manager")]
impl Server {
    fn register_volume(&self, _namespace: String, id: String, spec: Dict) -> Dict {
        self.asked(&spec);
        volume(id)
    }

    fn create_volume(&self, _namespace: String, id: String, spec: Dict) -> Dict {
        self.asked(&spec);
        volume(id)
    }

    fn list_volumes(&self, filter: Dict) -> Vec<Dict> {
        self.asked(&filter);
        vec![volume("a".into()), volume("b".into())]
    }

    fn get_volume(&self, _namespace: String, id: String) -> Dict {
        volume(id)
    }

    fn validate_volume(&self, _namespace: String, _volume: String, options: Dict) -> (bool, String) {
        self.asked(&options);
        (false, "no such mode".into())
    }

    fn deregister_volume(&self, _namespace: String, _volume: String, options: Dict) {
        self.asked(&options);
    }

    fn delete_volume(&self, _namespace: String, _volume: String, options: Dict) {
        self.asked(&options);
    }

    fn expand_volume(&self, _n: String, _v: String, required: u64, limit: u64, options: Dict) -> (u64, bool) {
        self.asked(&options);
        (required + limit, true)
    }

    fn create_snapshot(&self, _n: String, _v: String, name: String, options: Dict) -> Dict {
        self.asked(&options);
        dict([("id", name.into()), ("ready", true.into()), ("size", 9u64.into())])
    }

    fn get_volume_stats(&self, _n: String, _v: String, options: Dict) -> (Vec<Usage>, bool, String) {
        self.asked(&options);
        (vec![("BYTES".into(), 1, 3, 2)], true, "ill".into())
    }

    fn attach_volume(&self, _n: String, _v: String, node: String, options: Dict) -> HashMap<String, String> {
        self.asked(&options);
        HashMap::from([("node".to_owned(), node)])
    }

    fn detach_volume(&self, _n: String, _v: String, _node: String, options: Dict) {
        self.asked(&options);
    }

    fn explain(&self, _namespace: String, _volume: String, options: Dict) -> Dict {
        self.asked(&options);
        dict([("waiting-for", "a claim".into()), ("next-try", 5u64.into())])
    }

    fn claim(&self, _namespace: String, volume_id: String, _consumer: String, options: Dict) -> Dict {
        self.asked(&options);
        let mut claimed = volume(volume_id);
        claimed
            .extend(dict([("state", "taken".into()), ("publish-context", map("device", "/dev/x").into())]));
        claimed
    }

    fn release(&self, _namespace: String, _volume: String, _consumer: String, options: Dict) {
        self.asked(&options);
    }

    /// Of namespace `many` a page of five claims; of `old` as a csid that has no pages.
    fn list_claims(&self, filter: Dict) -> Result<Vec<Dict>, Failure> {
        self.asked(&filter);
        let text =
            |key: &str| filter.get(key).and_then(|value| value.downcast_ref::<&str>().ok()).unwrap_or("");
        let max = filter.get("max").map(|max| max.downcast_ref::<u32>().unwrap() as usize);
        let claim = |n: &str| dict([("consumer", n.to_owned().into()), ("cursor", format!("at {n}").into())]);
        match text("namespace") {
            "many" => {
                let after = text("after").to_owned();
                let behind = ["1", "2", "3", "4", "5"].into_iter().filter(|n| format!("at {n}") > after);
                return Ok(behind.take(max.unwrap()).map(claim).collect());
            }
            "old" if max.is_some() => {
                return Err(Failure::InvalidArgument("unknown option \"max\"".into()));
            }
            _ => {}
        }
        Ok(vec![dict([("consumer", "job".into()), ("uid", 7u32.into()), ("releasing", true.into())])])
    }
}

struct Fixture {
    _directory: tempfile::TempDir,
    _connection: Connection,
    server: Server,
    client: Client,
}

impl Fixture {
    async fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("csid.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let server = Server::default();
        let accept = async {
            let (stream, _) = listener.accept().await.unwrap();
            let guid = Guid::generate();
            let builder = Builder::unix_stream(stream.into_std().unwrap()).server(guid.as_str());
            builder.p2p().serve_at("/org/csid1", server.clone()).build().await.unwrap()
        };
        let target = Target::Socket(path);
        let (_connection, client) = tokio::join!(accept, Client::connect(&target));
        Self { _directory: directory, _connection, server, client: client.unwrap() }
    }

    fn sent(&self) -> String {
        self.server.0.lock().unwrap().join(", ")
    }
}

fn capability() -> Capability {
    Capability { access_mode: AccessMode::SingleNodeWriter, attachment_mode: AttachmentMode::FileSystem }
}

#[tokio::test]
async fn volume_options_have_contract_keys() {
    let f = Fixture::new().await;
    let spec = RegisterVolume {
        plugin: Some("p".into()),
        external_id: Some("x".into()),
        capabilities: Some(vec![capability()]),
        topologies: Some(vec![map("zone", "a")]),
        context: Some(map("k", "v")),
        heal: Some(Heal::Remount),
        ..RegisterVolume::default()
    };
    let row = f.client.register_volume("ns", "v", spec).await.unwrap();
    assert_eq!(
        f.sent(),
        "capabilities aa{sv}, context a{ss}, external-id s, heal s, plugin s, topologies aa{ss}"
    );
    assert_eq!((row.id.as_str(), row.capacity, row.schedulable), ("v", 7, true));
    assert_eq!(row.capabilities[0].access_mode, "multi-node-reader-only");
    assert_eq!((&row.context, &row.topologies), (&map("pool", "ssd"), &vec![map("zone", "a")]));
    let json = serde_json::to_value(&row).unwrap();
    assert_eq!(json["capabilities"][0]["access-mode"], "multi-node-reader-only");
    assert_eq!(json["read-claims"][0], "job");

    let spec = CreateVolume {
        capacity_min: Some(5),
        register: Some(false),
        snapshot: Some("s".into()),
        ..CreateVolume::default()
    };
    f.client.create_volume("ns", "v", spec).await.unwrap();
    assert_eq!(f.sent(), "capacity-min t, register b, snapshot s");

    let filter = VolumeFilter { prefix: Some("a".into()), ..VolumeFilter::default() };
    assert_eq!(f.client.list_volumes(filter).await.unwrap().len(), 2);
    assert_eq!(f.sent(), "prefix s");
    assert_eq!(f.client.volume("ns", "v").await.unwrap().id, "v");
}

#[tokio::test]
async fn volume_commands_take_inline_volumes() {
    let f = Fixture::new().await;
    let options =
        ValidateOptions { plugin: Some("p".into()), external_id: Some("x".into()), ..Default::default() };
    let validated = f.client.validate_volume("ns", "v", options).await.unwrap();
    assert_eq!((validated.confirmed, validated.message.as_str()), (false, "no such mode"));
    assert_eq!(f.sent(), "external-id s, plugin s");

    let options = ExpandOptions { part: Some(Part::Node), ..ExpandOptions::default() };
    let expanded = f.client.expand_volume("ns", "v", 5, 6, options).await.unwrap();
    assert_eq!((expanded.capacity_bytes, expanded.node_expansion_required), (11, true));
    assert_eq!(f.sent(), "part s");

    let options = SnapshotOptions { parameters: Some(map("k", "v")), ..SnapshotOptions::default() };
    let snapshot = f.client.create_snapshot("ns", "v", "snap", options).await.unwrap();
    assert_eq!((snapshot.id.as_str(), snapshot.size, snapshot.ready), ("snap", 9, true));
    assert_eq!(f.sent(), "parameters a{ss}");
    let stats = f.client.volume_stats("ns", "v", CallOptions::default()).await.unwrap();
    assert_eq!((stats.usage[0].total, stats.abnormal, stats.message.as_str()), (3, true, "ill"));

    let options = AttachOptions { read_only: Some(true), ..AttachOptions::default() };
    assert_eq!(f.client.attach_volume("ns", "v", "n-1", options).await.unwrap(), map("node", "n-1"));
    assert_eq!(f.sent(), "read-only b");
    let options =
        DetachOptions { credential: Some("c".into()), forget: Some(true), ..DetachOptions::default() };
    f.client.detach_volume("ns", "v", "n-1", options).await.unwrap();
    assert_eq!(f.sent(), "credential s, forget b");
    f.client.delete_volume("ns", "v", VolumeOptions::default()).await.unwrap();
    assert_eq!(f.sent(), "");
    let options = DeregisterOptions { force: Some(true), ..DeregisterOptions::default() };
    f.client.deregister_volume("ns", "v", options).await.unwrap();
    assert_eq!(f.sent(), "force b");
}

#[tokio::test]
async fn claims_are_taken_released_and_explained() {
    let f = Fixture::new().await;
    let options = ClaimOptions { mode: Some(ClaimMode::Read), wait_usec: Some(5), ..ClaimOptions::default() };
    let claimed = f.client.claim("ns", "v", "job", options).await.unwrap();
    assert_eq!(f.sent(), "mode s, wait-usec t");
    assert_eq!((claimed.id.as_str(), claimed.state.as_str()), ("v", "taken"));
    assert_eq!(claimed.publish_context, map("device", "/dev/x"));

    let options = ReleaseOptions { force: Some(true), ..ReleaseOptions::default() };
    f.client.release("ns", "v", "job", options).await.unwrap();
    assert_eq!(f.sent(), "force b");
    let filter = ClaimFilter { past: Some(true), ..ClaimFilter::default() };
    let claims = f.client.list_claims(filter).await.unwrap();
    assert_eq!((claims[0].consumer.as_str(), claims[0].uid, claims[0].releasing), ("job", 7, true));
    assert_eq!(f.sent(), "past b");
    let found = f.client.explain("ns", "v", CallOptions::default()).await.unwrap();
    assert_eq!((found.waiting_for.as_str(), found.next_try, found.steps.len()), ("a claim", 5, 0));
}

#[tokio::test]
async fn pages_end_and_an_older_csid_has_one() {
    let f = Fixture::new().await;
    let of = |namespace: &str, max| ClaimFilter {
        namespace: Some(namespace.into()),
        max,
        ..ClaimFilter::default()
    };
    for (max, due) in [(Some(2), vec![2, 2, 1]), (Some(5), vec![5]), (Some(9), vec![5]), (None, vec![5])] {
        let mut pages = f.client.claim_pages(of("many", max));
        let (mut sizes, mut consumers) = (Vec::new(), Vec::new());
        while let Some(page) = pages.next().await.unwrap() {
            sizes.push(page.len());
            consumers.extend(page.into_iter().map(|claim| claim.consumer));
        }
        assert_eq!((sizes, consumers.concat().as_str()), (due, "12345"), "{max:?}");
        assert!(pages.next().await.unwrap().is_none());
    }
    let behind = ClaimFilter { after: Some("at 3".into()), ..of("many", None) };
    assert_eq!(f.client.claim_pages(behind).rest().await.unwrap().len(), 2);
    assert_eq!(f.sent(), "after s, max u, namespace s");

    assert_eq!(f.client.claim_pages(of("old", None)).rest().await.unwrap().len(), 1);
    assert_eq!(f.sent(), "namespace s");
    f.client.claim_pages(of("old", Some(2))).rest().await.unwrap_err();
}
