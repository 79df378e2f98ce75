//! The secret of `canary` through every call of a controller, and every failure of these, while the plugin repeats it and the
//! contexts that it gave. No secret may be found anywhere, a context's value only where it is asked for.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fs;
use std::time::Duration;

use csid_client::{
    AccessMode, AttachOptions, AttachmentMode, CallOptions, Capability, ClaimFilter, ClaimOptions,
    CreateVolume, ExpandOptions, MountOptions, ReleaseOptions, SealedSecrets, SnapshotFilter,
    SnapshotOptions, ValidateOptions, VolumeFilter, VolumeOptions,
};
use csid_tests::ask::*;
use csid_tests::backend::id_of;
use csid_tests::dbus::{Bus, Policy};
use csid_tests::raw::{MANAGER, MANAGER_PATH, NAME, PLUGIN, ROOT};
use csid_tests::script::{Act, CONTROLLER, Rule};
use csid_tests::search::Haystack;
use csid_tests::world::{World, count, eventually, within_time, world};
use futures_util::future::join;
use serde::Serialize;
use zbus::wire::Type;
use zbus::{Connection, Error};

use crate::node::*;

const BYTES: u64 = 4 << 20;
const JOB: &str = "job";
/// How long one call is waited for.
const PATIENCE: Duration = Duration::from_secs(15);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ask {
    Create,
    Validate,
    Attach,
    Detach,
    Claim,
    Mount,
    /// By the controller, then also by the node.
    Expand(u64),
    Snapshot,
    ListSnapshots,
    DeleteSnapshot,
    Release,
    Delete,
}

/// The way of a volume, and the call that fails first.
const WAY: [(Ask, &str); 13] = [
    (Ask::Create, "CreateVolume"),
    (Ask::Validate, "ValidateVolumeCapabilities"),
    (Ask::Attach, "ControllerPublishVolume"),
    (Ask::Detach, "ControllerUnpublishVolume"),
    (Ask::Claim, "ControllerPublishVolume"),
    (Ask::Mount, ""),
    (Ask::Expand(2 * BYTES), "ControllerExpandVolume"),
    (Ask::Expand(3 * BYTES), "NodeExpandVolume"),
    (Ask::Snapshot, "CreateSnapshot"),
    (Ask::ListSnapshots, "ListSnapshots"),
    (Ask::DeleteSnapshot, "DeleteSnapshot"),
    (Ask::Release, "ControllerUnpublishVolume"),
    (Ask::Delete, "DeleteVolume"),
];
const UNPUBLISH: &str = "ControllerUnpublishVolume";
/// NOT_FOUND: what is to go is gone.
const GONE: i32 = 5;
const ENDS: [&str; 3] = [UNPUBLISH, "DeleteSnapshot", "DeleteVolume"];

/// csid as its callers on the bus see it.
struct Caller {
    bus: Connection,
    /// What it says of calls that fail, and what it shows meanwhile but for contexts.
    errors: RefCell<Vec<u8>>,
    rows: RefCell<Vec<u8>>,
}

impl Caller {
    async fn call<B: Serialize + Type>(&self, member: &str, body: &B) -> Result<zbus::Message, Error> {
        self.bus.call_method(Some(NAME), MANAGER_PATH, Some(MANAGER), member, body).await
    }

    async fn call_plugin<B: Serialize + Type>(&self, member: &str, body: &B) -> Result<zbus::Message, Error> {
        self.bus.call_method(Some(NAME), "/org/csid1/plugin/p", Some(PLUGIN), member, body).await
    }

