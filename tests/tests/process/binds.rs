//! Mounts of a volume in csid's own mount namespace: a bind by an administrator keeps the volume, the plugin's own mounts do not.

use std::fs;
use std::path::{Path, PathBuf};

use csid_client::{AccessMode, Client, Kind, MountOptions, ReleaseOptions, UnmountOptions};
use csid_tests::ask::*;
use csid_tests::elsewhere::Consumer;
use csid_tests::fault::Fault;
use csid_tests::kernel;
use csid_tests::old_kernel;
use csid_tests::script::{Act, Rule};
use csid_tests::world::{World, eventually, refusal, world};
use rustix::mount::{MountPropagationFlags, UnmountFlags, mount_bind, mount_change, unmount as unmount_now};

/// A bind in csid's own mount namespace.
struct Bound(PathBuf);

impl Bound {
    fn at(w: &World, name: &str, source: &Path) -> Self {
        let path = w.path(name);
        fs::create_dir_all(&path).unwrap();
        mount_bind(source, &path).unwrap();
        Bound(path)
    }

    fn text(&self) -> String {
        self.0.display().to_string()
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        unmount_now(&self.0, UnmountFlags::DETACH).unwrap();
    }
}

async fn running_apart(w: &mut World) -> Client {
    w.add_plugin("p").await.set(|script| script.mounts_apart = true);
    let client = w.start().await;
    healthy(&client, "p").await;
    client
}

fn removals(w: &mut World) -> usize {
    let plugin = w.plugin("p");
    plugin.count("NodeUnpublishVolume", "") + plugin.count("NodeUnstageVolume", "")
}

/// Unmount is refused on behalf of this bind, and nothing has changed.
async fn is_refused(w: &mut World, client: &Client, bound: &Bound, consumer: &str, source: &Path) {
    let before = removals(w);
    let (kind, error) = refusal(unmount(client, "v", consumer).await);
    assert_eq!(kind, Kind::Busy, "{error}");
    assert_eq!(error.details.holders, [bound.text()], "{error}");
    assert_eq!(error.details.obstacle.as_deref(), Some("unknown-target"));
    assert!(error.message.contains(&bound.text()), "{error}");
    assert_eq!(removals(w), before, "no RPC was made");
    assert_eq!(state(client, "v", consumer).await, "mounted");
    assert_eq!(kernel::stacked(source).unwrap(), 1);
}

