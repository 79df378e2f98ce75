//! A volume that is created, used and deleted through the host `n-creates`. The plugin's controller runs on the host `c1` alone.

use std::path::{Path, PathBuf};
use std::time::Duration;

use csi_proto::cluster::v1::change_ask::What;
use csi_proto::cluster::v1::{
    Capability, ChangeAsk, CreateAsk, DeleteAsk, DeleteSnapshotAsk, SnapshotAsk, Spec, VolumeRow,
};
use csid_client::{AccessMode, Client, CreateVolume, ExpandOptions, Kind, SnapshotOptions, VolumeOptions};
use csid_tests::ask::*;
use csid_tests::fault::Fault;
use csid_tests::script::{Act, Half, Lie, Rule};
use csid_tests::world::{World, count, eventually, refusal, world};

use crate::kills::again;
use crate::*;

const CREATES: &[&str] = &[
    "CREATE_DELETE_VOLUME",
    "PUBLISH_UNPUBLISH_VOLUME",
    "PUBLISH_READONLY",
    "EXPAND_VOLUME",
    "CLONE_VOLUME",
    "CREATE_DELETE_SNAPSHOT",
    "LIST_SNAPSHOTS",
];

/// Makes a change as an operator.
async fn change(site: &Site, what: What) -> Result<VolumeRow, tonic::Status> {
    let changed = site.operator(0, "all").change(ChangeAsk { what: Some(what) }).await;
    changed.map(tonic::Response::into_inner)
}

/// Starts this world's csid as `c1`, which has the plugin's controller.
async fn c1(w: &mut World, link: &Path) -> Client {
    let plugin = w.add_plugin_and("p", &[], "").await;
    plugin.set(|script| {
        script.control(CREATES);
        script.node_id = "node c1".into();
        script.plugin.push("ONLINE".to_owned());
        script.capabilities.push("EXPAND_VOLUME".to_owned());
        script.others = vec!["node n-creates".into()];
    });
    plugin.kill();
    plugin.start().await;
    w.configure(&format!("{}controllers = [\"p\"]\ncontroller-volumes = [\"p\"]\n", of_node("c1", link)));
    let client = w.start().await;
    healthy(&client, "p").await;
    joined(w).await;
    client
}

fn spec() -> CreateVolume {
    CreateVolume {
        plugin: Some("p".to_owned()),
        capabilities: Some(capabilities(&[AccessMode::SingleNodeWriter])),
        capacity_min: Some(1 << 20),
        ..CreateVolume::default()
    }
}

fn within(deadline: Duration) -> VolumeOptions {
    let deadline_usec = u64::try_from(deadline.as_micros()).ok();
    VolumeOptions { deadline_usec, ..VolumeOptions::default() }
}

