//! A journal as an older csid left it.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

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
        unmount(&row.source, UnmountFlags::empty()).expect("an unmount");
        fs::remove_dir(&row.source).expect("its directory");
        mount_bind(&volume.staging, &own).expect("a mount");
        mount_remount(&own, MountFlags::BIND | MountFlags::NOSUID | MountFlags::NODEV, c"")
            .expect("its flags");
        row.source = own.to_str().expect("a path").to_owned();
        changes.push(Change::PutMount(Arc::new(row)));
    }
    store.commit(changes, Durability::Disk).await.expect("a commit");
    store.close().await.expect("the journal is closed");
}

fn of_its_own(source: &Path) -> Option<PathBuf> {
    source.ends_with("volume").then(|| source.parent().expect("a directory").to_owned())
}
