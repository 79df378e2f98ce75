//! The tmpfs of a plugin's root.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use csid::host::{Access, Host, HostError, Live, Look};
use rustix::mount::{MountFlags, UnmountFlags, mount_remount, unmount};

use crate::{apart_async, directory, fuse, lines, number, tmpfs};

/// More than any of these calls takes, where none waits for a server.
const AT_ONCE: Duration = Duration::from_secs(5);

fn plugin(root: &Path) -> PathBuf {
    directory(root.join("state/plugins/p"))
}

/// Makes a directory for a volume, as a mount does.
fn make(host: &Host, root: &Path, path: &str) -> Result<(), HostError> {
    host.make_directory(&root.join("state"), &Path::new("plugins/p").join(path), Access::Passable)
}

async fn made(host: &Host, root: &Path) -> Option<PathBuf> {
    host.make_live(&root.join("state"), &plugin(root)).await
}

#[test]
fn tmpfs_is_mounted_once_and_found_again() {
    apart_async("live::tmpfs_is_mounted_once_and_found_again", |root| async move {
        let (host, own) = (Host::of_threads(), plugin(&root));
        assert_eq!(host.live(&own), Live::Unknown);
        let live = made(&host, &root).await.unwrap();
        assert_eq!((&live, host.live(&own)), (&own.join("live"), Live::At(own.join("live"))));
        let line = lines(&live).pop().unwrap();
        assert!(line.contains(" - tmpfs csid-live ") && line.contains("nosuid"), "{line}");
        assert!(!line.contains("nodev") && line.contains("nr_inodes="), "{line}");
        assert_eq!(fs::metadata(&live).unwrap().permissions().mode() & 0o7777, 0o711);

        make(&host, &root, "live/publish/volume").unwrap();
        assert_eq!(fs::metadata(live.join("publish/volume")).unwrap().dev(), number(&live));
        let next = Host::of_threads();
        next.find_lives([own.clone(), root.join("missing")].into()).await;
        for host in [&host, &next] {
            assert_eq!(host.live(&own), Live::At(live.clone()));
            assert_eq!(made(host, &root).await, Some(live.clone()));
            let kind = live.join("publish");
            assert_eq!(host.entries(&kind, &kind).unwrap(), [kind.join("volume")]);
            let state = root.join("state");
            assert_eq!(host.look_unmounted(&state, &kind.join("volume")), Some(Look::Plain));
            assert_eq!(host.look_unmounted(&kind, &kind.join("other")), Some(Look::Missing));
        }
        // A csid that has not looked for it does not walk there.
        let blind = Host::of_threads();
        assert!(matches!(make(&blind, &root, "live/publish/other"), Err(HostError::Occupied(_))));
        assert_eq!(lines(&live).len(), 1);
        assert!(host.remove(&root.join("state"), &live.join("publish/volume")).unwrap());
        assert!(live.exists() && !live.join("publish").exists());
    });
}

#[test]
fn foreign_mount_at_live_is_not_entered() {
    apart_async("live::foreign_mount_at_live_is_not_entered", |root| async move {
        let own = plugin(&root);
        let (state, live) = (root.join("state"), own.join("live"));
        let begun = Instant::now();
        for is_fuse in [false, true] {
            let server = is_fuse.then(|| fuse(live.clone()).1);
            if !is_fuse {
                directory(tmpfs(live.clone()).join("publish/volume"));
            }
            let host = Host::of_threads();
            host.find_lives([own.clone()].into()).await;
            assert_eq!(made(&host, &root).await, None);
            assert_eq!(host.live(&own), Live::Without);
            let (kind, path) = (live.join("publish"), live.join("publish/volume"));
            assert!(matches!(make(&host, &root, "live/publish/volume"), Err(HostError::Occupied(_))));
            for base in [&state, &kind] {
                assert_eq!(host.look_unmounted(base, &path), None);
                assert!(matches!(
                    host.entries(base, &kind),
                    Err(HostError::Occupied(_) | HostError::Os { .. })
                ));
                assert!(!host.remove(base, &path).unwrap());
            }
            let left = vec![(kind.clone(), path.clone())];
            assert!(!host.remove_left("p", left, false).await.unwrap());
            assert_eq!(lines(&live).len(), 1);
            drop(server);
            unmount(&live, UnmountFlags::DETACH).unwrap();
        }
        assert!(begun.elapsed() < AT_ONCE);
    });
}