    /// Whether it was done; `patience`: how long it may take.
    async fn ask(&self, ask: Ask, by: By, patience: Duration) -> bool {
        let (volume, deadline_usec) = (volume(by), Some(patience.as_micros() as u64));
        let (space, v) = (NAMESPACE, volume.as_str());
        let given: Option<SealedSecrets> = matches!(by, Descriptor).then(|| secrets(&[("password", SECRET)]));
        // A registered volume names it by itself.
        let credential = matches!(by, Credential).then(|| CREDENTIAL.to_owned());
        let snapshot = id_of("snap", v);
        let access_mode = Some(AccessMode::SingleNodeWriter);
        let attachment_mode = Some(AttachmentMode::FileSystem);
        let answer = match ask {
            Ask::Create => {
                let spec = CreateVolume {
                    plugin: Some("p".to_owned()),
                    name: Some(volume.clone()),
                    capabilities: Some(vec![Capability {
                        access_mode: AccessMode::SingleNodeWriter,
                        attachment_mode: AttachmentMode::FileSystem,
                    }]),
                    mount_flags: Some(vec![FLAG.to_owned()]),
                    capacity_min: Some(BYTES),
                    credential,
                    secrets: given,
                    deadline_usec,
                    ..CreateVolume::default()
                };
                self.call("CreateVolume", &(space, v, spec)).await
            }
            Ask::Validate => {
                let options = ValidateOptions {
                    access_mode,
                    attachment_mode,
                    secrets: given,
                    deadline_usec,
                    ..ValidateOptions::default()
                };
                self.call("ValidateVolume", &(space, v, options)).await
            }
            Ask::Attach => {
                let options = AttachOptions { secrets: given, deadline_usec, ..AttachOptions::default() };
                self.call("AttachVolume", &(space, v, "node-2", options)).await
            }
            Ask::Detach => {
                let options = VolumeOptions { secrets: given, deadline_usec, ..VolumeOptions::default() };
                self.call("DetachVolume", &(space, v, "node-2", options)).await
            }
            Ask::Claim => {
                let options = ClaimOptions { secrets: given, deadline_usec, ..ClaimOptions::default() };
                self.call("Claim", &(space, v, JOB, options)).await
            }
            Ask::Mount => {
                let options = MountOptions { secrets: given, deadline_usec, ..MountOptions::default() };
                self.call("Mount", &(space, v, JOB, options)).await
            }
            Ask::Expand(bytes) => {
                let options = ExpandOptions { secrets: given, deadline_usec, ..ExpandOptions::default() };
                self.call("ExpandVolume", &(space, v, bytes, 0_u64, options)).await
            }
            Ask::Snapshot => {
                let options = SnapshotOptions { secrets: given, deadline_usec, ..SnapshotOptions::default() };
                self.call("CreateSnapshot", &(space, v, v, options)).await
            }
            Ask::ListSnapshots => {
                let filter = SnapshotFilter {
                    snapshot: Some(snapshot),
                    secrets: given,
                    credential,
                    deadline_usec,
                    ..SnapshotFilter::default()
                };
                self.call_plugin("ListSnapshots", &(filter,)).await
            }
            Ask::DeleteSnapshot => {
                let options =
                    CallOptions { secrets: given, credential, deadline_usec, ..CallOptions::default() };
                self.call_plugin("DeleteSnapshot", &(snapshot, options)).await
            }
            Ask::Release => {
                let options = ReleaseOptions { secrets: given, deadline_usec, ..ReleaseOptions::default() };
                self.call("Release", &(space, v, JOB, options)).await
            }
            Ask::Delete => {
                let options = VolumeOptions { secrets: given, deadline_usec, ..VolumeOptions::default() };
                self.call("DeleteVolume", &(space, v, options)).await
            }
        };
        match answer {
            Ok(_) => true,
            Err(error) => {
                let mut errors = self.errors.borrow_mut();
                errors.extend_from_slice(error.to_string().as_bytes());
                if let Error::MethodError(_, _, message) = &error {
                    errors.extend_from_slice(message.data());
                }
                false
            }
        }
    }

    async fn both(&self, ask: Ask, patience: Duration) -> [bool; 2] {
        join(self.ask(ask, Descriptor, patience), self.ask(ask, Credential, patience)).await.into()
    }

