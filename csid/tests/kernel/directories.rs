use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::Path;

use csid::host::{Access, Host, HostError};
use rustix::fs::Mode;
use rustix::mount::{UnmountFlags, mount_bind, unmount};

use crate::{Loop, apart, apart_async, directory, tmpfs};

fn mode(path: &Path) -> u32 {
    fs::symlink_metadata(path).unwrap().mode() & 0o7777
}

#[test]
fn made() {
    apart("directories::made", |root| {
        let host = Host::of_threads();
        let make = |relative: &str| host.make_directory(root, Path::new(relative), Access::Passable);
        rustix::process::umask(Mode::from_raw_mode(0o077));
        for _ in 0..2 {
            make("staging/hash").unwrap();
        }
        assert_eq!((mode(&root.join("staging")), mode(&root.join("staging/hash"))), (0o711, 0o711));
        host.make_directory(root, Path::new("staging/own"), Access::Private).unwrap();
        assert_eq!((mode(&root.join("staging")), mode(&root.join("staging/own"))), (0o711, 0o700));
        assert_eq!(mode(root), 0o755, "the root is not csid's to change");
        host.make_directory_in(root, Path::new("a/b/c"), Access::MountPoint, Access::Private).unwrap();
        assert_eq!(["a", "a/b", "a/b/c"].map(|made| mode(&root.join(made))), [0o711, 0o700, 0o700]);
        host.make_directory_in(root, Path::new("a/d"), Access::Private, Access::Private).unwrap();
        assert_eq!(mode(&root.join("a")), 0o711, "it was there");
        // A directory that is there gets the mode that is asked for; the directory above keeps its own.
        for own in ["publish/volume", "publish/volume/own", "publish/volume/other"] {
            for (access, due) in
                [(Access::Private, 0o700), (Access::Passable, 0o711), (Access::Private, 0o700)]
            {
                host.make_directory(root, Path::new(own), access).unwrap();
                assert_eq!(mode(&root.join(own)), due);
            }
            host.make_directory(root, Path::new(own), Access::Passable).unwrap();
        }
        host.make_directory(root, Path::new("publish/volume"), Access::Private).unwrap();
        host.make_directory(root, Path::new("publish/volume/third"), Access::Passable).unwrap();
        assert_eq!(mode(&root.join("publish/volume")), 0o700);
        assert_eq!(mode(root), 0o755);

        // What is mounted at the end of what is staged is kept, and not entered; elsewhere it is in the way.
        let mounted = tmpfs(root.join("staging/hash"));
        host.make_directory(root, Path::new("staging/hash"), Access::MountPoint).unwrap();
        let private = host.make_directory(root, Path::new("staging/hash"), Access::Private);
        let file = host.make_file(root, Path::new("staging/hash/file"));
        let listed = host.entries(root, &root.join("staging/hash")).map(drop);
        for refused in [make("staging/hash"), make("staging/hash/below"), private, file, listed] {
            assert!(matches!(refused, Err(HostError::Occupied(_))));
        }
        let before = mode(&mounted);
        assert_eq!((mode(&mounted), fs::read_dir(&mounted).unwrap().count()), (before, 0));

        let outside = directory(root.join("outside"));
        symlink(&outside, root.join("link")).unwrap();
        assert!(matches!(make("link/below"), Err(HostError::Link(_))));
        assert!(matches!(host.make_file(root, Path::new("link/file")), Err(HostError::Link(_))));
        assert!(matches!(host.entries(root, &root.join("link")), Err(HostError::Link(_))));
        assert_eq!(host.entries(root, &root.join("missing")).unwrap(), Vec::<std::path::PathBuf>::new());
        let staged = host.entries(root, &root.join("staging")).unwrap();
        assert_eq!(staged, ["hash", "own"].map(|name| root.join("staging").join(name)));
        assert!(matches!(make("link"), Err(HostError::Link(_))));
        for bad in ["../x", "a/../../x", "/x", "", "."] {
            assert!(matches!(make(bad), Err(HostError::Outside { .. })), "{bad}");
        }
        assert_eq!(fs::read_dir(&outside).unwrap().count(), 0);
        fs::write(root.join("file"), "").unwrap();
        assert!(matches!(make("file/x"), Err(HostError::WrongKind { .. })));
        chown(directory(root.join("foreign")), Some(65534), None).unwrap();
        assert!(matches!(make("foreign/x"), Err(HostError::Foreign { uid: 65534, .. })));
        let missing =
            host.make_directory(&root.join("no root"), Path::new("x"), Access::Passable).unwrap_err();
        assert_eq!(missing.errno(), Some(libc::ENOENT));
    });
}