/// Creates, uses and deletes as the other host's test says so.
async fn uses(w: &mut World, link: &Path, storage: PathBuf, mut other: Other) {
    let plugin = w.add_plugin_and("p", &[], "").await;
    plugin.set(|script| {
        script.control(CREATES);
        script.serves = vec![Half::Node];
        script.node_id = "node n-creates".into();
        script.plugin.push("ONLINE".to_owned());
        script.capabilities.push("EXPAND_VOLUME".to_owned());
    });
    plugin.kill();
    plugin.shares(storage);
    plugin.start().await;
    w.configure(&of_node("n-creates", link));
    let client = w.start().await;
    healthy(&client, "p").await;
    joined(w).await;
    other.say("ready");
    let refused = |spec| async { refusal(client.create_volume(NAMESPACE, "data", spec).await).0 };
    loop {
        match other.hears.recv().await {
            Some("lie") => {
                let clone = CreateVolume { clone: Some("a".to_owned()), ..spec() };
                assert_eq!(refused(clone).await, Kind::NotFound);
                let unkept = CreateVolume { register: Some(false), ..spec() };
                let given = CreateVolume { secrets: Some(secrets(&[("key", "hunter2")])), ..spec() };
                for wrong in [unkept, given] {
                    assert_eq!(refused(wrong).await, Kind::NotSupported);
                }
                let named = CreateVolume { name: Some("of-another".to_owned()), ..spec() };
                assert_eq!(refused(named).await, Kind::InvalidArgument);
                other.say("was refused");
            }
            Some("create") => {
                let made = client.create_volume(NAMESPACE, "data", spec()).await.unwrap();
                assert_eq!((made.capacity, made.external_id.starts_with("id-csid-")), (1 << 20, true));
                other.say("created");
            }
            Some("copy") => {
                let clone = CreateVolume { clone: Some("data".to_owned()), ..spec() };
                client.create_volume(NAMESPACE, "clone", clone).await.unwrap();
                let options = SnapshotOptions::default();
                let taken = client.create_snapshot(NAMESPACE, "data", "monday", options).await.unwrap();
                let restored = CreateVolume { snapshot: Some(taken.id), ..spec() };
                client.create_volume(NAMESPACE, "restored", restored).await.unwrap();
                for volume in ["clone", "restored"] {
                    client.delete_volume(NAMESPACE, volume, VolumeOptions::default()).await.unwrap();
                }
                other.say("copied");
            }
            Some("mount") => {
                // The witness of this host sees its own plugin alone, which has no controller. The plugin itself knows what is attached.
                w.excuse(31, "with a publish_context, and the plugin does not attach");
                let mounted = mount_registered(&client, "data", "web").await.unwrap();
                assert!(Path::new(&mounted.source).exists());
                let staged = w.plugin("p").volume_calls().remove(0).call;
                assert!(staged.context.iter().any(|(key, _)| key == "born"), "{:?}", staged.context);
                let in_use = client.delete_volume(NAMESPACE, "data", within(Duration::from_secs(5))).await;
                let (kind, error) = refusal(in_use);
                assert_eq!((kind, error.details.holders), (Kind::Busy, vec!["n-creates/web".to_owned()]));
                other.say("mounted");
            }
            Some("expand") => {
                let larger = ExpandOptions::default();
                let expanded = client.expand_volume(NAMESPACE, "data", 2 << 20, 0, larger).await.unwrap();
                assert_eq!((expanded.capacity_bytes, expanded.node_expansion_required), (2 << 20, false));
                assert_eq!(w.plugin("p").count("NodeExpandVolume", ""), 1);
                other.say("expanded");
            }
            Some("unmount") => {
                unmount(&client, "data", "web").await.unwrap();
                other.say("unmounted");
            }
            Some("delete") => {
                client.delete_volume(NAMESPACE, "data", VolumeOptions::default()).await.unwrap();
                let (kind, _) = refusal(client.volume(NAMESPACE, "data").await);
                assert_eq!(kind, Kind::NotFound);
                other.say("deleted");
            }
            Some(what) => panic!("{what}"),
            None => break,
        }
    }
    assert_eq!(claims(&client).await.len(), 0);
}

async fn nothing_at_servers(site: &Site) {
    eventually("the servers have no volume", async || {
        let mut raw = site.raw().await;
        raw.below("/csid/v1/vol/").await.is_empty() && raw.below("/csid/v1/ext/").await.is_empty()
    })
    .await;
}

/// The servers have asked which volume the snapshot is of, and the plugin of this host says otherwise: a host that was asked has lied.
#[test]
fn snapshot_of_another_volume_is_not_deleted() {
    world(async |w| {
        let site = Site::start(1).await;
        let link = site.node("c1");
        let client = c1(w, link.run()).await;
        let capability =
            Capability { access_mode: "single-node-writer".into(), attachment_mode: "file-system".into() };
        let spec = Spec { capabilities: vec![capability], ..Spec::default() };
        let (volume, plugin) = ("data".to_owned(), "p".to_owned());
        let create = CreateAsk {
            volume: volume.clone(),
            plugin: plugin.clone(),
            spec: Some(spec),
            capacity_min: 1 << 20,
            ..CreateAsk::default()
        };
        change(&site, What::Create(create)).await.unwrap();
        let snapshot =
            SnapshotAsk { volume, name: "monday".into(), call: "1".into(), ..SnapshotAsk::default() };
        let made = change(&site, What::Snapshot(snapshot)).await.unwrap().snapshot.unwrap();
        let delete = |call: &str| {
            let (plugin, snapshot, call) = (plugin.clone(), made.id.clone(), call.to_owned());
            change(&site, What::DeleteSnapshot(DeleteSnapshotAsk { plugin, snapshot, call }))
        };
        // The server asks first, and then the host that is to delete it.
        let of_host = |act| Rule { from: 2, times: 1, ..Rule::always("ListSnapshots", act) };
        w.plugin("p").rules([of_host(Act::Lie(Lie::Another))]);
        let refused = delete("2").await.unwrap_err();
        assert!(refused.message().contains("is not of the volume"), "{refused:?}");
        assert_eq!(w.plugin("p").count("DeleteSnapshot", ""), 0);
        // A list without an answer is repeated.
        w.plugin("p").rules([of_host(Act::Fail(14))]);
        delete("3").await.unwrap();
        assert_eq!(w.plugin("p").count("DeleteSnapshot", ""), 1);
        w.honest();
        let delete = DeleteAsk { volume: "data".into(), ..DeleteAsk::default() };
        change(&site, What::Delete(delete)).await.unwrap();
        nothing_at_servers(&site).await;
        w.nothing_left(&client).await;
    });
}