    /// Repeats a call until it succeeds. Releases the claim, or detaches the volume, that an earlier try left.
    async fn must(&self, w: &mut World, ask: Ask) {
        for by in [Descriptor, Credential] {
            within_time(4 * PATIENCE, &format!("{ask:?} {by:?}"), async || {
                w.revive().await;
                if self.ask(ask, by, PATIENCE).await {
                    return true;
                }
                match ask {
                    Ask::Claim => self.ask(Ask::Release, by, PATIENCE).await,
                    Ask::Attach => self.ask(Ask::Detach, by, PATIENCE).await,
                    _ => true,
                };
                false
            })
            .await;
        }
    }

    /// Makes the calls that any user may make to read.
    async fn look(&self) {
        for by in [Descriptor, Credential] {
            let volume = volume(by);
            // It may not be there.
            if let Ok(answer) = self.call("Explain", &(NAMESPACE, &volume, CallOptions::default())).await {
                self.rows.borrow_mut().extend_from_slice(answer.data());
            }
        }
        let answers = [
            self.call("ListClaims", &(ClaimFilter::default(),)).await,
            self.call("ListVolumes", &(VolumeFilter::default(),)).await,
            self.call("ListOperations", &()).await,
        ];
        for answer in answers {
            self.rows.borrow_mut().extend_from_slice(answer.expect("a list").data());
        }
    }
}

/// Before a volume is there csid knows nothing of its contexts, and a snapshot is not asked for as a volume's.
fn said(rpc: &str) -> String {
    match rpc {
        "CreateVolume" => words().replace(CONTEXT, "it"),
        "ListSnapshots" | "DeleteSnapshot" => words().replace(CONTEXT, "it").replace(FLAG, "it"),
        _ => words(),
    }
}

/// The volumes' way, each call once as the rule has it and then as it should be; how many failed.
async fn way(w: &mut World, caller: &Caller, rule: impl Fn(&str) -> Rule) -> usize {
    let mut failed = 0;
    for (ask, rpc) in WAY {
        let act = rule(rpc).act;
        // That would be no failure.
        let is_gone = matches!(act, Act::Say(GONE, _)) && ENDS.contains(&rpc);
        if !rpc.is_empty() && !is_gone {
            // What undoes it says so, too.
            let undo = (ask == Ask::Claim || ask == Ask::Attach) && matches!(act, Act::Say(..));
            let undo = undo.then(|| Rule { times: 2, ..rule(UNPUBLISH) });
            w.plugin("p").rules([rule(rpc)].into_iter().chain(undo));
            let done = caller.both(ask, SHORT).await;
            if matches!(act, Act::Say(..) | Act::Delay(_)) {
                assert_eq!(done, [false; 2], "{ask:?} is done though {rpc} failed");
            }
            failed += done.iter().filter(|done| !**done).count();
            caller.look().await;
            w.plugin("p").honest();
        }
        caller.must(w, ask).await;
    }
    failed
}

/// csid is killed with the secret in its hands, at each call.
async fn killed(w: &mut World, bus: &Bus, caller: &Caller) -> usize {
    for (ask, rpc) in WAY {
        if !rpc.is_empty() {
            w.plugin("p").rules([Rule::always(rpc, Act::Delay(3_600_000))]);
            let calls = w.plugin("p").count(rpc, "");
            let cut_off = async {
                let plugin = w.plugin("p");
                eventually("it has the secret", async || plugin.count(rpc, "") > calls).await;
                caller.look().await;
                w.kill();
            };
            let (done, ()) = join(caller.ask(ask, Descriptor, PATIENCE), cut_off).await;
            assert!(!done, "csid was killed before");
            w.plugin("p").honest();
            settled(&w.start().await).await;
            bus.has_csid().await;
        }
        caller.must(w, ask).await;
    }
    WAY.len() - 1
}

