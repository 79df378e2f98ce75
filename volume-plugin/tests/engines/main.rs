//! The volume plugin with a real csid, asked as Docker and Podman ask.

mod engine;

use std::time::Duration;

use csid_client::{AccessMode, AttachmentMode, Capability, Client, RegisterVolume};
use csid_tests::ask::*;
use csid_tests::dbus::{Bus, Policy, Polkit, Verdict};
use csid_tests::dice::Dice;
use csid_tests::script::{Act, Rule};
use csid_tests::world::{World, count, eventually, world};

use crate::engine::{PODMAN, VolumePlugin, of};

const ONE: [AccessMode; 1] = [AccessMode::SingleNodeWriter];

/// Starts csid with the volume `pg`, and the volume plugin.
async fn with_pg(w: &mut World) -> (Client, VolumePlugin) {
    let client = running(w).await;
    registered(&client, "pg", &ONE).await;
    let plugin = VolumePlugin::start(w).await;
    (client, plugin)
}

#[test]
fn mount_lasts_until_dockers_last_id_has_gone() {
    world(async |w| {
        let (client, plugin) = with_pg(w).await;
        let path = plugin.mounted("pg", "one").await;
        assert!(path.is_dir());
        assert_eq!(plugin.mounted("pg", "two").await, path, "all containers share one mount");
        // `docker cp` mounts and unmounts once more with the ID of the container.
        assert_eq!(plugin.mounted("pg", "two").await, path);
        plugin.unmounted("pg", "two").await;
        assert_eq!(w.plugin("p").count("NodePublishVolume", "pg"), 1);
        let row = row(&client, "pg", "docker").await.unwrap();
        assert_eq!((row.state.as_str(), row.restore.as_str()), ("mounted", "hold"));
        plugin.unmounted("pg", "one").await;
        assert_eq!(state(&client, "pg", "docker").await, "mounted");
        plugin.unmounted("pg", "two").await;
        assert!(rows(&client).await.is_empty());
        plugin.unmounted("pg", "two").await;
        assert_eq!(plugin.count(), 0);
        w.nothing_left(&client).await;
    });
}

#[test]
fn docker_and_podman_are_two_consumers() {
    world(async |w| {
        let (client, plugin) = with_pg(w).await;
        plugin.mounted("pg", PODMAN).await;
        assert_eq!(state(&client, "pg", "podman").await, "mounted");
        let (status, answer) = plugin.post("/VolumeDriver.Mount", &of("pg", "one")).await;
        assert_eq!(status, 500);
        assert!(answer.contains("ClaimConflict") && answer.contains("podman"), "{answer}");
        assert_eq!(plugin.count(), 1, "a failed Mount is no use");
        plugin.unmounted("pg", PODMAN).await;
        plugin.mounted("pg", "one").await;
        plugin.unmounted("pg", "one").await;
        w.nothing_left(&client).await;
    });
}

