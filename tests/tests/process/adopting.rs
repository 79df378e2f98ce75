//! AdoptMount: mounts that another manager made by RPCs of its own become rows, while their consumers run.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use csi_proto::csi::v1::node_client::NodeClient;
use csi_proto::csi::v1::volume_capability::access_mode::Mode;
use csi_proto::csi::v1::volume_capability::{AccessMode as Access, AccessType, BlockVolume, MountVolume};
use csi_proto::csi::v1::{NodePublishVolumeRequest, NodeStageVolumeRequest, VolumeCapability};
use csid_client::{
    AccessMode, ClaimFilter, Client, Kind, MountOptions, Mounted, ReconcileOptions, Restore, Result,
    UnmountOptions,
};
use csid_tests::ask::*;
use csid_tests::fault::Fault;
use csid_tests::kernel;
use csid_tests::script::{Act, Lie, Rule};
use csid_tests::world::{World, count, eventually, refusal, world};
use rustix::mount::{MountFlags, UnmountFlags};
use tonic::transport::{Channel, Endpoint};

/// Another manager's node client, and where it mounts.
struct Manager {
    node: NodeClient<Channel>,
    directory: PathBuf,
}

/// A mount of the other manager's.
#[derive(Clone, Debug)]
struct Foreign {
    staging: PathBuf,
    published: PathBuf,
}

impl Manager {
    /// Makes a manager that mounts below `directory`. It calls the plugin itself, so the witness does not see what it staged.
    async fn of(w: &mut World, directory: &str) -> Self {
        let directory = w.path(directory);
        fs::create_dir_all(&directory).unwrap();
        let socket = format!("unix://{}", w.plugin("p").socket().display());
        let channel = Endpoint::from_shared(socket).unwrap().connect().await.unwrap();
        Manager { node: NodeClient::new(channel), directory }
    }

    fn at(&self, volume: &str, consumer: &str) -> Foreign {
        let staging = self.directory.join("staging").join(volume).join("globalmount");
        Foreign { staging, published: self.directory.join("publish").join(volume).join(consumer) }
    }

    async fn stages(&mut self, volume: &str, mode: Mode, block: bool) {
        let Foreign { staging, .. } = self.at(volume, "");
        fs::create_dir_all(&staging).unwrap();
        let request = NodeStageVolumeRequest {
            volume_id: volume.to_owned(),
            staging_target_path: text(&staging),
            volume_capability: Some(capability(mode, block)),
            ..Default::default()
        };
        self.node.node_stage_volume(request).await.unwrap();
    }

    async fn publishes(&mut self, volume: &str, consumer: &str, mode: Mode, block: bool) -> Foreign {
        let foreign = self.at(volume, consumer);
        fs::create_dir_all(foreign.published.parent().unwrap()).unwrap();
        let request = NodePublishVolumeRequest {
            volume_id: volume.to_owned(),
            staging_target_path: text(&foreign.staging),
            target_path: text(&foreign.published),
            volume_capability: Some(capability(mode, block)),
            ..Default::default()
        };
        self.node.node_publish_volume(request).await.unwrap();
        foreign
    }

    async fn mounts(&mut self, volume: &str, consumer: &str) -> Foreign {
        self.stages(volume, Mode::SingleNodeWriter, false).await;
        self.publishes(volume, consumer, Mode::SingleNodeWriter, false).await
    }
}

fn capability(mode: Mode, block: bool) -> VolumeCapability {
    let access_type = match block {
        true => AccessType::Block(BlockVolume {}),
        false => AccessType::Mount(MountVolume::default()),
    };
    VolumeCapability { access_mode: Some(Access { mode: mode.into() }), access_type: Some(access_type) }
}

fn text(path: &Path) -> String {
    path.to_str().unwrap().to_owned()
}

/// Where the plugin publishes what consumers find at csid's own `source`.
fn private(source: &str) -> String {
    source.trim_end_matches("/volume").replacen("/publish/", "/private/", 1)
}

/// `options` of the adoption of what is there.
fn of(foreign: &Foreign, options: MountOptions) -> MountOptions {
    MountOptions {
        staging_path: Some(text(&foreign.staging)),
        published_path: Some(text(&foreign.published)),
        ..options
    }
}

async fn adopt(client: &Client, consumer: &str, options: MountOptions) -> Result<Mounted> {
    let volume = options.external_id.clone().expect("an inline volume");
    client.adopt_mount(NAMESPACE, &volume, consumer, options).await
}

