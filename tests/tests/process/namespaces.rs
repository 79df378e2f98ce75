//! Consumers in mount namespaces of their own: what outlives the host's unmount keeps the volume, and nothing else does.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use csid_client::{AccessMode, Client, Kind, MountOptions, OpenOptions, ReleaseOptions, UnmountOptions};
use csid_tests::ask::*;
use csid_tests::elsewhere::Consumer;
use csid_tests::fault::Fault;
use csid_tests::kernel;
use csid_tests::script::{Act, Rule};
use csid_tests::world::{World, count, eventually, refusal, world};
use rustix::mount::{UnmountFlags, unmount as unmount_now};

fn directory(w: &World, name: &str) -> PathBuf {
    let path = w.path(name);
    fs::create_dir_all(&path).unwrap();
    path
}

/// The removals that the plugin was asked for.
fn removals(w: &mut World) -> usize {
    let plugin = w.plugin("p");
    plugin.count("NodeUnpublishVolume", "") + plugin.count("NodeUnstageVolume", "")
}

/// Unmount is refused on behalf of this process, and nothing has changed.
async fn is_refused(w: &mut World, client: &Client, holder: &Consumer, source: &Path) {
    let before = removals(w);
    let (kind, error) = refusal(unmount(client, "v", "job").await);
    assert_eq!(kind, Kind::Busy, "{error}");
    names(&error.details.holders, holder);
    assert!(error.message.contains(&holder.pid().to_string()), "{error}");
    assert_eq!(removals(w), before, "no RPC was made");
    assert_eq!(state(client, "v", "job").await, "mounted");
    assert_eq!(kernel::stacked(source).unwrap(), 1);
    fs::write(source.join("after"), "the volume works").unwrap();
}

fn names(holders: &[String], holder: &Consumer) {
    let own = format!("{} sleep", holder.pid());
    assert!(holders.contains(&"job".to_owned()), "{holders:?}");
    assert!(holders.iter().any(|named| named.starts_with(&own)), "{own}: {holders:?}");
}

