//! A journal and mounts as an older csid left them: plugins published where consumers find the volume.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use csid::store::registry::{Registry, Swap, VolumeName};
use csid::store::rows::{Leg, MountRow, Phase};
use csid::store::{Change, Durability, Store};
use rustix::mount::{MountFlags, UnmountFlags, mount_bind, mount_remount, unmount};

use crate::world::World;

/// csid is stopped, and then every mount is at the directory that it has for itself today, not in it.
pub async fn published_without_own_directories(w: &mut World) {
    w.stop().await;
    let (store, rows) =
        Store::open(&w.path("state/journal"), &w.path("run"), None).expect("the journal can be opened");
    let mut changes = Vec::new();
    for mut row in rows.mounts {
        let Some(own) = of_its_own(Path::new(&row.source)) else { continue };
        let volume = rows.volumes.iter().find(|volume| volume.key == row.volume).expect("its volume");
        take_private(w, &mut row);
        unmount(&row.source, UnmountFlags::empty()).expect("an unmount");
        fs::remove_dir(&row.source).expect("its directory");
        mount_bind(volume.staging.as_ref().expect("a staging path"), &own).expect("a mount");
        mount_remount(&own, MountFlags::BIND | MountFlags::NOSUID | MountFlags::NODEV, c"")
            .expect("its flags");
        row.source = own.to_str().expect("a path").to_owned();
        changes.push(Change::PutMount(Arc::new(row)));
    }
    store.commit(changes, Durability::Disk).await.expect("a commit");
    store.close().await.expect("the journal is closed");
}

/// csid is stopped, and then every row has one path, with a mount that has no flags and a directory that anybody passes: its
/// csid did not live to restrict it.
pub async fn half_published(w: &mut World) {
    w.stop().await;
    let (store, rows) =
        Store::open(&w.path("state/journal"), &w.path("run"), None).expect("the journal can be opened");
    let mut changes = Vec::new();
    for mut row in rows.mounts {
        take_private(w, &mut row);
        mount_remount(&row.source, MountFlags::BIND, c"").expect("its flags");
        (row.phase, row.publish, row.kept, row.device) = (Phase::Mounting, Leg::Making, false, None);
        changes.push(Change::PutMount(Arc::new(row)));
    }
    store.commit(changes, Durability::Disk).await.expect("a commit");
    store.close().await.expect("the journal is closed");
}

/// csid is stopped, and then no attachment of the volume has a node id.
pub async fn attached_without_node_id(w: &mut World, name: VolumeName) {
    w.stop().await;
    let (store, _) =
        Store::open(&w.path("state/journal"), &w.path("run"), None).expect("the journal can be opened");
    let before = store.record(name).await.expect("the volume's record");
    let mut after = before.clone();
    after.attachments.iter_mut().for_each(|at| at.node_id = None);
    assert!(after != before, "it is attached");
    let swap = Swap { before, after, past: Vec::new(), durability: Durability::Disk };
    store.swap(swap, Vec::new()).await.expect("a swap");
    store.close().await.expect("the journal is closed");
}

/// Takes away the plugin's own mount, of which an older csid knew nothing. So csid never asks the plugin to unpublish it.
fn take_private(w: &mut World, row: &mut MountRow) {
    let published = row.published.take().expect("the plugin's own mount");
    w.may_excuse(22, &published);
    unmount(&published, UnmountFlags::empty()).expect("an unmount");
    fs::remove_dir(&published).expect("its directory");
    // The last one of its volume.
    let _others = fs::remove_dir(Path::new(&published).parent().expect("a directory"));
}

fn of_its_own(source: &Path) -> Option<PathBuf> {
    source.ends_with("volume").then(|| source.parent().expect("a directory").to_owned())
}