/// Another's link would choose what the name of a target root stands for.
#[test]
fn a_root_is_named_by_links_of_root_alone() {
    apart_async("directories::a_root_is_named_by_links_of_root_alone", |root| async move {
        let host = Host::of_threads();
        let real = directory(root.join("real/below"));
        symlink("../real/./below", directory(root.join("links")).join("relative")).unwrap();
        symlink(root.join("links/relative"), root.join("links/absolute")).unwrap();
        for name in ["real/below", "links/relative", "links/absolute", "links/../real/below"] {
            assert_eq!(host.resolve(&root.join(name)).await.unwrap(), real, "{name}");
        }
        let own = directory(root.join("own"));
        chown(&own, Some(4001), None).unwrap();
        symlink(&real, own.join("link")).unwrap();
        symlink(&real, root.join("links/own")).unwrap();
        std::os::unix::fs::lchown(root.join("links/own"), Some(4001), None).unwrap();
        let open = directory(root.join("open"));
        symlink(&real, open.join("link")).unwrap();
        fs::set_permissions(&open, fs::Permissions::from_mode(0o777)).unwrap();
        symlink("itself", root.join("links/itself")).unwrap();
        for name in ["own/link", "links/own", "open/link", "links/itself"] {
            let refused = host.resolve(&root.join(name)).await;
            assert!(matches!(refused, Err(HostError::Link(_))), "{name}: {refused:?}");
        }
        assert!(host.resolve(&root.join("missing")).await.is_err());
    });
}

#[test]
fn removed() {
    apart("directories::removed", |root| {
        let host = Host::of_threads();
        let remove = |name: &str| host.remove(root, &root.join(name)).unwrap();
        directory(root.join("publish/volume/one"));
        directory(root.join("publish/volume/two"));
        assert!(remove("publish/volume/one"));
        assert!(root.join("publish/volume/two").exists());
        assert!(remove("publish/volume/two"));
        assert!(!root.join("publish").exists() && root.exists());
        assert!(remove("publish/volume/two") && remove("never/there"));
        assert!(host.remove(&root.join("no root"), &root.join("no root/x")).unwrap());

        fs::write(directory(root.join("publish/device")).join("node"), "").unwrap();
        assert!(remove("publish/device/node") && !root.join("publish").exists());
        let node = directory(root.join("d")).join("node");
        rustix::fs::mknodat(rustix::fs::CWD, &node, rustix::fs::FileType::BlockDevice, Mode::RUSR, 0x7ff)
            .unwrap();
        assert!(remove("d/node") && !root.join("d").exists());

        for bad in ["../x", ".", ""] {
            assert!(matches!(host.remove(root, &root.join(bad)), Err(HostError::Outside { .. })), "{bad}");
        }
        assert!(matches!(host.remove(root, Path::new("/etc/passwd")), Err(HostError::Outside { .. })));
    });
}

#[test]
fn data_is_never_removed() {
    apart("directories::data_is_never_removed", |root| {
        let host = Host::of_threads();
        let remove = |name: &str| host.remove(root, &root.join(name)).unwrap();
        let canary = |directory: &Path| {
            fs::write(directory.join("canary"), "alive").unwrap();
            directory.join("canary")
        };
        let full = canary(&directory(root.join("full")));
        let mounted = tmpfs(root.join("p/mounted"));
        let inside = canary(&mounted);
        let empty = tmpfs(root.join("p/empty"));
        let outside = canary(&directory(root.join("outside")));
        symlink(root.join("outside"), root.join("link")).unwrap();
        symlink(root.join("nowhere"), root.join("dangling")).unwrap();
        fs::write(root.join("data"), "alive").unwrap();
        fs::write(root.join("bound"), "").unwrap();
        let disk = Loop::new(&root.join("image"), &[]);
        mount_bind(&disk.node, root.join("bound")).unwrap();
        rustix::fs::mkfifoat(rustix::fs::CWD, root.join("fifo"), Mode::RUSR).unwrap();
        let names =
            ["full", "p/mounted", "p/empty", "p", "link", "link/canary", "dangling", "data", "bound", "fifo"];
        for name in names {
            assert!(!remove(name), "{name}");
            assert!(fs::symlink_metadata(root.join(name)).is_ok(), "{name}");
        }
        // Below a mount is another file system: nothing of it is csid's.
        assert!(!remove("p/mounted/canary"));
        for file in [&full, &inside, &outside] {
            assert_eq!(fs::read_to_string(file).unwrap(), "alive");
        }

        // Half-mounted: data below the mount point, nothing in the mount. And the mount has vanished under
        // it.
        let half = directory(root.join("half"));
        let below = canary(&half);
        tmpfs(half.clone());
        assert!(!remove("half"));
        unmount(&half, UnmountFlags::empty()).unwrap();
        assert!(!remove("half"));
        assert_eq!(fs::read_to_string(below).unwrap(), "alive");
        unmount(&empty, UnmountFlags::empty()).unwrap();
        assert!(remove("p/empty") && mounted.exists());
    });
}

/// A neighbour's clean-up takes the shared parents away whenever they are empty.
#[test]
fn made_while_parents_go() {
    apart("directories::made_while_parents_go", |root| {
        std::thread::scope(|scope| {
            for worker in 0..4 {
                scope.spawn(move || {
                    let host = Host::of_threads();
                    let name = format!("plugins/local/publish/{worker}");
                    for _ in 0..2000 {
                        host.make_directory(root, Path::new(&name), Access::Passable).unwrap();
                        assert!(root.join(&name).is_dir());
                        assert!(host.remove(root, &root.join(&name)).unwrap());
                    }
                });
            }
        });
        assert_eq!(fs::read_dir(root).unwrap().count(), 0);
    });
}