#[test]
fn unmount_is_busy_while_a_copy_stays() {
    world(async |w| {
        let client = running(w).await;
        let target = directory(w, "inside");
        // It has no mount of the volume, nor will it get one.
        let before = Consumer::copy("private");
        let source = mounted(&client, "job", inline("v")).await;
        fs::create_dir(source.join("sub")).unwrap();
        type Start<'a> = Box<dyn Fn() -> Consumer + 'a>;
        let starts: [(&str, Start<'_>); 5] = [
            ("a private copy of all mounts", Box::new(|| Consumer::copy("private"))),
            ("a private bind", Box::new(|| Consumer::bind(&source, &target, "private"))),
            ("a slave bind", Box::new(|| Consumer::bind(&source, &target, "rslave"))),
            ("a shared bind", Box::new(|| Consumer::bind(&source, &target, "rshared"))),
            ("a directory of it", Box::new(|| Consumer::bind(&source.join("sub"), &target, "private"))),
        ];
        for (what, start) in &starts {
            let consumer = start();
            eprintln!("with {what}");
            is_refused(w, &client, &consumer, &source).await;
            consumer.end();
        }
        count("consumers that Unmount was refused for", starts.len());
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
        before.end();
    });
}

#[test]
fn user_that_leaves_for_a_copy_during_unmount_is_found() {
    world(async |w| {
        let client = running(w).await;
        let source = mounted(&client, "job", inline("v")).await;
        let mut user = Consumer::before_it_leaves(&source);
        let before = removals(w);
        let asking = client.clone();
        let unmounting = tokio::spawn(async move { unmount(&asking, "v", "job").await });
        // csid asks for users of a busy mount for 300 ms, so it asks both before the process leaves and after.
        tokio::time::sleep(Duration::from_millis(100)).await;
        user.leave();
        let (kind, error) = refusal(unmounting.await.unwrap());
        assert_eq!(kind, Kind::Busy, "{error}");
        assert!(error.message.contains(&user.pid().to_string()), "{error}");
        assert_eq!(removals(w), before, "no RPC was made");
        user.end();
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn namespace_that_receives_the_unmount_is_no_use() {
    world(async |w| {
        let client = running(w).await;
        let target = directory(w, "targets/t");
        let before = Consumer::copy("slave");
        let options = MountOptions { target: Some(target.to_str().unwrap().to_owned()), ..inline("v") };
        let source = mounted(&client, "job", options).await;
        let after = [Consumer::copy("slave"), Consumer::copy("unchanged")];
        let shows = |consumer: &Consumer| {
            [&source, &target]
                .iter()
                .filter(|path| consumer.mounts().contains(path.to_str().unwrap()))
                .count()
        };
        for consumer in [&before].into_iter().chain(&after) {
            assert_eq!(shows(consumer), 2);
        }
        unmount(&client, "v", "job").await.unwrap();
        for consumer in [&before].into_iter().chain(&after) {
            assert_eq!(shows(consumer), 0, "it is unmounted there, too");
        }
        w.nothing_left(&client).await;
    });
}

#[test]
fn mount_on_a_received_mount_keeps_it() {
    world(async |w| {
        let client = running(w).await;
        let source = mounted(&client, "job", inline("v")).await;
        fs::create_dir(source.join("sub")).unwrap();
        // The kernel leaves a mount with something on it where it is.
        let consumer = Consumer::bind(&w.path("etc"), &source.join("sub"), "private");
        is_refused(w, &client, &consumer, &source).await;
        consumer.end();
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

/// The kernel alone knows: the service's mount would go with the host's, and is busy.
#[test]
fn unmount_that_a_service_refuses_changes_nothing() {
    world(async |w| {
        let client = running(w).await;
        let target = directory(w, "targets/t");
        let options = MountOptions { target: Some(target.to_str().unwrap().to_owned()), ..inline("w") };
        for (volume, options) in [("v", inline("v")), ("w", options)] {
            let source = mounted(&client, "job", options).await;
            let place = if volume == "v" { &source } else { &target };
            let service = Consumer::working_in(place);
            let before = removals(w);
            for _ in 0..2 {
                let (kind, error) = refusal(unmount(&client, volume, "job").await);
                assert_eq!(kind, Kind::Busy, "{error}");
                assert!(error.message.contains(&service.pid().to_string()), "{error}");
                assert_eq!(state(&client, volume, "job").await, "mounted");
                assert_eq!(kernel::stacked(place).unwrap(), 1);
            }
            service.end();
            assert_eq!(removals(w), before, "the plugin was not asked");
            // csid does not come back to it by itself.
            let report = client.reconcile(Default::default()).await.unwrap();
            assert_eq!((report.adopted.len(), report.undone.len()), (1, 0), "{report:?}");
            unmount(&client, volume, "job").await.unwrap();
        }
        w.nothing_left(&client).await;
    });
}

#[test]
fn volumes_of_one_file_system_are_told_apart() {
    world(async |w| {
        let client = running(w).await;
        let target = directory(w, "inside");
        mounted(&client, "job", inline("v")).await;
        let other = mounted(&client, "job", inline("vv")).await;
        let consumer = Consumer::bind(&other, &target, "private");
        unmount(&client, "v", "job").await.unwrap();
        let (kind, error) = refusal(unmount(&client, "vv", "job").await);
        assert_eq!(kind, Kind::Busy, "{error}");
        consumer.end();
        unmount(&client, "vv", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn one_of_several_consumers_unmounts() {
    world(async |w| {
        let client = running(w).await;
        let target = directory(w, "inside");
        let one = mounted(&client, "one", shared("v")).await;
        mounted(&client, "two", shared("v")).await;
        // Either may have it; it is the second one's as far as anybody can tell.
        let bound = Consumer::bind(&one, &target, "private");
        unmount(&client, "v", "one").await.unwrap();
        let (kind, error) = refusal(unmount(&client, "v", "two").await);
        assert_eq!(kind, Kind::Busy, "{error}");
        bound.end();
        unmount(&client, "v", "two").await.unwrap();

        let reads = MountOptions { read_only: Some(true), ..shared("v") };
        let writer = mounted(&client, "writer", shared("v")).await;
        mounted(&client, "reader", reads).await;
        let bound = Consumer::bind(&writer, &target, "private");
        let (kind, error) = refusal(unmount(&client, "v", "writer").await);
        assert_eq!(kind, Kind::Busy, "it writes, so it is not the reader's: {error}");
        bound.end();
        unmount(&client, "v", "writer").await.unwrap();
        unmount(&client, "v", "reader").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn release_is_busy_while_a_copy_stays() {
    world(async |w| {
        let client = running(w).await;
        registered(&client, "v", &[AccessMode::SingleNodeWriter]).await;
        client.claim(NAMESPACE, "v", "job", Default::default()).await.unwrap();
        let source = client.mount(NAMESPACE, "v", "job", MountOptions::default()).await.unwrap().source;
        let consumer = Consumer::bind(Path::new(&source), &directory(w, "inside"), "private");
        let release = || client.release(NAMESPACE, "v", "job", ReleaseOptions::default());
        let before = removals(w);
        let (kind, error) = refusal(release().await);
        assert_eq!(kind, Kind::Busy, "{error}");
        names(&error.details.holders, &consumer);
        assert_eq!(removals(w), before, "no RPC was made");
        assert_eq!(state(&client, "v", "job").await, "mounted");
        let claims = client.list_claims(Default::default()).await.unwrap();
        assert_eq!(claims.len(), 1, "the claim is kept");
        consumer.end();
        release().await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn namespace_made_during_unmount_keeps_the_staging() {
    world(async |w| {
        let client = running(w).await;
        let source = mounted(&client, "job", inline("v")).await;
        w.plugin("p").rules([Rule::once("NodeUnpublishVolume", Act::Delay(3_000))]);
        let unmounting = unmount(&client, "v", "job");
        let starting = async {
            eventually("NodeUnpublishVolume has begun", async || {
                w.plugin("p").count("NodeUnpublishVolume", "") == 1
            })
            .await;
            Consumer::copy("private")
        };
        let (unmounted, consumer) = tokio::join!(unmounting, starting);
        let (kind, error) = refusal(unmounted);
        assert_eq!(kind, Kind::Busy, "{error}");
        names(&error.details.holders, &consumer);
        assert_eq!(kernel::stacked(&source).unwrap(), 0);
        assert_eq!(state(&client, "v", "job").await, "unmounting");
        assert_eq!(w.plugin("p").count("NodeUnstageVolume", ""), 0);
        let (kind, error) = refusal(mount(&client, "other", inline("v")).await);
        assert_eq!(kind, Kind::ClaimConflict, "nobody else gets it: {error}");
        consumer.end();
        w.nothing_left(&client).await;
    });
}

#[test]
fn unmount_searches_namespaces_twice() {
    world(async |w| {
        w.environment.insert("CSID_LOG".to_owned(), "info,csid::host::helper=trace".to_owned());
        let client = running(w).await;
        // The search before NodeUnstage is left out only if the first one has just ended.
        for (delay, due) in [(0, 2), (1_500, 3)] {
            mounted(&client, "job", inline("v")).await;
            w.plugin("p").rules([Rule::once("NodeUnpublishVolume", Act::Delay(delay))]);
            let before = searches(w);
            unmount(&client, "v", "job").await.unwrap();
            assert_eq!(searches(w) - before, due, "with NodeUnpublish of {delay} ms");
        }
        w.nothing_left(&client).await;
    });
}

/// The searches that csid's log has.
fn searches(w: &World) -> usize {
    let log = fs::read_to_string(w.path("csid.log")).unwrap();
    log.matches("mount namespaces are searched").count()
}

/// csid with a volume on a block device of its own, registered, claimed and mounted; its published path.
async fn on_a_disk(w: &mut World) -> (Client, PathBuf) {
    w.add_plugin("p").await;
    w.add_disk("p", "v");
    let client = w.start().await;
    healthy(&client, "p").await;
    registered(&client, "v", &[AccessMode::SingleNodeWriter]).await;
    let source = client.mount(NAMESPACE, "v", "job", MountOptions::default()).await.unwrap().source;
    (client, source.into())
}

/// Unmount is not answered OK while the block device is held; it comes to its end once it is not.
async fn is_waited_for(w: &mut World, client: &Client, release: impl FnOnce()) {
    let (kind, error) = refusal(unmount(client, "v", "job").await);
    assert_eq!(kind, Kind::Busy, "{error}");
    assert!(error.message.contains("block device"), "{error}");
    assert_eq!(state(client, "v", "job").await, "unmounting");
    let claims = client.list_claims(Default::default()).await.unwrap();
    assert_eq!(claims.len(), 1, "the claim is kept");
    let forget = UnmountOptions { forget: Some(true), ..UnmountOptions::default() };
    let (kind, error) = refusal(client.unmount(NAMESPACE, "v", "job", forget).await);
    assert_eq!(kind, Kind::Busy, "a second writer could have it: {error}");
    assert!(error.message.contains("block device"), "{error}");
    let kept = row(client, "v", "job").await.unwrap().error;
    assert!(kept.contains("block device"), "a refused forget leaves the row's error: {kept}");
    let asked = w.plugin("p").count("NodeUnstageVolume", "");
    eventually("it is looked at again", async || w.plugin("p").count("NodeUnstageVolume", "") > asked).await;
    assert_eq!(state(client, "v", "job").await, "unmounting");
    release();
    w.nothing_left(client).await;
    assert!(client.list_claims(Default::default()).await.unwrap().is_empty());
}

#[test]
fn overlay_on_a_disk_is_waited_for() {
    world(async |w| {
        let (client, source) = on_a_disk(w).await;
        let [lower, target] = ["lower", "inside"].map(|name| directory(w, name));
        let consumer = Consumer::overlay(&source, &lower, &target);
        is_waited_for(w, &client, || consumer.end()).await;
    });
}

#[test]
fn detached_tree_of_a_disk_is_waited_for() {
    world(async |w| {
        let (client, _) = on_a_disk(w).await;
        let tree = client.open_mount(NAMESPACE, "v", "job", OpenOptions::default()).await.unwrap();
        is_waited_for(w, &client, || drop(tree)).await;
    });
}

#[test]
fn unused_disk_is_released() {
    world(async |w| {
        let (client, _) = on_a_disk(w).await;
        unmount(&client, "v", "job").await.unwrap();
        assert_eq!(w.plugin("p").count("NodeUnstageVolume", ""), 1);
        w.nothing_left(&client).await;
    });
}

#[test]
fn copy_keeps_a_volume_unmounted_by_another_program() {
    world(async |w| {
        let client = running(w).await;
        w.add_disk("p", "disk");
        for volume in ["v", "disk"] {
            let source = mounted(&client, "job", inline(volume)).await;
            let staging = PathBuf::from(row(&client, volume, "job").await.unwrap().staging);
            // A disk is known by its number, another file system by the paths.
            let inside = directory(w, &format!("inside-{volume}"));
            let consumer = match volume {
                "disk" => Consumer::bind(&source, &inside, "private"),
                _ => Consumer::copy("private"),
            };
            for path in [&source, &private(&source), &staging] {
                unmount_now(path, UnmountFlags::empty()).unwrap();
            }
            let (kind, error) = refusal(unmount(&client, volume, "job").await);
            assert_eq!(kind, Kind::Busy, "{volume}: {error}");
            names(&error.details.holders, &consumer);
            assert_eq!(w.plugin("p").count("NodeUnpublishVolume", volume), 0, "nothing is begun");
            consumer.end();
            eventually("it is unmounted", async || unmount(&client, volume, "job").await.is_ok()).await;
        }
        w.nothing_left(&client).await;
    });
}

#[test]
fn copy_made_during_unstage_keeps_the_volume() {
    world(async |w| {
        let client = running(w).await;
        mounted(&client, "job", inline("v")).await;
        let staging = PathBuf::from(row(&client, "v", "job").await.unwrap().staging);
        w.plugin("p").rules([Rule::once("NodeUnstageVolume", Act::Hold)]);
        let before = w.plugin("p").recorded();
        let asking = client.clone();
        let asked = tokio::spawn(async move { unmount(&asking, "v", "job").await });
        eventually("the plugin unstages", async || {
            w.plugin("p").begun_since(before, "NodeUnstageVolume") == 1
        })
        .await;
        let inside = directory(w, "inside");
        let consumer = Consumer::bind(&staging, &inside, "private");
        w.plugin("p").honest();
        let (kind, error) = refusal(asked.await.unwrap());
        assert_eq!(kind, Kind::Busy, "{error}");
        names(&error.details.holders, &consumer);
        assert_eq!(state(&client, "v", "job").await, "unmounting");
        consumer.end();
        w.nothing_left(&client).await;
    });
}

/// csid is killed after the plugin has removed the volume's last mount, and before csid looks. A consumer's namespace has come to
/// be in between, so that only a copy of the mount is left: of a directory on a file system that other volumes are on, too.
fn killed_before_the_look(stages: bool) {
    // Where the copy comes to be: the last mount is there yet.
    let (edge, rpc) = match stages {
        true => ("NodeUnstageVolume", "NodeUnstageVolume"),
        false => ("unpublish", "NodeUnpublishVolume"),
    };
    world(async move |w| {
        let fault = Fault::of(w);
        let plugin = w.add_plugin("p").await;
        plugin.set(|script| {
            script.control(&["PUBLISH_UNPUBLISH_VOLUME"]);
            script.capabilities.retain(|c| stages || c != "STAGE_UNSTAGE_VOLUME");
        });
        plugin.kill();
        plugin.start().await;
        plugin.provision("v");
        let client = w.start().await;
        healthy(&client, "p").await;
        registered(&client, "v", &[AccessMode::SingleNodeWriter]).await;
        let mounted = client.mount(NAMESPACE, "v", "job", MountOptions::default()).await.unwrap();
        let last = if stages { row(&client, "v", "job").await.unwrap().staging } else { mounted.source };
        let last = PathBuf::from(last);

        fault.arm(&format!("{edge}.held"));
        let asked = tokio::spawn(async move { unmount(&client, "v", "job").await });
        fault.reached(edge).await;
        // Not a copy at the same path: the kernel takes it away when the plugin removes the directory there.
        let inside = directory(w, "inside");
        let consumer = Consumer::bind(&last, &inside, "private");
        fault.arm(&format!("{rpc}.after:1"));
        eventually("csid is killed", async || w.dead()).await;
        assert!(fault.killed_at(&format!("{rpc}.after")));
        fault.disarm();
        assert!(asked.await.unwrap().is_err(), "nobody was answered");
        assert_eq!(kernel::stacked(&last).unwrap(), 0);
        assert!(consumer.mounts().contains(inside.to_str().unwrap()), "it has its copy");

        let client = w.start().await;
        healthy(&client, "p").await;
        let (kind, error) = refusal(unmount(&client, "v", "job").await);
        assert_eq!(kind, Kind::Busy, "{error}");
        names(&error.details.holders, &consumer);
        assert_eq!(state(&client, "v", "job").await, "unmounting");
        let claims = client.list_claims(Default::default()).await.unwrap();
        assert_eq!(claims.len(), 1, "the claim is kept");
        assert_eq!(w.plugin("p").count("NodeUnstageVolume", ""), usize::from(stages), "not again");
        assert_eq!(w.plugin("p").count("ControllerUnpublishVolume", ""), 0);
        consumer.end();
        w.nothing_left(&client).await;
        eventually("the volume is detached", async || {
            w.plugin("p").count("ControllerUnpublishVolume", "") == 1
        })
        .await;
        assert!(client.list_claims(Default::default()).await.unwrap().is_empty());
    });
}

#[test]
fn copy_keeps_a_volume_after_csid_was_killed() {
    killed_before_the_look(true);
}

#[test]
fn copy_keeps_an_unstaged_volume_after_a_kill() {
    killed_before_the_look(false);
}
