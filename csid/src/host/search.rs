//! One search through all mount namespaces, by the calls that the kernel has. It holds namespaces' files, and closes a namespace's last
//! reference if the namespace's processes end meanwhile. The kernel then unmounts what that namespace had, and a file system's server can
//! hold that up. So a worker of the helper searches.

use crate::host::copies::Search;
use crate::host::error::HostError;
use crate::host::namespace_tables::{self, Known};
use crate::host::namespaces::{Budget, MountElsewhere, Question};
use crate::host::{process_tables, statmount};

/// What a search found.
pub(super) struct FoundCopies {
    /// The answers in the order of the questions.
    pub answers: Vec<Vec<MountElsewhere>>,
    /// Why `/proc` was read. `None`: the kernel listed the namespaces.
    pub unlisted: Option<std::io::Error>,
}

/// Searches all mount namespaces once. `known` is of the searches before.
pub(super) fn search(
    questions: &[Question],
    known: &mut Known,
    budget: &Budget,
) -> Result<FoundCopies, HostError> {
    let mut search = Search::new(questions);
    match namespace_tables::search(&mut search, statmount::namespaces, known, budget) {
        Ok(answers) => Ok(FoundCopies { answers, unlisted: None }),
        // An older kernel, a filter of system calls, csid in a container, or a mount that another one hides.
        Err(error) => {
            let answers = process_tables::search(&mut Search::new(questions), budget)?;
            Ok(FoundCopies { answers, unlisted: Some(error) })
        }
    }
}