async fn adopted(client: &Client, consumer: &str, options: MountOptions) -> PathBuf {
    adopt(client, consumer, options).await.expect("an adoption").source.into()
}

/// The RPCs that a volume has had, without the manager's own.
fn rpcs(w: &mut World, before: usize) -> Vec<(String, String)> {
    let calls = w.plugin("p").volume_calls().split_off(before);
    let path = |c: &csid_tests::plugin::Recorded| match c.call.target.is_empty() {
        true => c.call.staging.clone(),
        false => c.call.target.clone(),
    };
    calls.iter().map(|c| (c.call.rpc.clone(), path(c))).collect()
}

fn so_far(w: &mut World) -> usize {
    w.plugin("p").volume_calls().len()
}

/// A running consumer has a file open from before the adoption until it ends. csid restarts in between.
async fn changes_over(w: &mut World, directory: &str) {
    // The witness did not see the other manager's stage.
    w.excuse(21, "NodePublishVolume of a volume that is not staged");
    let client = running(w).await;
    let mut manager = Manager::of(w, directory).await;
    let mode = Mode::SingleNodeMultiWriter;
    manager.stages("v", mode, false).await;
    let foreign = manager.publishes("v", "one", mode, false).await;
    let mount = kernel::mounts().unwrap().into_iter().find(|m| m.point == foreign.published).unwrap();
    let mut consumer = File::create_new(foreign.published.join("file")).unwrap();
    consumer.write_all(b"before ").unwrap();
    let before = so_far(w);

    let missing = UnmountOptions { must_exist: Some(true), ..UnmountOptions::default() };
    let (kind, _) = refusal(client.unmount(NAMESPACE, "v", "one", missing).await);
    assert_eq!(kind, Kind::NotFound, "it is not csid's");
    for _ in 0..2 {
        let source = adopted(&client, "one", of(&foreign, shared("v"))).await;
        assert_eq!(source, foreign.published);
    }
    assert_eq!(rpcs(w, before), [], "no RPC");
    let after = kernel::mounts().unwrap().into_iter().find(|m| m.point == foreign.published).unwrap();
    assert_eq!(after, mount, "the same mount, with the same flags");
    consumer.write_all(b"after").unwrap();
    assert!(client.has_mount(&text(&foreign.published)).await.unwrap());
    let mut client = client;
    for restart in ["killed", "stopped"] {
        let now = row(&client, "v", "one").await.unwrap();
        assert_eq!((now.state.as_str(), now.healthy, now.error.as_str()), ("mounted", true, ""), "{restart}");
        assert_eq!((now.source, now.staging), (text(&foreign.published), text(&foreign.staging)));
        drop(client);
        if restart == "killed" {
            w.kill()
        } else {
            w.stop().await
        }
        client = w.start().await;
        settled(&client).await;
    }
    let source = mounted(&client, "one", shared("v")).await;
    assert_eq!(source, foreign.published, "a Mount finds what was adopted");
    let report = client.reconcile(ReconcileOptions::default()).await.unwrap();
    assert_eq!((report.orphans.len(), report.failed.len()), (0, 0), "{report:?}");
    assert_eq!(rpcs(w, before), [], "no RPC");

    // A second consumer: csid's own publish, of what the manager staged.
    let second = mounted(&client, "two", shared("v")).await;
    assert_eq!(fs::read_to_string(second.join("file")).unwrap(), "before after");
    let staging = text(&foreign.staging);
    assert_eq!(rpcs(w, before), [("NodePublishVolume".to_owned(), private(&text(&second)))]);
    assert_eq!(w.plugin("p").volume_calls().last().unwrap().call.staging, staging);

    let (kind, error) = refusal(unmount(&client, "v", "one").await);
    assert_eq!(kind, Kind::Busy, "{error:?}");
    drop(consumer);
    unmount(&client, "v", "one").await.unwrap();
    unmount(&client, "v", "two").await.unwrap();
    let due = [
        ("NodePublishVolume", private(&text(&second))),
        ("NodeUnpublishVolume", text(&foreign.published)),
        ("NodeUnpublishVolume", private(&text(&second))),
        ("NodeUnstageVolume", staging),
    ];
    assert_eq!(rpcs(w, before), due.map(|(rpc, path)| (rpc.to_owned(), path)));
    assert!(foreign.staging.is_dir() && !foreign.published.exists(), "csid removes what csid made");
    assert!(foreign.published.parent().unwrap().is_dir());
    for kind in ["staging", "publish"] {
        fs::remove_dir_all(manager.directory.join(kind)).unwrap();
    }
    w.nothing_left(&client).await;
}