/// A plugin may do that, and its server need not answer.
#[test]
fn mount_over_the_tmpfs_does_not_hold_csid_up() {
    apart_async("live::mount_over_the_tmpfs_does_not_hold_csid_up", |root| async move {
        let (host, own) = (Host::of_threads(), plugin(&root));
        let live = made(&host, &root).await.unwrap();
        make(&host, &root, "live/publish/volume").unwrap();
        let begun = Instant::now();
        let (_, server) = fuse(live.clone());
        let (kind, path) = (live.join("publish"), live.join("publish/volume"));
        make(&host, &root, "live/publish/other").unwrap();
        assert_eq!(host.look_unmounted(&root.join("state"), &path), Some(Look::Plain));
        assert!(host.remove_left("p", vec![(kind.clone(), path)], false).await.unwrap());
        assert_eq!(host.entries(&kind, &kind).unwrap(), [kind.join("other")]);
        // The next csid sees what is on top.
        let next = Host::of_threads();
        next.find_lives([own.clone()].into()).await;
        assert_eq!((next.live(&own), made(&next, &root).await), (Live::Unknown, None));
        assert!(begun.elapsed() < AT_ONCE);
        drop(server);
        unmount(&live, UnmountFlags::DETACH).unwrap();
    });
}

#[test]
fn unmounted_tmpfs_is_noticed_and_mounted_again() {
    apart_async("live::unmounted_tmpfs_is_noticed_and_mounted_again", |root| async move {
        let (host, own) = (Host::of_threads(), plugin(&root));
        let live = made(&host, &root).await.unwrap();
        make(&host, &root, "live/publish/volume").unwrap();
        unmount(&live, UnmountFlags::DETACH).unwrap();
        assert_eq!(host.live(&own), Live::Unknown);
        assert_eq!(made(&host, &root).await, Some(live.clone()));
        assert_eq!((host.live(&own), lines(&live).len()), (Live::At(live.clone()), 1));
        assert_eq!(fs::read_dir(&live).unwrap().count(), 0);
        make(&host, &root, "live/publish/volume").unwrap();
        assert!(live.join("publish/volume").is_dir());
    });
}

/// It may be the root of another plugin.
#[test]
fn directory_with_files_gets_no_tmpfs() {
    apart_async("live::directory_with_files_gets_no_tmpfs", |root| async move {
        let (host, own) = (Host::of_threads(), plugin(&root));
        let other = directory(own.join("live/publish"));
        directory(other.join("volume"));
        assert_eq!(made(&host, &root).await, None);
        assert!(lines(&own.join("live")).is_empty());
        // The directories of mounts without a tmpfs.
        make(&host, &root, "live/publish/volume").unwrap();
        assert_eq!(host.entries(&other, &other).unwrap(), [other.join("volume")]);
        let left = vec![(other.clone(), other.join("volume"))];
        assert!(host.remove_left("p", left, false).await.unwrap());
        assert!(other.exists() && !other.join("volume").exists());
    });
}

#[test]
fn full_tmpfs_is_named_in_the_error() {
    apart_async("live::full_tmpfs_is_named_in_the_error", |root| async move {
        let host = Host::of_threads();
        let live = made(&host, &root).await.unwrap();
        mount_remount(&live, MountFlags::NOSUID, c"nr_inodes=3").unwrap();
        make(&host, &root, "live/publish").unwrap();
        let error = make(&host, &root, "live/publish/one/two").unwrap_err();
        assert!(error.to_string().contains(&format!("the tmpfs at {}", live.display())), "{error}");
        assert!(matches!(error, HostError::LiveFull { .. }));
    });
}

#[test]
fn only_an_empty_tmpfs_is_unmounted() {
    apart_async("live::only_an_empty_tmpfs_is_unmounted", |root| async move {
        let (host, own) = (Host::of_threads(), plugin(&root));
        let live = made(&host, &root).await.unwrap();
        make(&host, &root, "live/publish").unwrap();
        fs::write(live.join("file"), "a plugin's").unwrap();
        assert!(!host.unmount_live(&own).await.unwrap());
        fs::remove_file(live.join("file")).unwrap();
        let volume = tmpfs(live.join("publish/volume"));
        assert!(!host.unmount_live(&own).await.unwrap());
        unmount(&volume, UnmountFlags::empty()).unwrap();
        assert!(!host.unmount_live(&own).await.unwrap());
        fs::remove_dir(&volume).unwrap();
        // Not what another process has mounted over it.
        let over = tmpfs(live.clone());
        assert!(!host.unmount_live(&own).await.unwrap());
        assert_eq!((host.live(&own), lines(&over).len()), (Live::At(live.clone()), 2));
        unmount(&over, UnmountFlags::empty()).unwrap();
        assert!(host.unmount_live(&own).await.unwrap());
        assert_eq!((host.live(&own), lines(&live).len()), (Live::Unknown, 0));
        assert!(host.unmount_live(&own).await.unwrap() && live.is_dir());
    });
}