#[test]
fn bind_on_the_host_keeps_the_volume() {
    world(async |w| {
        let client = running(w).await;
        let target = w.path("targets/t");
        fs::create_dir_all(&target).unwrap();
        let options = MountOptions { target: Some(target.to_str().unwrap().to_owned()), ..inline("v") };
        let source = mounted(&client, "job", options).await;
        fs::create_dir(source.join("sub")).unwrap();
        for from in [&target, &source, &source.join("sub")] {
            let bound = Bound::at(w, "srv", from);
            is_refused(w, &client, &bound, "job", &source).await;
            drop(bound);
        }
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

/// csid reads its whole mount table there.
#[test]
fn kernel_without_listmount_finds_the_same_binds() {
    world(async |w| {
        w.environment.insert(old_kernel::VARIABLE.to_owned(), "yes".to_owned());
        let client = running_apart(w).await;
        let source = mounted(&client, "job", inline("v")).await;
        let log = fs::read_to_string(w.path("csid.log")).unwrap();
        assert!(log.contains("the kernel's calls do not show each mount"), "{log}");
        let bound = Bound::at(w, "srv", &source);
        is_refused(w, &client, &bound, "job", &source).await;
        drop(bound);
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn bind_is_found_after_a_restart() {
    world(async |w| {
        let client = running_apart(w).await;
        let source = mounted(&client, "job", inline("v")).await;
        let before = Bound::at(w, "before", &source);
        w.kill();
        let client = w.start().await;
        healthy(&client, "p").await;
        is_refused(w, &client, &before, "job", &source).await;
        drop(before);
        let after = Bound::at(w, "after", &source);
        is_refused(w, &client, &after, "job", &source).await;
        drop(after);
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn plugins_own_mounts_are_no_use() {
    world(async |w| {
        let client = running_apart(w).await;
        let source = mounted(&client, "one", shared("v")).await;
        let apart = [private(&source), row(&client, "v", "one").await.unwrap().staging.into()]
            .map(|path| w.plugin("p").backend().apart(&path));
        assert!(apart.iter().all(|path| kernel::stacked(path).unwrap() == 1), "it has its own mounts");
        // The second publish makes one more.
        mounted(&client, "two", shared("v")).await;
        unmount(&client, "v", "one").await.unwrap();
        unmount(&client, "v", "two").await.unwrap();
        assert!(apart.iter().all(|path| !path.exists()));
        w.nothing_left(&client).await;
    });
}

#[test]
fn bind_between_two_publishes_is_not_the_plugins() {
    world(async |w| {
        let client = running_apart(w).await;
        let one = mounted(&client, "one", shared("v")).await;
        let bound = Bound::at(w, "srv", &one);
        // The answer is lost, and the call is repeated: what the first try has mounted is the plugin's.
        w.plugin("p").rules([Rule::once("NodePublishVolume", Act::FailAfter(4))]);
        let two = mounted(&client, "two", shared("v")).await;
        unmount(&client, "v", "one").await.unwrap();
        is_refused(w, &client, &bound, "two", &two).await;
        drop(bound);
        unmount(&client, "v", "two").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn mounts_of_a_failed_publish_are_the_plugins() {
    world(async |w| {
        let fault = Fault::of(w);
        let client = running(w).await;
        let one = mounted(&client, "one", shared("v")).await;
        w.plugin("p").rules([Rule::once("NodePublishVolume", Act::Fail(3))]);
        fault.arm("NodePublishVolume.held");
        let (failed, left) = tokio::join!(mount(&client, "two", shared("v")), async {
            fault.reached("NodePublishVolume").await;
            // As a plugin does that leaves what it mounted.
            let left = Bound::at(w, "driver", &one);
            fault.disarm();
            left
        });
        assert_eq!(refusal(failed).0, Kind::PluginError);
        unmount(&client, "v", "one").await.expect("no consumer has the plugin's mount");
        drop(left);
        w.nothing_left(&client).await;
    });
}

#[test]
fn bind_of_a_writer_is_not_its_readers() {
    world(async |w| {
        let client = running(w).await;
        let writer = mounted(&client, "writer", shared("v")).await;
        let reads = MountOptions { read_only: Some(true), ..shared("v") };
        mounted(&client, "reader", reads.clone()).await;
        let bound = Bound::at(w, "srv", &writer);
        is_refused(w, &client, &bound, "writer", &writer).await;
        unmount(&client, "v", "reader").await.unwrap();
        is_refused(w, &client, &bound, "writer", &writer).await;
        drop(bound);
        unmount(&client, "v", "writer").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn bind_that_propagates_is_named_once() {
    world(async |w| {
        let client = running(w).await;
        let parent = w.path("shared");
        fs::create_dir(&parent).unwrap();
        mount_bind(&parent, &parent).unwrap();
        mount_change(&parent, MountPropagationFlags::SHARED).unwrap();
        let source = mounted(&client, "job", inline("v")).await;
        let service = Consumer::copy("slave");
        let bound = Bound::at(w, "shared/bind", &source);
        assert!(service.mounts().contains(&bound.text()), "it is there, too");
        is_refused(w, &client, &bound, "job", &source).await;
        drop(bound);
        unmount(&client, "v", "job").await.unwrap();
        service.end();
        unmount_now(&parent, UnmountFlags::DETACH).unwrap();
        w.nothing_left(&client).await;
    });
}

/// A target below a mount that csid's namespace has twice.
#[test]
fn peer_of_a_target_goes_along() {
    world(async |w| {
        let client = running(w).await;
        let [parent, peer] = ["shared", "peer"].map(|name| w.path(name));
        fs::create_dir_all(parent.join("t")).unwrap();
        fs::create_dir(&peer).unwrap();
        mount_bind(&parent, &parent).unwrap();
        mount_change(&parent, MountPropagationFlags::SHARED).unwrap();
        mount_bind(&parent, &peer).unwrap();
        let target = Some(parent.join("t").to_str().unwrap().to_owned());
        mounted(&client, "job", MountOptions { target, ..inline("v") }).await;
        assert_eq!(kernel::stacked(&peer.join("t")).unwrap(), 1, "it is there, too");
        unmount(&client, "v", "job").await.unwrap();
        assert_eq!(kernel::stacked(&peer.join("t")).unwrap(), 0);
        for path in [&peer, &parent] {
            unmount_now(path, UnmountFlags::DETACH).unwrap();
        }
        w.nothing_left(&client).await;
    });
}

#[test]
fn release_is_busy_while_a_bind_stays() {
    world(async |w| {
        let client = running(w).await;
        registered(&client, "v", &[AccessMode::SingleNodeWriter]).await;
        client.claim(NAMESPACE, "v", "job", Default::default()).await.unwrap();
        let source = client.mount(NAMESPACE, "v", "job", MountOptions::default()).await.unwrap().source;
        let bound = Bound::at(w, "srv", Path::new(&source));
        let release = || client.release(NAMESPACE, "v", "job", ReleaseOptions::default());
        let (kind, error) = refusal(release().await);
        assert_eq!(kind, Kind::Busy, "{error}");
        assert_eq!(error.details.holders, [bound.text()]);
        assert_eq!(client.list_claims(Default::default()).await.unwrap().len(), 1, "the claim is kept");
        drop(bound);
        release().await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn bind_made_during_unmount_keeps_the_staging() {
    world(async |w| {
        let client = running(w).await;
        let source = mounted(&client, "job", inline("v")).await;
        let staging = PathBuf::from(row(&client, "v", "job").await.unwrap().staging);
        w.plugin("p").rules([Rule::once("NodeUnpublishVolume", Act::Hold)]);
        let before = w.plugin("p").recorded();
        let asking = client.clone();
        let asked = tokio::spawn(async move { unmount(&asking, "v", "job").await });
        eventually("the plugin unpublishes", async || {
            w.plugin("p").begun_since(before, "NodeUnpublishVolume") == 1
        })
        .await;
        let bound = Bound::at(w, "srv", &staging);
        w.plugin("p").honest();
        let (kind, error) = refusal(asked.await.unwrap());
        assert_eq!(kind, Kind::Busy, "{error}");
        assert_eq!(error.details.holders, [bound.text()], "{error}");
        assert_eq!(kernel::stacked(&source).unwrap(), 0);
        assert_eq!(state(&client, "v", "job").await, "unmounting");
        assert_eq!(w.plugin("p").count("NodeUnstageVolume", ""), 0);
        let (kind, error) = refusal(mount(&client, "other", inline("v")).await);
        assert_eq!(kind, Kind::ClaimConflict, "there is no second writer: {error}");
        let forget = UnmountOptions { forget: Some(true), ..UnmountOptions::default() };
        let (kind, error) = refusal(client.unmount(NAMESPACE, "v", "job", forget).await);
        assert_eq!(kind, Kind::Busy, "{error}");
        drop(bound);
        w.nothing_left(&client).await;
    });
}