#[test]
fn adopted_outside_csids_directories_it_is_a_row() {
    world(async |w| changes_over(w, "other").await);
}

#[test]
fn adopted_inside_the_plugins_root_it_is_a_row() {
    world(async |w| changes_over(w, "state/plugins/p").await);
}

#[test]
fn adopting_what_is_not_mounted_is_refused() {
    world(async |w| {
        let client = running(w).await;
        let mut manager = Manager::of(w, "other").await;
        let foreign = manager.mounts("v", "one").await;
        let other = manager.mounts("w", "one").await;
        let tmpfs = manager.directory.join("tmpfs");
        let plain = manager.directory.join("plain");
        fs::create_dir(&tmpfs).unwrap();
        fs::create_dir(&plain).unwrap();
        rustix::mount::mount("tmpfs", &tmpfs, "tmpfs", MountFlags::empty(), c"mode=0755").unwrap();
        let link = manager.directory.join("link");
        std::os::unix::fs::symlink(&foreign.published, &link).unwrap();
        let target = w.path("targets/t");
        fs::create_dir(&target).unwrap();
        let before = so_far(w);
        let published = |path: &Path| Foreign { published: path.into(), ..foreign.clone() };
        let staged = |path: &Path| Foreign { staging: path.into(), ..foreign.clone() };
        let good = || of(&foreign, inline("v"));
        let mut cases = 0;
        for (what, options, due) in [
            ("a published path that is plain", of(&published(&plain), inline("v")), Kind::NotFound),
            (
                "a published path that is not there",
                of(&published(&plain.join("x")), inline("v")),
                Kind::NotFound,
            ),
            ("a staging path that is plain", of(&staged(&plain), inline("v")), Kind::NotFound),
            ("another file system", of(&published(&tmpfs), inline("v")), Kind::InvalidArgument),
            (
                "another volume's publish",
                of(&published(&other.published), inline("v")),
                Kind::InvalidArgument,
            ),
            ("another volume's staging", of(&staged(&other.staging), inline("v")), Kind::InvalidArgument),
            ("a symbolic link", of(&published(&link), inline("v")), Kind::PluginError),
            ("a file system as a block device", of(&foreign, block("v")), Kind::InvalidArgument),
            ("no staging path", MountOptions { staging_path: None, ..good() }, Kind::InvalidArgument),
            ("no published path", MountOptions { published_path: None, ..good() }, Kind::InvalidArgument),
            ("one path as both", of(&staged(&foreign.published), inline("v")), Kind::InvalidArgument),
            (
                "a relative path",
                MountOptions { published_path: Some("a/b".to_owned()), ..good() },
                Kind::InvalidArgument,
            ),
            (
                "a writable mount as read-only",
                MountOptions { read_only: Some(true), ..good() },
                Kind::InvalidArgument,
            ),
            (
                "a target that does not show it",
                MountOptions { target: Some(text(&target)), ..good() },
                Kind::InvalidArgument,
            ),
            ("an unknown plugin", of(&foreign, of_plugin("q", "v")), Kind::NotFound),
        ] {
            let (kind, error) = refusal(adopt(&client, "one", options).await);
            assert_eq!(kind, due, "{what}: {error:?}");
            cases += 1;
        }
        let (kind, _) = refusal(mount(&client, "one", good()).await);
        assert_eq!(kind, Kind::InvalidArgument, "Mount does not take the paths");
        assert_eq!(client.list_mounts(Default::default()).await.unwrap().len(), 0, "nothing has changed");
        assert_eq!(rpcs(w, before), []);
        count("adoptions refused", cases);

        // What is there is had with the right words, the target too.
        rustix::mount::mount_bind(&foreign.published, &target).unwrap();
        adopted(&client, "one", MountOptions { target: Some(text(&target)), ..good() }).await;
        for (what, options) in [
            ("the same published path", of(&published(&foreign.published), inline("w"))),
            (
                "the staging path as published",
                of(&Foreign { published: foreign.staging.clone(), ..other.clone() }, inline("w")),
            ),
            (
                "the target as published",
                of(&Foreign { published: target.clone(), ..other.clone() }, inline("w")),
            ),
            (
                "the same staging path",
                of(&Foreign { staging: foreign.staging.clone(), ..other.clone() }, inline("w")),
            ),
        ] {
            let (kind, error) = refusal(adopt(&client, "two", options).await);
            assert_eq!(kind, Kind::AlreadyExists, "{what}: {error:?}");
            assert_eq!(error.details.holders, ["one"], "{what}");
        }
        for (what, options) in [
            (
                "another published path",
                of(&published(&other.published), MountOptions { target: Some(text(&target)), ..inline("v") }),
            ),
            (
                "other options",
                MountOptions { restore: Some(Restore::Auto), target: Some(text(&target)), ..good() },
            ),
        ] {
            let (kind, error) = refusal(adopt(&client, "one", options).await);
            assert!(matches!(kind, Kind::AlreadyExists | Kind::InvalidArgument), "{what}: {error:?}");
        }
        let (kind, _) = refusal(adopt(&client, "two", of(&published(&tmpfs), inline("v"))).await);
        assert_eq!(kind, Kind::InvalidArgument);
        let (kind, _) = refusal(mount(&client, "two", inline("v")).await);
        assert_eq!(kind, Kind::ClaimConflict, "one user at a time");
        unmount(&client, "v", "one").await.unwrap();
        assert_eq!(kernel::stacked(&target).unwrap(), 0, "the target is unmounted with it");

        adopted(&client, "one", of(&other, inline("w"))).await;
        unmount(&client, "w", "one").await.unwrap();
        rustix::mount::unmount(&tmpfs, UnmountFlags::empty()).unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn adopted_block_device_is_a_row() {
    world(async |w| {
        w.add_plugin("p").await;
        w.add_device("p", "b");
        w.add_device("p", "c");
        let client = w.start().await;
        healthy(&client, "p").await;
        let mut manager = Manager::of(w, "other").await;
        let mode = Mode::SingleNodeWriter;
        manager.stages("b", mode, true).await;
        let foreign = manager.publishes("b", "one", mode, true).await;
        let (kind, error) = refusal(adopt(&client, "one", of(&foreign, inline("b"))).await);
        assert_eq!(kind, Kind::InvalidArgument, "{error:?}");
        let before = so_far(w);
        let mounted = adopt(&client, "one", of(&foreign, block("b"))).await.unwrap();
        assert!(mounted.is_device && Path::new(&mounted.source) == foreign.published);
        w.kill();
        drop(client);
        let client = w.start().await;
        settled(&client).await;
        assert!(row(&client, "b", "one").await.unwrap().healthy);
        File::options().write(true).open(&foreign.published).unwrap().write_all(&[1; 512]).unwrap();
        unmount(&client, "b", "one").await.unwrap();
        let due = [("NodeUnpublishVolume", &foreign.published), ("NodeUnstageVolume", &foreign.staging)];
        assert_eq!(rpcs(w, before), due.map(|(rpc, path)| (rpc.to_owned(), text(path))));
        w.nothing_left(&client).await;
    });
}

#[test]
fn path_that_the_plugin_leaves_stays() {
    world(async |w| {
        let client = running(w).await;
        let mut manager = Manager::of(w, "other").await;
        let foreign = manager.mounts("v", "one").await;
        adopted(&client, "one", of(&foreign, inline("v"))).await;
        // It says OK, and takes nothing away: csid unmounts, the directory is the manager's.
        w.plugin("p").rules([Rule::always("NodeUnpublishVolume", Act::Lie(Lie::Nothing))]);
        unmount(&client, "v", "one").await.unwrap();
        assert_eq!(kernel::stacked(&foreign.published).unwrap(), 0);
        assert!(foreign.published.is_dir());
        w.nothing_left(&client).await;
    });
}

#[test]
fn after_a_reboot_paths_are_csids_own() {
    world(async |w| {
        let client = running(w).await;
        let mut manager = Manager::of(w, "other").await;
        for (volume, restore) in [("held", Restore::Hold), ("kept", Restore::Auto)] {
            let foreign = manager.mounts(volume, "job").await;
            fs::write(foreign.published.join("file"), volume).unwrap();
            adopted(&client, "job", of(&foreign, MountOptions { restore: Some(restore), ..inline(volume) }))
                .await;
        }
        drop(client);
        w.reboot().await;
        let client = w.start().await;
        settled(&client).await;
        eventually("the auto mount is back", async || state(&client, "kept", "job").await == "mounted").await;
        assert_eq!(state(&client, "held", "job").await, "lost");
        mounted(&client, "job", inline("held")).await;
        for volume in ["held", "kept"] {
            let row = row(&client, volume, "job").await.unwrap();
            let own = w.path("state/plugins/p");
            for path in [&row.source, &row.staging] {
                assert!(Path::new(path).starts_with(&own), "{path}");
            }
            assert_eq!(fs::read_to_string(Path::new(&row.source).join("file")).unwrap(), volume);
            unmount(&client, volume, "job").await.unwrap();
        }
        w.nothing_left(&client).await;
    });
}

/// csid unmounts the rest of a lost mount at its old path, and mounts it again at its own paths.
#[test]
fn adopted_mount_is_restored_at_own_paths() {
    world(async |w| {
        let client = running(w).await;
        let mut manager = Manager::of(w, "other").await;
        let foreign = manager.mounts("v", "one").await;
        adopted(&client, "one", of(&foreign, inline("v"))).await;
        let before = so_far(w);
        rustix::mount::unmount(&foreign.published, UnmountFlags::empty()).unwrap();
        let (kind, _) = refusal(adopt(&client, "one", of(&foreign, inline("v"))).await);
        assert_eq!(kind, Kind::NotFound, "it is not there");
        let source = mounted(&client, "one", inline("v")).await;
        assert!(source.starts_with(w.path("state/plugins/p")), "{source:?}");
        let row = row(&client, "v", "one").await.unwrap();
        assert!(Path::new(&row.staging).starts_with(w.path("state/plugins/p")), "{row:?}");
        let due = [
            ("NodeUnpublishVolume", text(&foreign.published)),
            ("NodeUnstageVolume", text(&foreign.staging)),
            ("NodeStageVolume", row.staging.clone()),
            ("NodePublishVolume", private(&row.source)),
        ];
        let mut made = rpcs(w, before);
        // Before an Unstage of unknown standing it is unpublished once more.
        made.dedup();
        assert_eq!(made, due.map(|(rpc, path)| (rpc.to_owned(), path)));
        unmount(&client, "v", "one").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn killed_anywhere_an_adoption_is_done_or_not_begun() {
    world(async |w| {
        let fault = Fault::of(w);
        fault.disarm();
        let mut client = running(w).await;
        registered(&client, "r", &[AccessMode::SingleNodeWriter]).await;
        let mut manager = Manager::of(w, "other").await;
        let mut kills = 0;
        for volume in ["v", "r"] {
            for number in 1.. {
                let foreign = manager.mounts(volume, "one").await;
                let mut consumer = File::options()
                    .read(true)
                    .write(true)
                    .create(true)
                    .truncate(true)
                    .open(foreign.published.join("file"))
                    .unwrap();
                let before = so_far(w);
                let options = || match volume {
                    "r" => of(&foreign, MountOptions::default()),
                    volume => of(&foreign, inline(volume)),
                };
                fault.arm(&format!("any:{number}"));
                let answer = client.adopt_mount(NAMESPACE, volume, "one", options()).await;
                let killed = !fault.killed_at(&format!("any:{number}"));
                fault.disarm();
                assert_eq!(answer.is_err(), killed, "{answer:?}");
                if killed {
                    kills += 1;
                    eventually("csid is dead", async || w.dead()).await;
                    client = w.start().await;
                    settled(&client).await;
                    healthy(&client, "p").await;
                    let is = state(&client, volume, "one").await;
                    assert!(["none", "mounted"].contains(&is.as_str()), "{is}");
                    // Claimed and not mounted is freed; no controller is asked.
                    eventually("nothing is under way", async || {
                        client.list_operations().await.unwrap().is_empty()
                    })
                    .await;
                    let claims = client.list_claims(ClaimFilter::default()).await.unwrap().len();
                    assert_eq!(claims, usize::from(volume == "r" && is == "mounted"));
                    client.adopt_mount(NAMESPACE, volume, "one", options()).await.unwrap();
                }
                assert_eq!(rpcs(w, before), [], "killed or not, no RPC");
                consumer.write_all(b"all the time").unwrap();
                let mut read = String::new();
                File::open(foreign.published.join("file")).unwrap().read_to_string(&mut read).unwrap();
                assert_eq!(read, "all the time");
                drop(consumer);
                unmount(&client, volume, "one").await.unwrap();
                if !killed {
                    break;
                }
            }
        }
        count("kills on an adoption's way", kills);
        assert!(kills >= 6, "{kills}");
        let claims = client.list_claims(ClaimFilter::default()).await.unwrap();
        assert!(claims.is_empty(), "{claims:?}");
        w.nothing_left(&client).await;
    });
}

#[test]
fn registered_volume_is_claimed_by_its_adoption() {
    world(async |w| {
        let client = running(w).await;
        registered(&client, "r", &[AccessMode::SingleNodeWriter]).await;
        let mut manager = Manager::of(w, "other").await;
        let foreign = manager.mounts("r", "one").await;
        let given = || of(&foreign, MountOptions::default());
        client.claim(NAMESPACE, "r", "two", Default::default()).await.unwrap();
        let (kind, error) = refusal(client.adopt_mount(NAMESPACE, "r", "one", given()).await);
        assert_eq!((kind, error.details.holders.as_slice()), (Kind::ClaimConflict, &["two".to_owned()][..]));
        client.release(NAMESPACE, "r", "two", Default::default()).await.unwrap();

        client.adopt_mount(NAMESPACE, "r", "one", given()).await.unwrap();
        let claims = client.list_claims(ClaimFilter::default()).await.unwrap();
        assert_eq!(claims.iter().map(|claim| claim.consumer.as_str()).collect::<Vec<_>>(), ["one"]);
        let now = row(&client, "r", "one").await.unwrap();
        assert_eq!(now.restore, "auto", "as a registered volume's");
        unmount(&client, "r", "one").await.unwrap();
        assert!(client.list_claims(ClaimFilter::default()).await.unwrap().is_empty());
        w.nothing_left(&client).await;
    });
}

/// csid does not end what another manager attached, nor detach it by an undoing: such a volume is adopted inline.
#[test]
fn unattached_volume_is_adopted_inline() {
    world(async |w| {
        let plugin = w.add_plugin("p").await;
        plugin.set(|script| script.control(&["PUBLISH_UNPUBLISH_VOLUME"]));
        plugin.kill();
        plugin.start().await;
        plugin.provision("r");
        plugin.provision("i");
        let client = w.start().await;
        healthy(&client, "p").await;
        registered(&client, "r", &[AccessMode::SingleNodeMultiWriter]).await;
        // csid's own first user attaches it.
        client.claim(NAMESPACE, "r", "own", csid_client::ClaimOptions::default()).await.unwrap();
        let context = w.plugin("p").volume_calls();
        assert_eq!(context.iter().filter(|c| c.call.rpc == "ControllerPublishVolume").count(), 1);
        client.release(NAMESPACE, "r", "own", Default::default()).await.unwrap();

        let before = so_far(w);
        let manager = Manager::of(w, "other").await;
        let at = manager.at("r", "one");
        for path in [&at.staging, &at.published] {
            fs::create_dir_all(path).unwrap();
            rustix::mount::mount_bind(w.path("targets"), path).unwrap();
        }
        let (kind, error) =
            refusal(client.adopt_mount(NAMESPACE, "r", "one", of(&at, MountOptions::default())).await);
        assert_eq!(kind, Kind::NotSupported, "{error:?}");
        assert!(client.list_claims(ClaimFilter::default()).await.unwrap().is_empty());
        assert_eq!(rpcs(w, before), []);
        // With another user's claim it is attached; the adoption shares that.
        client.claim(NAMESPACE, "r", "own", csid_client::ClaimOptions::default()).await.unwrap();
        let before = so_far(w);
        client.adopt_mount(NAMESPACE, "r", "one", of(&at, MountOptions::default())).await.unwrap();
        assert_eq!(rpcs(w, before), []);
        client.release(NAMESPACE, "r", "own", Default::default()).await.unwrap();
        assert_eq!(rpcs(w, before), [], "it is still attached for the adopted mount");
        unmount(&client, "r", "one").await.unwrap();
        let ended: Vec<String> = rpcs(w, before).into_iter().map(|(rpc, _)| rpc).collect();
        assert_eq!(ended, ["NodeUnpublishVolume", "NodeUnstageVolume", "ControllerUnpublishVolume"]);
        w.nothing_left(&client).await;
    });
}

/// Without a mount of its own csid does not know which file system the volume is.
#[test]
fn must_exist_names_nothing_of_an_unknown_mount() {
    world(async |w| {
        let client = running(w).await;
        let mut manager = Manager::of(w, "other").await;
        let foreign = manager.mounts("v", "one").await;
        let must_exist = UnmountOptions { must_exist: Some(true), ..UnmountOptions::default() };
        for known in [false, true] {
            if known {
                registered(&client, "v", &[AccessMode::SingleNodeWriter]).await;
            }
            let (kind, error) = refusal(client.unmount(NAMESPACE, "v", "one", must_exist.clone()).await);
            assert_eq!(
                (kind, error.details.holders.len()),
                (Kind::NotFound, 0),
                "registered {known}: {error}"
            );
        }
        assert_eq!(kernel::stacked(&foreign.published).unwrap(), 1);
        client.adopt_mount(NAMESPACE, "v", "one", of(&foreign, MountOptions::default())).await.unwrap();
        client.unmount(NAMESPACE, "v", "one", must_exist).await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn must_exist_names_a_foreign_mount_in_use() {
    world(async |w| {
        let client = running(w).await;
        let mut manager = Manager::of(w, "other").await;
        let mode = Mode::SingleNodeMultiWriter;
        manager.stages("v", mode, false).await;
        let [one, two] = [
            manager.publishes("v", "one", mode, false).await,
            manager.publishes("v", "two", mode, false).await,
        ];
        adopted(&client, "one", of(&one, shared("v"))).await;
        let must_exist = || UnmountOptions { must_exist: Some(true), ..UnmountOptions::default() };
        // Also a directory of the volume, as a container has one.
        let [part, at] = [two.published.join("part"), w.path("other/part")];
        for path in [&part, &at] {
            fs::create_dir(path).unwrap();
        }
        rustix::mount::mount_bind(&part, &at).unwrap();
        let (kind, error) = refusal(client.unmount(NAMESPACE, "v", "two", must_exist()).await);
        assert_eq!(kind, Kind::NotFound);
        let due = [&at, &two.published].map(|path| format!("mount {}", path.display()));
        assert_eq!(error.details.holders, due, "{error:?}");
        rustix::mount::unmount(&at, UnmountFlags::empty()).unwrap();
        client.unmount(NAMESPACE, "v", "two", UnmountOptions::default()).await.expect("gone is gone");
        assert_eq!(kernel::stacked(&two.published).unwrap(), 1, "and nothing is unmounted");

        adopted(&client, "two", of(&two, shared("v"))).await;
        unmount(&client, "v", "one").await.unwrap();
        client.unmount(NAMESPACE, "v", "two", must_exist()).await.unwrap();
        w.nothing_left(&client).await;
    });
}

/// The volume is staged, and published for no consumer.
#[test]
fn must_exist_names_mounts_of_a_staged_volume() {
    world(async |w| {
        let client = running(w).await;
        mounted(&client, "one", shared("v")).await;
        w.plugin("p").rules([Rule::always("NodeUnstageVolume", Act::Fail(14))]);
        let at_once = UnmountOptions { wait: Some(false), ..UnmountOptions::default() };
        let (_, error) = refusal(client.unmount(NAMESPACE, "v", "one", at_once).await);
        assert_eq!(error.details.rpc.as_deref(), Some("NodeUnstageVolume"), "{error}");
        let row = row(&client, "v", "one").await.expect("the row");
        let at = w.path("at");
        fs::create_dir(&at).unwrap();
        rustix::mount::mount_bind(&row.staging, &at).unwrap();
        let must_exist =
            UnmountOptions { must_exist: Some(true), wait: Some(false), ..UnmountOptions::default() };
        let (kind, error) = refusal(client.unmount(NAMESPACE, "v", "two", must_exist).await);
        assert_eq!(kind, Kind::NotFound, "{error}");
        assert_eq!(error.details.holders, [format!("mount {}", at.display())], "{error:?}");
        rustix::mount::unmount(&at, UnmountFlags::empty()).unwrap();
        w.plugin("p").rules([]);
        unmount(&client, "v", "one").await.unwrap();
        w.nothing_left(&client).await;
    });
}
