//! Volumes that files of volumes.d declare.

use std::fs;
use std::time::{Duration, Instant};

use csid_client::{
    AccessMode, CallOptions, ClaimOptions, Client, DeregisterOptions, Explanation, Kind, MountOptions,
    Mounted, RegisterVolume, ReleaseOptions, VolumeFilter, VolumeRow,
};
use csid_tests::ask::*;
use csid_tests::clustered::alone;
use csid_tests::fault::Fault;
use csid_tests::script::{Act, Rule};
use csid_tests::world::{World, count, eventually, refusal};

/// Why these tests are skipped on a node of a cluster.
const FILES: &str = "csid reads no files of volumes.d there";

const WRITER: &str = "capabilities = [{ access-mode = \"single-node-writer\" }]\n";
const XFS: &str = "fs-type = \"xfs\"\n";

/// A world with plugin `p`, which validates, and has volumes of these names.
async fn with_plugin(w: &mut World, volumes: &[&str]) {
    let plugin = w.add_plugin_and("p", &[], "").await;
    plugin.set(|script| script.control(&[]));
    plugin.kill();
    plugin.start().await;
    volumes.iter().for_each(|volume| plugin.provision(volume));
}

async fn list(client: &Client) -> Vec<VolumeRow> {
    client.list_volumes(VolumeFilter::default()).await.expect("the volumes")
}

async fn ids(client: &Client) -> Vec<String> {
    list(client).await.into_iter().map(|row| row.id).collect()
}

async fn has(client: &Client, volumes: &[&str]) {
    eventually(&format!("there are {volumes:?}"), async || ids(client).await == volumes).await;
}

async fn reload(client: &Client) -> csid_client::Result<()> {
    client.reload(CallOptions::default()).await
}

async fn explain(client: &Client, volume: &str) -> Explanation {
    client.explain(NAMESPACE, volume, CallOptions::default()).await.expect("an explanation")
}

async fn mount(client: &Client, volume: &str, options: MountOptions) -> csid_client::Result<Mounted> {
    client.mount(NAMESPACE, volume, "job", options).await
}

async fn deregister(client: &Client, volume: &str) -> csid_client::Result<()> {
    client.deregister_volume(NAMESPACE, volume, DeregisterOptions::default()).await
}

fn log(w: &World) -> String {
    fs::read_to_string(w.path("csid.log")).expect("csid's log")
}