#[test]
fn canary_through_a_controller_is_found_nowhere() {
    world(async |w| {
        w.environment.insert("CSID_LOG".to_owned(), "trace".to_owned());
        fs::write(w.path("credentials").join(CREDENTIAL), format!("{{\"password\":{SECRET:?}}}")).unwrap();
        let bus = Bus::start(w, Policy::Everything).await;
        let monitor = bus.monitor().await;
        // The test itself repeats calls that the plugin refused.
        w.excuse(36, " again");
        let plugin = w.add_plugin_with("p", "rpc-deadline = \"2s\"").await;
        plugin.set(|script| {
            script.control(&CONTROLLER);
            script.plugin.push("ONLINE".to_owned());
            script.capabilities.push("EXPAND_VOLUME".to_owned());
            script.token = Some(CONTEXT.to_owned());
        });
        plugin.kill();
        plugin.start().await;
        healthy(&w.start().await, "p").await;
        bus.has_csid().await;
        let caller =
            Caller { bus: bus.connect(ROOT).await, errors: RefCell::default(), rows: RefCell::default() };

        let mut failed = 0;
        for code in 1..=16 {
            failed += way(w, &caller, |rpc| Rule::always(rpc, Act::Say(code, said(rpc)))).await;
        }
        count("calls that failed with a code", failed);
        let mut ends = way(w, &caller, |rpc| Rule::always(rpc, Act::Delay(3_600_000))).await;
        for act in [Act::DieBefore, Act::DieAfter] {
            ends += way(w, &caller, |rpc| Rule::once(rpc, act.clone())).await;
        }
        ends += killed(w, &bus, &caller).await;
        count("calls cut off by a deadline or a death", ends);

        let left = w.plugin("p").backend().made().unwrap();
        assert!(left.is_empty(), "each way went to its end: {left:?}");

        let calls = w.plugin("p").calls();
        for (_, rpc) in WAY.iter().filter(|(_, rpc)| !rpc.is_empty()) {
            let of_rpc = calls.iter().filter(|recorded| recorded.call.rpc == *rpc);
            let is_given = |secrets: &[(String, String)]| secrets.iter().any(|(_, value)| value == SECRET);
            let given = of_rpc.filter(|recorded| is_given(&recorded.call.secrets)).count();
            count(&format!("{rpc} that were given the secret"), given);
            assert!(given > 30, "{rpc}: {given}");
        }

        let client = w.client().await;
        let mut haystack = Haystack::default();
        haystack.add("GetEvents", format!("{:?}", events(&client, 0).await).as_bytes());
        haystack.add("errors", &caller.errors.borrow());
        haystack.add("rows", &caller.rows.borrow());
        haystack.add_written("", w);
        w.stop().await;
        haystack.add_written("", w);
        let [calls, answers] = monitor.seen();
        haystack.add("calls on the bus", &calls);
        haystack.add("answers and signals on the bus", &answers);
        count("bytes searched", haystack.bytes());

        let journal = ["csid.db", "csid.db-wal"];
        let kept = ["GetEvents", "errors", "rows", "calls on the bus", "answers and signals on the bus"];
        let found = haystack.hits(MARKER);
        let all = kept.iter().chain(&journal);
        assert!(all.clone().all(|place| found.contains(place)), "what is no secret is found: {found:?}");
        assert!(haystack.hits("CreateVolume").contains("log"), "and in the log");
        let none = BTreeSet::new();
        assert_eq!(haystack.hits(SECRET), none, "the secret is found");
        // A Claim's answer has the contexts, and the journal keeps them.
        let asked_for = ["calls on the bus", "answers and signals on the bus"];
        for reply in [CONTEXT, FLAG] {
            let others: BTreeSet<_> = haystack
                .hits(reply)
                .into_iter()
                .filter(|place| !asked_for.contains(place) && !journal.contains(place))
                .collect();
            assert_eq!(others, none, "{reply} is found");
        }
        count("hits of the secret, its base64 and its hex", haystack.hits(SECRET).len());
    });
}