#[test]
fn volume_is_created_by_another_hosts_controller() {
    world(async |w| {
        let site = Site::start(1).await;
        let link = site.node("c1");
        let client = c1(w, link.run()).await;
        let (mut user, thread, _link) = start_user(&site, w, "n-creates", uses).await;
        let mut seen = 0;
        user.say("lie");
        user.hear("was refused").await;
        nothing_at_servers(&site).await;
        user.say("create");
        user.hear("created").await;
        assert_eq!(called(w, &mut seen), ["CreateVolume"]);
        user.say("copy");
        user.hear("copied").await;
        assert_eq!(
            called(w, &mut seen),
            ["CreateVolume", "CreateSnapshot", "CreateVolume", "DeleteVolume", "DeleteVolume"]
        );
        // The host has no grant for it.
        let (kind, _) = refusal(client.create_volume(NAMESPACE, "other", spec()).await);
        assert_eq!(kind, Kind::NotAuthorized);
        let (kind, _) = refusal(client.delete_volume(NAMESPACE, "data", VolumeOptions::default()).await);
        assert_eq!(kind, Kind::NotAuthorized);
        user.say("mount");
        user.hear("mounted").await;
        user.say("expand");
        user.hear("expanded").await;
        user.say("unmount");
        user.hear("unmounted").await;
        servers_have(&site, "data", &[]).await;
        user.say("delete");
        user.hear("deleted").await;
        assert_eq!(
            called(w, &mut seen),
            [
                "ControllerPublishVolume",
                "ControllerExpandVolume",
                "ControllerUnpublishVolume",
                "DeleteVolume"
            ]
        );
        nothing_at_servers(&site).await;
        drop(user);
        thread.join().unwrap();
        w.nothing_left(&client).await;
    });
}

/// The host that has the controller is killed at each edge of its calls.
#[test]
fn killed_controller_host_creates_one_volume() {
    world(async |w| {
        let site = Site::start(1).await;
        let link = site.node("c1");
        let fault = Fault::of(w);
        let mut client = c1(w, link.run()).await;
        let (mut user, thread, _link) = start_user(&site, w, "n-creates", uses).await;
        let (mut kills, mut seen) = (0, 0);
        let (create, delete) = ("CreateVolume", "DeleteVolume");
        for (edge, due) in [
            ("CreateVolume.before:1", &[create, delete][..]),
            ("CreateVolume.after:1", &[create, create, delete]),
            ("DeleteVolume.before:1", &[create, delete]),
            ("DeleteVolume.after:1", &[create, delete, delete]),
        ] {
            for (word, done) in [("create", "created"), ("delete", "deleted")] {
                let is_killed = edge.to_lowercase().starts_with(word);
                if is_killed {
                    fault.arm(edge);
                }
                user.say(word);
                if is_killed {
                    client = again(w, &fault).await;
                    kills += 1;
                }
                user.hear(done).await;
            }
            assert_eq!(called(w, &mut seen), due, "{edge}");
            nothing_at_servers(&site).await;
        }
        count("kills", kills);
        drop(user);
        thread.join().unwrap();
        w.nothing_left(&client).await;
    });
}