#[test]
fn co_rule_35_declared_when_plugin_first_serves() {
    alone(FILES, async |w| {
        with_plugin(w, &["v"]).await;
        w.plugin("p").kill();
        let file = w.declare("v", WRITER);
        // Somebody else's plugin is no plugin of this one's.
        w.add_plugin("other").await;
        let client = w.start().await;
        healthy(&client, "other").await;
        assert_eq!(ids(&client).await, [""; 0], "csid is ready all the same");
        let reply = explain(&client, "v").await;
        assert!(reply.waiting_for.contains("plugin p"), "{reply:?}");
        assert!(reply.steps.iter().any(|step| step.contains(file.to_str().unwrap())), "{reply:?}");
        assert_eq!(client.manager().await.unwrap().state, "degraded");
        eventually("the status", async || w.status().contains("1 volumes not registered as declared")).await;
        let deleted = client.delete_volume(NAMESPACE, "v", Default::default()).await;
        for (kind, error) in [refusal(deregister(&client, "v").await), refusal(deleted)] {
            assert!(kind == Kind::NotSupported && error.message.contains("v.toml"), "{error}");
        }
        // A call without a deadline waits, also while a later one with a deadline is refused.
        let (waiting, begun) = (client.clone(), Instant::now());
        let waiting = tokio::spawn(async move { mount(&waiting, "v", MountOptions::default()).await });
        let (kind, error) =
            refusal(mount(&client, "v", within(Duration::from_millis(300), MountOptions::default())).await);
        assert_eq!(kind, Kind::PluginUnavailable, "{error}");
        assert!(error.details.retryable == Some(true) && error.message.contains("v.toml"), "{error}");
        assert!(!waiting.is_finished(), "{:?}", waiting.await);
        let before = cursor(&client).await;
        w.plugin("p").start().await;
        waiting.await.unwrap().expect("the mount");
        assert!(begun.elapsed() < Duration::from_secs(20));
        let registered = event(&client, before, &["volume-registered"], "default/v").await;
        assert_eq!(detail(&registered, "plugin"), "p");
        has(&client, &["v"]).await;
        assert!(w.plugin("p").count("ValidateVolumeCapabilities", "v") > 0);
        eventually("ready", async || client.manager().await.unwrap().state == "ready").await;
        let reply = explain(&client, "v").await;
        assert_eq!((reply.waiting_for.as_str(), reply.last_error.as_str()), ("", ""));
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

/// A declared volume is in the list for callers who ask for declarations, before it is registered.
#[test]
fn unregistered_declarations_are_listed_on_request() {
    alone(FILES, async |w| {
        with_plugin(w, &["v"]).await;
        w.plugin("p").kill();
        w.declare("v", &format!("{WRITER}{XFS}"));
        let client = w.start().await;
        let rows = async |filter: VolumeFilter| {
            let filter = VolumeFilter { declared: Some(true), ..filter };
            let rows = client.list_volumes(filter).await.expect("the volumes");
            Vec::from_iter(rows.into_iter().map(|row| (row.id, row.fs_type, row.standing, row.schedulable)))
        };
        let is = |standing: &str, schedulable| {
            vec![("v".to_owned(), "xfs".to_owned(), standing.to_owned(), schedulable)]
        };
        assert_eq!(rows(VolumeFilter::default()).await, is("declared", false));
        assert_eq!(ids(&client).await, [""; 0], "who does not ask has what can be used");
        for (named, many) in [("p", 1), ("q", 0)] {
            let of_plugin = VolumeFilter { plugin: Some(named.to_owned()), ..VolumeFilter::default() };
            assert_eq!(rows(of_plugin).await.len(), many, "{named}");
        }
        w.plugin("p").start().await;
        has(&client, &["v"]).await;
        assert_eq!(rows(VolumeFilter::default()).await, is("registered", true));
    });
}

#[test]
fn it_is_registered_without_being_asked_for_and_once() {
    alone(FILES, async |w| {
        with_plugin(w, &["a", "b"]).await;
        // What the plugin refuses now it may take later; the other one waits for nobody.
        let unavailable = Rule { times: 3, ..Rule::always("ValidateVolumeCapabilities", Act::Fail(14)) };
        w.plugin("p").rules([unavailable.of("a")]);
        w.declare("a", WRITER);
        w.declare("b", &format!("{WRITER}{XFS}name = \"disk\"\n"));
        let client = w.start().await;
        has(&client, &["a", "b"]).await;
        let row = list(&client).await.remove(1);
        assert_eq!(
            (row.fs_type.as_str(), row.name.as_str(), row.namespace.as_str()),
            ("xfs", "disk", NAMESPACE)
        );
        let asked = w.plugin("p").count("ValidateVolumeCapabilities", "b");
        assert_eq!(asked, 1);
        // After csid's restart, or a reload, it is there, and nobody is asked: not even where the plugin is away.
        w.kill();
        w.plugin("p").kill();
        let client = w.start().await;
        has(&client, &["a", "b"]).await;
        assert_eq!(explain(&client, "b").await.waiting_for, "", "it waits for nobody");
        reload(&client).await.unwrap();
        assert_eq!(list(&client).await[1].modify_index, row.modify_index, "nothing was written");
        assert_eq!(w.plugin("p").count("ValidateVolumeCapabilities", "b"), asked);
        w.plugin("p").start().await;
    });
}

#[test]
fn reload_adds_changes_and_removes() {
    alone(FILES, async |w| {
        with_plugin(w, &["a", "b", "c"]).await;
        w.declare("a", WRITER);
        let b = w.declare("b", WRITER);
        let client = w.start().await;
        has(&client, &["a", "b"]).await;
        let before = cursor(&client).await;
        w.declare("a", &format!("{WRITER}{XFS}"));
        w.declare("c", WRITER);
        fs::remove_file(b).unwrap();
        reload(&client).await.unwrap();
        has(&client, &["a", "c"]).await;
        eventually("the change", async || list(&client).await[0].fs_type == "xfs").await;
        for (kind, of) in [("changed", "a"), ("deregistered", "b"), ("registered", "c")] {
            event(&client, before, &[&format!("volume-{kind}")], &format!("default/{of}")).await;
        }
        // What makes it the volume that it is does not change; not by a call either.
        let good = fs::read_to_string(w.path("etc/volumes.d/a.toml")).unwrap();
        for (from, to, why) in [
            ("external-id = \"a\"", "external-id = \"b\"", "another external-id"),
            ("plugin = \"p\"", "plugin = \"q\"", "another plugin"),
            (XFS, "parameters = { tier = \"1\" }", "another parameters"),
        ] {
            fs::write(w.path("etc/volumes.d/a.toml"), good.replace(from, to)).unwrap();
            w.declare("d", WRITER);
            let (kind, error) = refusal(reload(&client).await);
            assert_eq!(kind, Kind::AlreadyExists, "{error}");
            assert!(error.message.contains("a.toml: ") && error.message.contains(why), "{error}");
            assert_eq!(ids(&client).await, ["a", "c"]);
            let (kind, error) = refusal(client.explain(NAMESPACE, "d", CallOptions::default()).await);
            assert_eq!(kind, Kind::NotFound, "nothing of that reload was taken: {error}");
            fs::remove_file(w.path("etc/volumes.d/d.toml")).unwrap();
        }
        fs::write(w.path("etc/volumes.d/a.toml"), good).unwrap();
        let spec =
            RegisterVolume { plugin: Some("p".into()), external_id: Some("a".into()), ..register("a") };
        let (kind, error) = refusal(client.register_volume(NAMESPACE, "a", spec).await);
        assert_eq!(kind, Kind::NotSupported, "{error}");
        assert!(error.message.contains("volumes.d/a.toml"), "{error}");
        let (kind, error) = refusal(deregister(&client, "a").await);
        assert!(kind == Kind::NotSupported && error.message.contains("volumes.d/a.toml"), "{error}");
        let (kind, error) = refusal(client.delete_volume(NAMESPACE, "a", Default::default()).await);
        assert!(kind == Kind::NotSupported && error.message.contains("volumes.d/a.toml"), "{error}");
        has(&client, &["a", "c"]).await;
    });
}

fn register(volume: &str) -> RegisterVolume {
    let capability = csid_client::Capability {
        access_mode: AccessMode::SingleNodeWriter,
        attachment_mode: csid_client::AttachmentMode::FileSystem,
    };
    RegisterVolume {
        plugin: Some("p".to_owned()),
        external_id: Some(volume.to_owned()),
        capabilities: Some(vec![capability]),
        ..RegisterVolume::default()
    }
}

#[test]
fn declaration_in_use_is_not_changed() {
    alone(FILES, async |w| {
        with_plugin(w, &["a"]).await;
        let file = w.declare("a", WRITER);
        let client = w.start().await;
        has(&client, &["a"]).await;
        let source = mount(&client, "a", MountOptions::default()).await.unwrap().source;
        w.declare("a", &format!("{WRITER}{XFS}"));
        let (kind, error) = refusal(reload(&client).await);
        assert_eq!(kind, Kind::Busy, "{error}");
        assert!(error.message.contains("a.toml: ") && error.details.holders == ["job"], "{error:?}");
        assert_eq!(list(&client).await[0].fs_type, "");
        // A start has no caller to refuse: the change is reported, and done when it can be.
        w.kill();
        let client = w.start().await;
        let why = async || explain(&client, "a").await.last_error;
        eventually("it says why", async || why().await.contains("claimed by job")).await;
        assert_eq!(list(&client).await[0].fs_type, "");
        assert!(client.has_mount(&source).await.unwrap());

        // Its file goes: it stays while it is in use, over a restart too.
        fs::remove_file(&file).unwrap();
        for restart in [false, true] {
            if restart {
                w.kill();
                w.start().await;
            }
            let client = w.client().await;
            reload(&client).await.unwrap();
            assert_eq!(ids(&client).await, ["a"]);
            assert!(log(w).contains("it stays"));
            assert!(explain(&client, "a").await.steps.iter().any(|step| step.contains("gone")));
            let (kind, error) = refusal(deregister(&client, "a").await);
            assert_eq!(kind, Kind::Busy, "{error}");
            assert!(client.has_mount(&source).await.unwrap());
        }
        let client = w.client().await;
        unmount(&client, "a", "job").await.unwrap();
        // A claim is a use, too.
        client.claim(NAMESPACE, "a", "job", ClaimOptions::default()).await.unwrap();
        reload(&client).await.unwrap();
        assert_eq!(ids(&client).await, ["a"]);
        client.release(NAMESPACE, "a", "job", ReleaseOptions::default()).await.unwrap();
        reload(&client).await.unwrap();
        assert_eq!(ids(&client).await, [""; 0]);
        w.nothing_left(&client).await;
    });
}

/// The use of a declared volume registers it. It does not after the file was removed or changed meanwhile.
#[test]
fn removed_declaration_is_not_registered_for_waiters() {
    alone(FILES, async |w| {
        with_plugin(w, &["v"]).await;
        let slow = Rule::always("ValidateVolumeCapabilities", Act::Delay(1500));
        w.plugin("p").rules([slow]);
        let client = w.start().await;
        healthy(&client, "p").await;
        for change in [None, Some(XFS)] {
            let file = w.declare("v", WRITER);
            reload(&client).await.unwrap();
            let call = {
                let client = client.clone();
                tokio::spawn(async move { mount(&client, "v", MountOptions::default()).await })
            };
            eventually("the call waits for the plugin's answer", async || {
                let operations = client.list_operations().await.unwrap();
                operations.iter().filter(|operation| operation.kind == "validate").count() == 2
            })
            .await;
            match change {
                None => fs::remove_file(&file).unwrap(),
                Some(more) => drop(w.declare("v", &format!("{WRITER}{more}"))),
            }
            reload(&client).await.unwrap();
            let (kind, error) = refusal(call.await.unwrap());
            assert!(kind == Kind::NotFound && error.details.retryable == Some(change.is_some()), "{error:?}");
            match change {
                None => assert_eq!(ids(&client).await, [""; 0]),
                Some(_) => {
                    has(&client, &["v"]).await;
                    assert_eq!(list(&client).await[0].fs_type, "xfs");
                }
            }
        }
        w.nothing_left(&client).await;
    });
}

#[test]
fn wrong_file_leaves_out_its_own_volume_only() {
    alone(FILES, async |w| {
        with_plugin(w, &["a", "b"]).await;
        w.declare("a", WRITER);
        let bad = w.declare("bad", "capabilities = []\n");
        let client = w.start().await;
        has(&client, &["a"]).await;
        let reply = event(&client, 0, &["reload"], "").await;
        for said in [detail(&reply, "error"), log(w)] {
            assert!(said.contains("bad.toml: line 3: capabilities is empty"), "{said}");
        }
        // A reload takes nothing.
        let b = w.declare("b", WRITER);
        let (kind, error) = refusal(reload(&client).await);
        assert!(kind == Kind::InvalidArgument && error.message.contains("bad.toml: line 3"), "{error}");
        assert_eq!(ids(&client).await, ["a"]);
        fs::remove_file(bad).unwrap();
        reload(&client).await.unwrap();
        has(&client, &["a", "b"]).await;

        // A file that is broken is not one that is gone.
        fs::write(&b, "not toml").unwrap();
        w.kill();
        let client = w.start().await;
        assert_eq!(ids(&client).await, ["a", "b"]);
        let (kind, error) = refusal(deregister(&client, "b").await);
        assert_eq!(kind, Kind::NotSupported, "{error}");
        mount(&client, "b", MountOptions::default()).await.expect("it can be used as it was");
        unmount(&client, "b", "job").await.unwrap();
        fs::remove_file(&b).unwrap();
        w.kill();
        let client = w.start().await;
        assert_eq!(ids(&client).await, ["a"], "at a start as at a reload");
    });
}

#[test]
fn volume_registered_by_call_is_not_taken_over() {
    alone(FILES, async |w| {
        with_plugin(w, &["v"]).await;
        let client = w.start().await;
        healthy(&client, "p").await;
        client.register_volume(NAMESPACE, "v", register("v")).await.unwrap();
        let file = w.declare("v", &format!("{WRITER}{XFS}"));
        let (kind, error) = refusal(reload(&client).await);
        assert_eq!(kind, Kind::AlreadyExists, "{error}");
        assert!(error.message.contains("v.toml: "), "{error}");
        assert_eq!(error.details.obstacle.as_deref(), Some("registered-by-call"));

        w.kill();
        let client = w.start().await;
        let reply = event(&client, 0, &["volume-registered"], "default/v").await;
        assert!(detail(&reply, "error").is_empty(), "the first is the call's");
        eventually("it says why", async || explain(&client, "v").await.last_error.contains("by a call"))
            .await;
        eventually("the event", async || {
            events(&client, reply.sequence).await.iter().any(|e| detail(e, "error").contains("v.toml"))
        })
        .await;
        assert_eq!(list(&client).await[0].fs_type, "", "it is as the call made it");
        mount(&client, "v", MountOptions::default()).await.expect("and works");
        unmount(&client, "v", "job").await.unwrap();
        // Its owner deregisters it: then it is the file's, by the next reload at the latest.
        deregister(&client, "v").await.unwrap();
        reload(&client).await.unwrap();
        eventually("it is the file's", async || {
            list(&client).await.first().is_some_and(|row| row.fs_type == "xfs")
        })
        .await;
        // One that is only declared is the file's as well.
        w.plugin("p").kill();
        w.declare("w", WRITER);
        reload(&client).await.unwrap();
        let (kind, error) = refusal(client.register_volume(NAMESPACE, "w", register("w")).await);
        assert!(kind == Kind::NotSupported && error.message.contains("w.toml"), "{error}");
        fs::remove_file(file).unwrap();
        w.plugin("p").start().await;
    });
}

#[test]
fn missing_volume_is_reported_and_retried_by_reload() {
    alone(FILES, async |w| {
        with_plugin(w, &[]).await;
        w.declare("v", WRITER);
        let client = w.start().await;
        let reply = event(&client, 0, &["volume-registered"], "default/v").await;
        assert!(detail(&reply, "error").starts_with("NotFound: "), "{reply:?}");
        let why = explain(&client, "v").await;
        assert!(why.next_try > 0 && why.last_error.contains("v.toml"), "{why:?}");
        let (kind, error) = refusal(mount(&client, "v", MountOptions::default()).await);
        assert!(kind == Kind::NotFound && error.message.contains("v.toml"), "{error}");
        let (kind, error) = refusal(client.volume(NAMESPACE, "v").await);
        assert!(kind == Kind::NotFound && error.message.contains("v.toml"), "{error}");
        w.plugin("p").provision("v");
        reload(&client).await.unwrap();
        has(&client, &["v"]).await;
    });
}

#[test]
fn declaration_is_registered_after_a_kill() {
    alone(FILES, async |w| {
        with_plugin(w, &["v"]).await;
        let fault = Fault::of(w);
        let edges = ["ValidateVolumeCapabilities", "registration"];
        let edges = edges.iter().flat_map(|edge| [format!("{edge}.before"), format!("{edge}.after")]);
        let mut kills = 0;
        for edge in edges {
            fault.disarm();
            let file = w.declare("v", WRITER);
            fault.arm(&format!("{edge}:1"));
            w.launch(&[]).await;
            eventually(&format!("csid dies at {edge}"), async || w.dead()).await;
            kills += 1;
            fault.disarm();
            let client = w.start().await;
            has(&client, &["v"]).await;
            // And its removal.
            fs::remove_file(file).unwrap();
            if edge.starts_with("registration") {
                fault.arm(&format!("{edge}:1"));
                let _ = reload(&client).await;
                eventually(&format!("csid dies at {edge}"), async || w.dead()).await;
                kills += 1;
                fault.disarm();
                w.start().await;
            } else {
                reload(&client).await.unwrap();
            }
            assert_eq!(ids(&w.client().await).await, [""; 0], "{edge}");
            w.kill();
        }
        count("kills on the way of a declared volume", kills);
        let client = w.start().await;
        w.nothing_left(&client).await;
    });
}