#[cfg(test)]
#[allow(clippy::disallowed_types, reason = "unshare and mount are programs")]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::path::Path;
    use std::process::{Child, Command, Stdio};
    use std::time::Duration;

    use super::*;
    use crate::host::namespaces::{Holder, NAMED, Shown};
    use crate::host::table;

    const INSIDE: &str = "CSID_TEST_SEARCH";
    const VOLUME: &str = "/mnt/volume";

    /// A process in a mount namespace of its own, which ends with the test.
    struct Consumer(Child);

    impl Consumer {
        fn new(propagation: &str, script: &str) -> Self {
            let script = format!("set -e\n{script}\necho ready\nexec sleep 600");
            let mut command = Command::new("setpriv");
            command.args(["--pdeathsig", "KILL", "unshare", "--mount", "--propagation", propagation]);
            let mut process = command.args(["sh", "-c", &script]).stdout(Stdio::piped()).spawn().unwrap();
            let mut line = String::new();
            BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
            assert_eq!(line, "ready\n", "{script}");
            Consumer(process)
        }
    }

    impl Drop for Consumer {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    fn run(script: &str) {
        assert!(Command::new("sh").args(["-ec", script]).status().unwrap().success(), "{script}");
    }

    /// Runs the test in a mount namespace of its own, whose `/mnt` is shared and has the volume.
    fn apart(test: &str, body: impl FnOnce()) {
        if let Err(error) = statmount::namespaces() {
            eprintln!("{test} skipped: the kernel does not list mount namespaces here: {error}");
            return;
        }
        if std::env::var_os(INSIDE).is_some() {
            run("mount -t tmpfs mnt /mnt && mount --make-shared /mnt && mkdir /mnt/volume /mnt/other");
            run("mount -t tmpfs volume /mnt/volume");
            return body();
        }
        assert!(rustix::process::geteuid().is_root(), "this test mounts: run it as root");
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation", "private"]).arg(std::env::current_exe().unwrap());
        let status = command.args(["--exact", test, "--nocapture"]).env(INSIDE, "1").status().unwrap();
        assert!(status.success(), "{test} failed in its namespace; see above");
    }

    fn question(but_of: &[&Consumer]) -> Question {
        let own =
            table::entries().unwrap().into_iter().rfind(|entry| entry.path == Path::new(VOLUME)).unwrap();
        let shown = Shown {
            device: own.device,
            fs_type: own.fs_type,
            root: own.root,
            is_node: false,
            source: String::new(),
        };
        Question { shown: vec![shown], but_of: but_of.iter().map(|consumer| consumer.0.id()).collect() }
    }

    /// Returns the answers of both searches, ordered.
    fn both(questions: &[Question], known: &mut Known) -> [Vec<Vec<MountElsewhere>>; 2] {
        let listed = namespace_tables::search(
            &mut Search::new(questions),
            statmount::namespaces,
            known,
            &Budget::new(),
        );
        let read = process_tables::search(&mut Search::new(questions), &Budget::new()).unwrap();
        [listed.unwrap(), read].map(|mut answers| {
            answers.iter_mut().for_each(|answer| answer.sort_by_key(|copy| (copy.holder, copy.path.clone())));
            answers
        })
    }

    #[test]
    fn listed_and_read_namespaces_show_the_same() {
        apart("host::search::tests::listed_and_read_namespaces_show_the_same", || {
            let mut known = Known::default();
            let [listed, read] = both(&[question(&[])], &mut known);
            assert_eq!((listed, read), (vec![vec![]], vec![vec![]]), "nobody else has the volume");
            let copy = Consumer::new("private", "");
            let slave = Consumer::new("slave", "");
            let peer = Consumer::new("unchanged", "");
            let below = Consumer::new(
                "slave",
                "exec unshare --mount --propagation slave sh -c 'echo ready; exec sleep 600'",
            );
            let bound = Consumer::new(
                "slave",
                "mount --bind -o ro /mnt/volume /mnt/other && mount --make-private /mnt",
            );
            let covered =
                Consumer::new("slave", "mkdir -p /mnt/volume/in && mount -t tmpfs in /mnt/volume/in");
            let rslave = Consumer::new("slave", "mount --bind /mnt/volume /srv && mount --make-rslave /srv");
            let found = |consumer: &Consumer, path: &str, read_only| MountElsewhere {
                holder: Holder::Process(consumer.0.id()),
                path: Some(path.into()),
                read_only,
            };
            let mut due = vec![
                found(&copy, VOLUME, false),
                found(&bound, "/mnt/other", true),
                found(&bound, VOLUME, false),
                found(&covered, VOLUME, false),
                found(&rslave, "/srv", false),
            ];
            due.sort_by_key(|copy| (copy.holder, copy.path.clone()));
            let mut but = due.clone();
            but.retain(|found| found.holder != Holder::Process(copy.0.id()));
            // The second search knows the mounts of the first one.
            for _ in 0..2 {
                let [listed, read] = both(&[question(&[]), question(&[&copy])], &mut known);
                assert_eq!(listed, [due.clone(), but.clone()]);
                assert_eq!(read, listed);
            }
            drop((slave, peer, below));
            drop((bound, covered, rslave));
            let [listed, read] = both(&[question(&[])], &mut known);
            assert_eq!((&listed, &read), (&vec![vec![found(&copy, VOLUME, false)]], &listed));
        });
    }

    #[test]
    fn namespace_without_time_to_search_counts() {
        apart("host::search::tests::namespace_without_time_to_search_counts", || {
            let copy = Consumer::new("private", "");
            let questions = [question(&[]), question(&[&copy])];
            let none = || Budget::lasting(Duration::ZERO);
            let mut known = Known::default();
            let unsearched = MountElsewhere::unsearched(Holder::Process(copy.0.id()));

            let read = process_tables::search(&mut Search::new(&questions), &none()).unwrap();
            assert!(read[0].contains(&unsearched) && !read[1].contains(&unsearched), "{read:?}");
            let mut search = Search::new(&questions);
            let listed =
                namespace_tables::search(&mut search, statmount::namespaces, &mut known, &none()).unwrap();
            // Only the first ones are named by a process.
            assert!(listed[0].iter().all(|copy| copy.path.is_none()), "{listed:?}");
            assert!(listed[0].len() > NAMED || listed[0].contains(&unsearched), "{listed:?}");

            // A search with time goes on with what the first one knows.
            let [listed, read] = both(&questions, &mut known);
            let due = MountElsewhere { path: Some(VOLUME.into()), ..unsearched };
            assert_eq!((&listed, &read), (&vec![vec![due], vec![]], &listed));
        });
    }

    #[test]
    fn holder_that_is_not_found_in_time_is_a_namespace() {
        apart("host::search::tests::holder_that_is_not_found_in_time_is_a_namespace", || {
            let copy = Consumer::new("private", "");
            let mut known = Known::default();
            both(&[question(&[])], &mut known);
            let all = || statmount::namespaces().unwrap().1.into_iter().collect();
            let holders = |time| namespace_tables::holders(all(), &known, time).unwrap();
            let named = holders(Duration::from_secs(60));
            let of_copy = |(_, holder): &(&u64, &Holder)| **holder == Holder::Process(copy.0.id());
            let (namespace, _) = named.iter().find(of_copy).unwrap();
            assert!(matches!(holders(Duration::ZERO)[namespace], Holder::Namespace(_)));
        });
    }

    /// Every user may mount at a path that is longer than an answer of the kernel may be.
    #[test]
    fn copy_at_too_long_a_path_counts() {
        apart("host::search::tests::copy_at_too_long_a_path_counts", || {
            let (ready, is_ready) = std::sync::mpsc::channel();
            let (end, is_end) = std::sync::mpsc::channel::<()>();
            let thread = std::thread::spawn(move || {
                use rustix::mount::{MountPropagationFlags, UnmountFlags, mount_bind, mount_change, unmount};
                let apart = rustix::thread::UnshareFlags::FS | rustix::thread::UnshareFlags::NEWNS;
                // SAFETY: only the working directory and the mounts of this thread are its own now.
                unsafe { rustix::thread::unshare_unsafe(apart) }.unwrap();
                mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC).unwrap();
                rustix::process::chdir("/mnt/other").unwrap();
                let name = "x".repeat(250);
                // Three paths of an answer are 12 KiB.
                for _ in 0..60 {
                    std::fs::create_dir(&name).unwrap();
                    rustix::process::chdir(&name).unwrap();
                }
                mount_bind(VOLUME, ".").unwrap();
                unmount(VOLUME, UnmountFlags::empty()).unwrap();
                ready.send(()).unwrap();
                let _ = is_end.recv();
            });
            is_ready.recv().unwrap();
            let [listed, _] = both(&[question(&[])], &mut Known::default());
            assert_eq!(listed, [vec![MountElsewhere::unsearched(Holder::Process(std::process::id()))]]);
            drop(end);
            thread.join().unwrap();
        });
    }

    #[test]
    fn namespaces_without_a_process_are_named_at_once() {
        apart("host::search::tests::namespaces_without_a_process_are_named_at_once", || {
            const MANY: usize = 300;
            let keeper = std::thread::spawn(|| -> Vec<std::fs::File> {
                let apart = rustix::thread::UnshareFlags::FS | rustix::thread::UnshareFlags::NEWNS;
                let mut kept = Vec::new();
                for _ in 0..=MANY {
                    // SAFETY: only the working directory and the mounts of this thread are its own then.
                    unsafe { rustix::thread::unshare_unsafe(apart) }.unwrap();
                    rustix::mount::mount_change(
                        "/",
                        rustix::mount::MountPropagationFlags::PRIVATE
                            | rustix::mount::MountPropagationFlags::REC,
                    )
                    .unwrap();
                    kept.push(std::fs::File::open("/proc/thread-self/ns/mnt").unwrap());
                }
                kept
            });
            let kept = keeper.join().unwrap();
            let mut due: Vec<_> = kept
                .iter()
                .map(|file| Holder::Namespace(std::os::unix::fs::MetadataExt::ino(&file.metadata().unwrap())))
                .collect();
            due.sort();
            let [listed, _] = both(&[question(&[])], &mut Known::default());
            let holders: Vec<_> = listed[0].iter().map(|copy| copy.holder).collect();
            assert_eq!(holders, due);
        });
    }

    #[test]
    fn copy_that_moves_between_list_and_search_is_found() {
        apart("host::search::tests::copy_that_moves_between_list_and_search_is_found", || {
            let questions = [question(&[])];
            // Its copy goes along with csid's unmount, as that of a service with PrivateTmp= does.
            let _slave = Consumer::new("slave", "");
            let first = std::cell::Cell::new(Some(Consumer::new("private", "")));
            let second = std::cell::Cell::new(None);
            // After the first list the process leaves its namespace for a copy of it.
            let list = || {
                let listed = statmount::namespaces();
                if let Some(moved) = first.take() {
                    second.set(Some(Consumer::new("private", "")));
                    drop(moved);
                }
                listed
            };
            let mut search = Search::new(&questions);
            let found =
                namespace_tables::search(&mut search, list, &mut Known::default(), &Budget::new()).unwrap();
            let holder = Holder::Process(second.take().unwrap().0.id());
            assert_eq!(found, [vec![MountElsewhere { holder, path: Some(VOLUME.into()), read_only: false }]]);
        });
    }

    #[test]
    fn namespace_that_the_first_list_lacks_is_found() {
        apart("host::search::tests::namespace_that_the_first_list_lacks_is_found", || {
            let questions = [question(&[])];
            let copy = Consumer::new("private", "");
            let alone = std::cell::Cell::new(true);
            // The kernel does not list its namespaces in the order of their age.
            let list = || {
                let (own, others) = statmount::namespaces()?;
                Ok((own, if alone.take() { Vec::new() } else { others }))
            };
            let mut search = Search::new(&questions);
            let found =
                namespace_tables::search(&mut search, list, &mut Known::default(), &Budget::new()).unwrap();
            let holder = Holder::Process(copy.0.id());
            assert_eq!(found, [vec![MountElsewhere { holder, path: Some(VOLUME.into()), read_only: false }]]);
        });
    }

    #[test]
    fn namespace_that_ends_after_its_search_is_found() {
        apart("host::search::tests::namespace_that_ends_after_its_search_is_found", || {
            let questions = [question(&[])];
            let copy = std::cell::Cell::new(Some(Consumer::new("private", "")));
            let is_searched = std::cell::Cell::new(false);
            let list = || {
                let listed = statmount::namespaces();
                // Its process may have left it for a copy, in which nothing has searched.
                if is_searched.replace(true) {
                    drop(copy.take());
                }
                listed
            };
            let mut search = Search::new(&questions);
            let found =
                namespace_tables::search(&mut search, list, &mut Known::default(), &Budget::new()).unwrap();
            let of_copy =
                MountElsewhere { holder: Holder::Ended, path: Some(VOLUME.into()), read_only: false };
            assert_eq!(found, [vec![of_copy]]);
        });
    }

    #[test]
    fn listed_namespace_that_shows_nothing_is_refused() {
        apart("host::search::tests::listed_namespace_that_shows_nothing_is_refused", || {
            let questions = [question(&[])];
            let mut known = Known::default();
            let of_list = |shows_nothing: Option<u64>, known: &mut Known| {
                let list = || {
                    statmount::namespaces()
                        .map(|(own, others)| (own, others.into_iter().chain(shows_nothing).collect()))
                };
                namespace_tables::search(&mut Search::new(&questions), list, known, &Budget::new())
            };
            of_list(None, &mut known).unwrap();
            // The kernel has no namespace with this id.
            let refused = of_list(Some(u64::MAX), &mut known).unwrap_err();
            assert_eq!(refused.kind(), std::io::ErrorKind::Unsupported);
            of_list(None, &mut known).unwrap();
        });
    }

    #[test]
    fn hidden_copy_is_found_by_its_process() {
        apart("host::search::tests::hidden_copy_is_found_by_its_process", || {
            let covered = Consumer::new("private", "mount -t tmpfs cover /");
            let questions = [question(&[])];
            let (holder, path) = (Holder::Process(covered.0.id()), Some(VOLUME.into()));
            let due = [vec![MountElsewhere { holder, path, read_only: false }]];
            assert_eq!(search(&questions, &mut Known::default(), &Budget::new()).unwrap().answers, due);
        });
    }

    #[test]
    fn namespace_that_a_file_holds_is_listed() {
        apart("host::search::tests::namespace_that_a_file_holds_is_listed", || {
            run("mkdir /mnt/held && mount -t tmpfs held /mnt/held && mount --make-private /mnt/held");
            run(": > /mnt/held/ns");
            // The kernel binds no namespace whose id is below that of the binding process' own, and ids are not in order.
            let is_bound = (0..100).any(|_| {
                let consumer = Consumer::new("private", "");
                let namespace = format!("/proc/{}/ns/mnt", consumer.0.id());
                Command::new("mount").args(["--bind", &namespace, "/mnt/held/ns"]).status().unwrap().success()
            });
            assert!(is_bound);
            let inode = std::os::unix::fs::MetadataExt::ino(&std::fs::metadata("/mnt/held/ns").unwrap());
            let [listed, read] = both(&[question(&[])], &mut Known::default());
            let (holder, path) = (Holder::Namespace(inode), Some(VOLUME.into()));
            assert_eq!(listed, [vec![MountElsewhere { holder, path, read_only: false }]]);
            assert!(read[0].is_empty(), "/proc does not show it");
            run("umount /mnt/held/ns");
            let [listed, _] = both(&[question(&[])], &mut Known::default());
            assert!(listed[0].is_empty(), "the namespace ended with its file");
        });
    }

    #[test]
    fn thread_in_a_namespace_of_its_own_is_named() {
        apart("host::search::tests::thread_in_a_namespace_of_its_own_is_named", || {
            let (ready, is_ready) = std::sync::mpsc::channel();
            let (end, is_end) = std::sync::mpsc::channel::<()>();
            let thread = std::thread::spawn(move || {
                let apart = rustix::thread::UnshareFlags::FS | rustix::thread::UnshareFlags::NEWNS;
                // SAFETY: only the working directory and the mounts of this thread are its own now.
                unsafe { rustix::thread::unshare_unsafe(apart) }.unwrap();
                rustix::mount::mount_change(
                    "/",
                    rustix::mount::MountPropagationFlags::PRIVATE | rustix::mount::MountPropagationFlags::REC,
                )
                .unwrap();
                ready.send(()).unwrap();
                let _ = is_end.recv();
            });
            is_ready.recv().unwrap();
            let [listed, read] = both(&[question(&[])], &mut Known::default());
            let holder = Holder::Process(std::process::id());
            assert_eq!(
                listed,
                [vec![MountElsewhere { holder, path: Some(VOLUME.into()), read_only: false }]]
            );
            assert!(read[0].is_empty(), "/proc/PID/mountinfo is that of the first thread");
            drop(end);
            thread.join().unwrap();
        });
    }
}