#[test]
fn volumes_are_those_of_the_namespace() {
    world(async |w| {
        let client = running(w).await;
        registered(&client, "pg", &ONE).await;
        registered(&client, "pg-2", &ONE).await;
        let plugin = VolumePlugin::start(w).await;
        let post = async |path: &str, body: &str| {
            let (status, answer) = plugin.post(path, body).await;
            (status, serde_json::from_str::<serde_json::Value>(&answer).unwrap())
        };
        let source = plugin.mounted("pg", PODMAN).await;
        let (status, got) = post("/VolumeDriver.Get", r#"{"Name":"pg"}"#).await;
        assert_eq!((status, got["Err"].as_str()), (200, Some("")));
        assert_eq!(got["Volume"]["Mountpoint"].as_str(), source.to_str());
        assert_eq!(got["Volume"]["Status"]["plugin"], "p");
        assert_eq!(
            post("/VolumeDriver.Path", r#"{"Name":"pg"}"#).await.1["Mountpoint"].as_str(),
            source.to_str()
        );
        let (_, listed) = post("/VolumeDriver.List", "{}").await;
        let names: Vec<_> =
            listed["Volumes"].as_array().unwrap().iter().map(|one| one["Name"].clone()).collect();
        assert_eq!(names, ["pg", "pg-2"]);
        assert_eq!(post("/VolumeDriver.List", "").await.0, 200, "Docker sends no body");
        for (path, body, says) in [
            ("/VolumeDriver.Get", r#"{"Name":"p"}"#, "no such volume"),
            ("/VolumeDriver.Mount", r#"{"Name":"p","ID":"x"}"#, "is not registered"),
            ("/VolumeDriver.Create", r#"{"Name":"p","Opts":{"size":"1G"}}"#, "is not registered"),
        ] {
            let (status, answer) = post(path, body).await;
            let error = answer["Err"].as_str().unwrap();
            assert!(status == 500 && error.contains(says), "{path}: {status} {error}");
        }
        let known = r#"{"Name":"pg","Opts":{"size":"1G"}}"#;
        assert_eq!(post("/VolumeDriver.Create", known).await.0, 200, "the volume is there already");
        for volume in ["pg", "pg-2", "unknown"] {
            let body = serde_json::json!({ "Name": volume }).to_string();
            assert_eq!(post("/VolumeDriver.Remove", &body).await.0, 200, "{volume}");
        }
        let left = client.list_volumes(Default::default()).await.unwrap();
        assert_eq!(left.len(), 2, "a Remove deletes nothing");
        plugin.unmounted("pg", PODMAN).await;
        w.nothing_left(&client).await;
    });
}

#[test]
fn engine_deletes_only_what_it_created() {
    world(async |w| {
        let bus = Bus::start(w, Policy::Everything).await;
        let polkit = Polkit::start(&bus, Verdict::Yes).await;
        w.add_plugin("p").await.set(|script| script.control(&["CREATE_DELETE_VOLUME"]));
        w.plugin("p").kill();
        w.plugin("p").start().await;
        let client = w.start().await;
        healthy(&client, "p").await;
        bus.has_csid().await;
        w.plugin("p").provision("roots");
        registered(&client, "roots", &ONE).await;
        let plugin = VolumePlugin::that_creates(w, &bus).await;
        let create = r#"{"Name":"new","Opts":{"plugin":"p","size":"1M"}}"#;
        for (body, says) in [
            (r#"{"Name":"new"}"#, "the option `plugin` is missing"),
            (r#"{"Name":"new","Opts":{"plugin":"p","speed":"9"}}"#, "there is no option `speed`"),
        ] {
            let (status, answer) = plugin.post("/VolumeDriver.Create", body).await;
            assert!(status == 500 && answer.contains(says), "{status} {answer}");
        }
        polkit.says(Verdict::No);
        let (status, answer) = plugin.post("/VolumeDriver.Create", create).await;
        assert!(status == 500 && answer.contains("NotAuthorized"), "{status} {answer}");
        polkit.says(Verdict::Yes);
        for _ in 0..2 {
            assert_eq!(plugin.post("/VolumeDriver.Create", create).await.0, 200);
        }
        let created = client.volume(NAMESPACE, "new").await.unwrap();
        assert_eq!((created.uid, created.standing.as_str()), (65_534, "registered"));
        plugin.mounted("new", PODMAN).await;
        let (status, answer) = plugin.post("/VolumeDriver.Remove", r#"{"Name":"new"}"#).await;
        assert!(status == 500 && answer.contains("Busy"), "{status} {answer}");
        plugin.unmounted("new", PODMAN).await;
        for name in ["new", "roots", "unknown"] {
            let body = serde_json::json!({ "Name": name }).to_string();
            assert_eq!(plugin.post("/VolumeDriver.Remove", &body).await.0, 200, "{name}");
        }
        let left = client.list_volumes(Default::default()).await.unwrap();
        assert_eq!(left.iter().map(|volume| volume.id.as_str()).collect::<Vec<_>>(), ["roots"]);
        assert_eq!(w.plugin("p").count("DeleteVolume", "roots"), 0);
        w.nothing_left(&client).await;
    });
}

#[test]
fn bad_requests_change_nothing() {
    world(async |w| {
        let (client, plugin) = with_pg(w).await;
        let long = format!(r#"{{"Name":"pg","ID":"{}"}}"#, "x".repeat(70_000));
        for (path, body, status) in [
            ("/VolumeDriver.Mount", "{", 400),
            ("/VolumeDriver.Mount", r#"{"Name":7}"#, 400),
            ("/VolumeDriver.Mount", r#"{"ID":"x"}"#, 400),
            ("/VolumeDriver.Mount", long.as_str(), 400),
            ("/VolumeDriver.Snapshot", r#"{"Name":"pg"}"#, 404),
            ("/../VolumeDriver.Mount", r#"{"Name":"pg"}"#, 404),
        ] {
            let (got, answer) = plugin.post(path, body).await;
            assert!(got == status && answer.starts_with(r#"{"Err":""#), "{path}: {got} {answer}");
        }
        let name = "n".repeat(2000);
        assert_eq!(plugin.post("/VolumeDriver.Mount", &of(&name, "x")).await.0, 500);
        assert_eq!(plugin.count(), 0);
        assert!(rows(&client).await.is_empty());
    });
}

#[test]
fn block_device_is_refused_and_unpublished() {
    world(async |w| {
        w.add_plugin("p").await;
        w.add_device("p", "disk");
        let client = w.start().await;
        healthy(&client, "p").await;
        let capability = Capability {
            access_mode: AccessMode::SingleNodeWriter,
            attachment_mode: AttachmentMode::BlockDevice,
        };
        let spec = RegisterVolume {
            plugin: Some("p".to_owned()),
            external_id: Some("disk".to_owned()),
            capabilities: Some(vec![capability]),
            ..RegisterVolume::default()
        };
        client.register_volume(NAMESPACE, "disk", spec).await.unwrap();
        let plugin = VolumePlugin::start(w).await;
        let (status, answer) = plugin.post("/VolumeDriver.Mount", &of("disk", "one")).await;
        assert!(status == 500 && answer.contains("is a block device"), "{status} {answer}");
        assert_eq!(plugin.count(), 0);
        w.nothing_left(&client).await;
    });
}

/// csid forgets the mounts of `csictl unmount`, and the engine does not hear of it.
#[test]
fn uses_of_an_earlier_mount_do_not_count() {
    world(async |w| {
        let (client, plugin) = with_pg(w).await;
        plugin.mounted("pg", "one").await;
        unmount(&client, "pg", "docker").await.unwrap();
        plugin.mounted("pg", "two").await;
        plugin.unmounted("pg", "two").await;
        assert!(rows(&client).await.is_empty(), "the use of `one` is of the mount that csictl ended");
        plugin.mounted("pg", "three").await;
        unmount(&client, "pg", "docker").await.unwrap();
        eventually("the sweep removes the use", async || plugin.count() == 0).await;
        w.nothing_left(&client).await;
    });
}

#[test]
fn engine_that_hangs_up_during_a_mount_is_no_user() {
    world(async |w| {
        let client = running(w).await;
        registered(&client, "pg", &ONE).await;
        w.plugin("p").rules([Rule::always("NodePublishVolume", Act::Delay(500))]);
        let plugin = VolumePlugin::start(w).await;
        let asked = plugin.ask("/VolumeDriver.Mount", &of("pg", "one")).await.unwrap();
        eventually("csid mounts", async || state(&client, "pg", "docker").await == "mounting").await;
        drop(asked);
        eventually("it is mounted all the same", async || state(&client, "pg", "docker").await == "mounted")
            .await;
        eventually("the sweep unmounts it", async || rows(&client).await.is_empty()).await;
        assert_eq!(plugin.count(), 0);
        // The engine's retry finds the first try under way, or mounted, or unmounted: it mounts.
        let asked = plugin.ask("/VolumeDriver.Mount", &of("pg", "one")).await.unwrap();
        eventually("csid mounts", async || state(&client, "pg", "docker").await == "mounting").await;
        drop(asked);
        plugin.mounted("pg", "one").await;
        tokio::time::sleep(Duration::from_secs(4)).await;
        assert_eq!(state(&client, "pg", "docker").await, "mounted", "no sweep unmounts what is used");
        plugin.unmounted("pg", "one").await;
        w.nothing_left(&client).await;
    });
}

#[test]
fn failed_unmount_of_docker_is_repeated_by_the_sweep() {
    world(async |w| {
        let (client, plugin) = with_pg(w).await;
        let path = plugin.mounted("pg", "one").await;
        let open = std::fs::File::open(&path).unwrap();
        let (status, answer) = plugin.post("/VolumeDriver.Unmount", &of("pg", "one")).await;
        assert!(status == 500 && answer.contains("Busy"), "{status} {answer}");
        assert_eq!(state(&client, "pg", "docker").await, "mounted");
        drop(open);
        eventually("the sweep unmounts it", async || rows(&client).await.is_empty()).await;
        w.nothing_left(&client).await;
    });
}

/// Podman keeps its count after a failed Unmount, and sends no Mount for the next container.
#[test]
fn mount_of_podman_stays_after_a_failed_unmount() {
    world(async |w| {
        let (client, plugin) = with_pg(w).await;
        let path = plugin.mounted("pg", PODMAN).await;
        let open = std::fs::File::open(&path).unwrap();
        assert_eq!(plugin.post("/VolumeDriver.Unmount", &of("pg", PODMAN)).await.0, 500);
        drop(open);
        tokio::time::sleep(Duration::from_secs(4)).await;
        assert_eq!(state(&client, "pg", "podman").await, "mounted", "no sweep unmounts it");
        plugin.unmounted("pg", PODMAN).await;
        w.nothing_left(&client).await;
    });
}

/// Waits until csid has ended Podman's mount, and then mounts for Podman's next container.
async fn podman_goes_on(w: &World, client: &Client, plugin: &VolumePlugin) {
    eventually("csid unmounts", async || state(client, "pg", "podman").await == "none").await;
    let path = plugin.mounted("pg", PODMAN).await;
    assert!(path.is_dir() && state(client, "pg", "podman").await == "mounted");
    plugin.unmounted("pg", PODMAN).await;
    w.nothing_left(client).await;
}

/// csid goes on with what the plugin has failed. After an error Podman would send no Mount for the next container.
#[test]
fn podman_mounts_again_after_a_plugin_failed() {
    world(async |w| {
        w.configure("[deadlines]\noperation = \"1s\"");
        let (client, plugin) = with_pg(w).await;
        plugin.mounted("pg", PODMAN).await;
        w.plugin("p").rules([Rule::always("NodeUnpublishVolume", Act::Fail(14))]);
        plugin.unmounted("pg", PODMAN).await;
        assert_ne!(state(&client, "pg", "podman").await, "mounted");
        assert_eq!(plugin.count(), 0);
        w.plugin("p").honest();
        podman_goes_on(w, &client, &plugin).await;
    });
}

/// An Unmount that waits for its turn goes on without its caller, and the row says `mounted` meanwhile.
#[test]
fn podman_mounts_again_after_a_cancelled_unmount() {
    world(async |w| {
        let client = running(w).await;
        registered(&client, "pg", &[AccessMode::SingleNodeMultiWriter]).await;
        let plugin = VolumePlugin::start(w).await;
        plugin.mounted("pg", PODMAN).await;
        w.plugin("p").rules([Rule::always("NodePublishVolume", Act::Hold)]);
        let asking = client.clone();
        let other = tokio::spawn(async move { mount_registered(&asking, "pg", "job").await });
        eventually("another mount is under way", async || {
            w.plugin("p").begun_since(0, "NodePublishVolume") == 2
        })
        .await;
        let podmans = of("pg", PODMAN);
        let unmounting = plugin.post("/VolumeDriver.Unmount", &podmans);
        let cancelling = async {
            let mut operation = None;
            eventually("csid has the Unmount", async || {
                let operations = client.list_operations().await.unwrap();
                operation = operations.into_iter().find(|one| one.kind == "unmount");
                operation.is_some()
            })
            .await;
            client.cancel_operation(&operation.unwrap().id).await.unwrap();
        };
        let (answer, ()) = tokio::join!(unmounting, cancelling);
        assert_eq!(answer, (200, r#"{"Err":""}"#.to_owned()));
        assert_eq!(state(&client, "pg", "podman").await, "mounted", "csid goes on later");
        w.plugin("p").honest();
        other.await.unwrap().unwrap();
        eventually("csid unmounts", async || state(&client, "pg", "podman").await == "none").await;
        unmount(&client, "pg", "job").await.unwrap();
        podman_goes_on(w, &client, &plugin).await;
    });
}

/// Podman keeps its count if the volume plugin dies during an Unmount. csid may not have the Unmount by then.
#[test]
fn use_of_podman_lasts_until_csid_has_unmounted() {
    world(async |w| {
        let (client, mut plugin) = with_pg(w).await;
        let path = plugin.mounted("pg", PODMAN).await;
        drop(client);
        w.kill();
        std::fs::remove_file(w.socket()).unwrap();
        let silent = tokio::net::UnixListener::bind(w.socket()).unwrap();
        let asked = plugin.ask("/VolumeDriver.Unmount", &of("pg", PODMAN)).await.unwrap();
        // The volume plugin asks csid.
        let call = silent.accept().await.unwrap();
        plugin.kill();
        drop((asked, call, silent));
        let client = w.start().await;
        healthy(&client, "p").await;
        plugin.restart().await;
        assert_eq!(plugin.count(), 1);
        // The sweeps see that this one has no use.
        registered(&client, "unused", &ONE).await;
        mount_registered(&client, "unused", "podman").await.unwrap();
        eventually("the sweep unmounts it", async || state(&client, "unused", "podman").await == "none")
            .await;
        assert!(path.is_dir() && state(&client, "pg", "podman").await == "mounted");
        plugin.unmounted("pg", PODMAN).await;
        assert_eq!(plugin.count(), 0);
        w.nothing_left(&client).await;
    });
}

#[test]
fn csid_may_restart_between_mount_and_unmount() {
    world(async |w| {
        let (client, mut plugin) = with_pg(w).await;
        let path = plugin.mounted("pg", "one").await;
        drop(client);
        w.kill();
        let client = w.start().await;
        assert_eq!(plugin.mounted("pg", "two").await, path);
        plugin.unmounted("pg", "one").await;
        assert!(plugin.stop(), "SIGTERM ends it");
        plugin.restart().await;
        assert_eq!(state(&client, "pg", "docker").await, "mounted", "users outlive the process");
        plugin.unmounted("pg", "two").await;
        assert!(rows(&client).await.is_empty());
        w.nothing_left(&client).await;
    });
}

#[test]
fn lost_row_after_a_reboot_waits_for_its_engine() {
    world(async |w| {
        let (client, mut plugin) = with_pg(w).await;
        plugin.mounted("pg", PODMAN).await;
        drop(client);
        plugin.kill();
        std::fs::remove_dir_all(&plugin.users).unwrap();
        std::fs::create_dir(&plugin.users).unwrap();
        w.reboot().await;
        let client = w.start().await;
        plugin.restart().await;
        assert_eq!(state(&client, "pg", "podman").await, "lost");
        tokio::time::sleep(Duration::from_secs(4)).await;
        assert_eq!(state(&client, "pg", "podman").await, "lost", "no sweep unmounts it");
        healthy(&client, "p").await;
        plugin.mounted("pg", PODMAN).await;
        assert_eq!(state(&client, "pg", "podman").await, "mounted");
        drop(client);
        std::fs::remove_dir_all(&plugin.users).unwrap();
        plugin.kill();
        std::fs::create_dir(&plugin.users).unwrap();
        w.reboot().await;
        let client = w.start().await;
        plugin.restart().await;
        // After `podman rm` Podman has no use of the volume, and sends no Unmount.
        assert_eq!(plugin.post("/VolumeDriver.Remove", r#"{"Name":"pg"}"#).await.0, 200);
        assert!(rows(&client).await.is_empty(), "a Remove gives up what a reboot has ended");
        w.nothing_left(&client).await;
    });
}

#[test]
fn many_starts_at_once_share_one_mount() {
    world(async |w| {
        let (client, plugin) = with_pg(w).await;
        let ids: Vec<String> = (0..200).map(|n| format!("container-{n}")).collect();
        let paths = futures_util::future::join_all(ids.iter().map(|id| plugin.mounted("pg", id))).await;
        assert!(paths.windows(2).all(|two| two[0] == two[1]));
        assert_eq!((plugin.count(), rows(&client).await.len()), (200, 1));
        futures_util::future::join_all(ids.iter().map(|id| plugin.unmounted("pg", id))).await;
        assert_eq!((plugin.count(), rows(&client).await.len()), (0, 0));
        assert_eq!(w.plugin("p").count("NodePublishVolume", "pg"), 1);
        w.nothing_left(&client).await;
    });
}

/// At whatever moment the volume plugin is killed, a mount without a use does not last, nor does a use without a mount.
#[test]
fn kill_at_any_moment_leaves_no_mount_without_use() {
    world(async |w| survives_kills(w, "one", "docker").await);
}

#[test]
fn kill_at_any_moment_leaves_no_use_of_podman_alone() {
    world(async |w| survives_kills(w, PODMAN, "podman").await);
}

/// Kills the volume plugin during an engine's requests, and waits until mounts and uses are the same.
async fn survives_kills(w: &mut World, id: &str, consumer: &str) {
    const KILLS: usize = 24;
    let client = running(w).await;
    registered(&client, "pg", &ONE).await;
    w.plugin("p").rules([Rule::always("NodePublishVolume", Act::Delay(4))]);
    let mut plugin = VolumePlugin::start(w).await;
    let seed = Dice::seed();
    let mut dice = Dice::new(seed, 0);
    let mut counted = 0;
    for kill in 0..KILLS {
        // A mount or an unmount takes some 10 ms here.
        let after = Duration::from_micros(dice.below(16_000));
        let path = if kill % 2 == 0 { "/VolumeDriver.Mount" } else { "/VolumeDriver.Unmount" };
        if kill % 2 == 1 {
            plugin.mounted("pg", id).await;
        }
        let asked = plugin.ask(path, &of("pg", id)).await.unwrap();
        tokio::time::sleep(after).await;
        plugin.kill();
        drop(asked);
        plugin.restart().await;
        // The engine has had no answer, and sends nothing more.
        eventually("mounts and uses are the same", async || {
            let is_mounted = state(&client, "pg", consumer).await == "mounted";
            is_mounted == (plugin.count() == 1) && (is_mounted || rows(&client).await.is_empty())
        })
        .await;
        // Killed after the use was counted, or before csid had the Unmount.
        if plugin.count() == 1 {
            counted += 1;
            plugin.unmounted("pg", id).await;
        }
        assert!(rows(&client).await.is_empty());
    }
    count("kills of the volume plugin", KILLS);
    count("of them after which the volume was mounted and had its use", counted);
    println!("CSID_SEED={seed}");
    w.nothing_left(&client).await;
}
