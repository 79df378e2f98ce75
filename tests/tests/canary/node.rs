//! A secret through every RPC and every failure, by descriptor and by credential, while the plugin repeats it wherever it can.
//! Then everything csid wrote and said is searched for it, and for a text that is no secret, which has to be found.

use std::collections::HashMap;
use std::fs;
use std::os::fd::OwnedFd;
use std::time::Duration;

use csid_client::{MountOptions, Restore, UnmountOptions};
use csid_tests::ask::*;
use csid_tests::dbus::{Bus, Policy};
use csid_tests::raw::{self, MANAGER, MANAGER_PATH, NAME, ROOT, dict, value};
use csid_tests::script::{Act, Rule};
use csid_tests::search::Haystack;
use csid_tests::world::{World, count, eventually, world};
use futures_util::future::join;
use zbus::{Connection, Variant};

pub const SECRET: &str = "c4n4ry>?s3cr3t~4242";
pub const CONTEXT: &str = "c4n4ry-c0nt3xt-4242";
pub const FLAG: &str = "c4n4ry-fl4g-4242";
/// In the volumes' names: no secret.
pub const MARKER: &str = "m4rk3r-n0-s3cr3t-4242";
pub const CREDENTIAL: &str = "csid.default.canary";
const MAKING: [&str; 2] = ["NodeStageVolume", "NodePublishVolume"];
const REMOVING: [&str; 2] = ["NodeUnpublishVolume", "NodeUnstageVolume"];
pub const SHORT: Duration = Duration::from_millis(300);

/// The way in which csid gets the secret.
#[derive(Clone, Copy, Debug)]
pub enum By {
    Descriptor,
    Credential,
}

pub use By::{Credential, Descriptor};

/// Returns the name of the volume of a way.
pub fn volume(by: By) -> String {
    format!("{MARKER}-{by:?}")
}

fn options(by: By) -> MountOptions {
    let base = MountOptions {
        volume_context: Some([("token".to_owned(), CONTEXT.to_owned())].into()),
        publish_context: Some([("token".to_owned(), CONTEXT.to_owned())].into()),
        mount_flags: Some(vec![FLAG.to_owned()]),
        restore: Some(Restore::Auto),
        ..inline(&volume(by))
    };
    match by {
        Descriptor => MountOptions { secrets: Some(secrets(&[("password", SECRET)])), ..base },
        Credential => MountOptions { credential: Some(CREDENTIAL.to_owned()), ..base },
    }
}

/// Returns the text of a plugin that quotes its arguments.
pub fn words() -> String {
    format!("cannot log in with {SECRET} ({:?}) of {CONTEXT} and {FLAG}", format!("password={SECRET}"))
}

/// csid as its callers on the bus see it; the monitor sees all of it.
struct Caller(Connection);

impl Caller {
    async fn mount(&self, by: By, options: MountOptions) -> bool {
        let body = (NAMESPACE, volume(by), "job", options);
        self.0.call_method(Some(NAME), MANAGER_PATH, Some(MANAGER), "Mount", &body).await.is_ok()
    }

    async fn unmount(&self, by: By, deadline: Duration) -> bool {
        let deadline_usec = Some(deadline.as_micros() as u64);
        let body =
            (NAMESPACE, volume(by), "job", UnmountOptions { deadline_usec, ..UnmountOptions::default() });
        self.0.call_method(Some(NAME), MANAGER_PATH, Some(MANAGER), "Unmount", &body).await.is_ok()
    }

    async fn mounted(&self) {
        let (one, other) =
            join(self.mount(Descriptor, options(Descriptor)), self.mount(Credential, options(Credential)))
                .await;
        assert!(one && other, "an honest plugin mounts");
    }

    async fn unmounted(&self) {
        let long = Duration::from_secs(60);
        // The first call may get the answer of a rollback that began before the plugin was honest.
        for _ in 0..2 {
            let (one, other) = join(self.unmount(Descriptor, long), self.unmount(Credential, long)).await;
            if one && other {
                return;
            }
        }
        panic!("an honest plugin does not unmount");
    }

    /// Requests both mounts, which have to fail. Returns their number.
    async fn refused(&self) -> usize {
        let late = |by| self.mount(by, within(SHORT, options(by)));
        let (one, other) = join(late(Descriptor), late(Credential)).await;
        assert!(!one && !other, "it cannot have been mounted");
        2
    }

    async fn look(&self, member: &str) {
        let takes = if member == "ListMounts" { vec![value("a{sv}")] } else { Vec::new() };
        raw::call(&self.0, MANAGER_PATH, MANAGER, member, takes).await.expect(member);
    }
}

/// Makes every RPC fail with every code, with the secret in the plugin's words. Returns how many calls failed.
async fn every_code(w: &mut World, caller: &Caller) -> usize {
    let mut failures = 0;
    for code in 1..=16 {
        let says = |rpc: &&str| Rule::always(rpc, Act::Say(code, words()));
        for rpc in &MAKING {
            // What undoes it says so, too, once.
            let undo =
                REMOVING.iter().map(|rpc| Rule { times: 2, ..Rule::always(rpc, Act::Say(code, words())) });
            w.plugin("p").rules([says(rpc)].into_iter().chain(undo));
            failures += caller.refused().await;
            caller.look("ListMounts").await;
            w.plugin("p").honest();
            caller.unmounted().await;
        }
        for rpc in &REMOVING {
            caller.mounted().await;
            w.plugin("p").rules([says(rpc)]);
            let (one, other) =
                join(caller.unmount(Descriptor, SHORT), caller.unmount(Credential, SHORT)).await;
            failures += usize::from(!one) + usize::from(!other);
            caller.look("ListMounts").await;
            caller.look("ListOperations").await;
            w.plugin("p").honest();
            caller.unmounted().await;
        }
    }
    failures
}

/// Makes calls time out, and kills the plugin and csid, at every RPC that has the secret or follows it. Returns the number of these.
async fn every_end(w: &mut World, bus: &Bus, caller: &Caller) -> usize {
    let mut ends = 0;
    for rpc in MAKING {
        w.plugin("p").rules([Rule::always(rpc, Act::Delay(3_600_000))]);
        ends += caller.refused().await;
        caller.look("ListOperations").await;
        w.plugin("p").honest();
        caller.unmounted().await;
    }
    for rpc in MAKING.into_iter().chain(REMOVING) {
        for act in [Act::DieBefore, Act::DieAfter] {
            let makes = MAKING.contains(&rpc);
            if !makes {
                caller.mounted().await;
            }
            w.plugin("p").rules([Rule::once(rpc, act)]);
            let (_, ()) = join(
                async {
                    match makes {
                        true => caller.mount(Descriptor, within(SHORT, options(Descriptor))).await,
                        false => caller.unmount(Descriptor, SHORT).await,
                    }
                },
                w.plugin("p").died(),
            )
            .await;
            ends += 1;
            w.plugin("p").honest();
            w.plugin("p").start().await;
            caller.unmounted().await;
        }
    }
    // csid is killed with the secret in its hands.
    for rpc in MAKING {
        w.plugin("p").rules([Rule::always(rpc, Act::Delay(3_600_000))]);
        let calls = w.plugin("p").count(rpc, "");
        let cut_off = async {
            let plugin = w.plugin("p");
            eventually("it has the secret", async || plugin.count(rpc, "") > calls).await;
            caller.look("ListOperations").await;
            w.kill();
        };
        let (answered, ()) = join(caller.mount(Descriptor, options(Descriptor)), cut_off).await;
        assert!(!answered, "csid was killed before");
        ends += 1;
        w.plugin("p").honest();
        settled(&w.start().await).await;
        bus.has_csid().await;
        caller.unmounted().await;
    }
    ends
}

/// Gives csid invalid descriptors and credentials that contain the secret. Returns their number.
async fn every_bad_document(w: &World, caller: &Caller) -> usize {
    let memfd = |content: &str, seal: bool| -> OwnedFd {
        use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
        let fd = memfd_create("secrets", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC).unwrap();
        rustix::io::write(&fd, content.as_bytes()).unwrap();
        rustix::fs::seek(&fd, rustix::fs::SeekFrom::Start(0)).unwrap();
        if seal {
            fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE | SealFlags::SEAL)
                .unwrap();
        }
        fd
    };
    let documents = [
        SECRET.to_owned(),
        format!("{{\"password\":\"{SECRET}\""),
        format!("[{SECRET:?}]"),
        format!("{{\"password\":[{SECRET:?}]}}"),
        format!("{{{SECRET:?}:\"x\"}}"),
        format!("{{\"password\":\"{}\"}}", SECRET.repeat(2000)),
    ];
    let refused = async |key: &str, value: Variant<'static>| {
        let entries =
            HashMap::from([("plugin", raw::text("p")), ("external-id", raw::text(MARKER)), (key, value)]);
        let values = [NAMESPACE, MARKER, "job"]
            .map(raw::text)
            .into_iter()
            .chain([dict(entries.into_iter().collect())]);
        raw::call(&caller.0, MANAGER_PATH, MANAGER, "Mount", values.collect())
            .await
            .expect_err("it is refused");
    };
    let mut looked = 0;
    for (number, document) in documents.iter().enumerate() {
        refused("secrets", Variant::Fd(zbus::Fd::from(memfd(document, true)))).await;
        let name = format!("csid.default.bad-{number}");
        fs::write(w.path("credentials").join(&name), document).unwrap();
        refused("credential", raw::text(&name)).await;
        looked += 2;
    }
    let good = format!("{{\"password\":{SECRET:?}}}");
    let (pipe, into) = std::io::pipe().unwrap();
    rustix::io::write(&into, good.as_bytes()).unwrap();
    // Not sealed; a pipe that nobody closes; the descriptor of a directory.
    for fd in [memfd(&good, false), pipe.into(), fs::File::open(w.path("credentials")).unwrap().into()] {
        refused("secrets", Variant::Fd(zbus::Fd::from(fd))).await;
        looked += 1;
    }
    looked
}

#[test]
fn canary_is_found_nowhere() {
    world(async |w| {
        w.environment.insert("CSID_LOG".to_owned(), "trace".to_owned());
        fs::write(w.path("credentials").join(CREDENTIAL), format!("{{\"password\":{SECRET:?}}}")).unwrap();
        let bus = Bus::start(w, Policy::Everything).await;
        let monitor = bus.monitor().await;
        running(w).await;
        bus.has_csid().await;
        let caller = Caller(bus.connect(ROOT).await);

        count("calls that failed with a code", every_code(w, &caller).await);
        count("calls cut off by a deadline or a death", every_end(w, &bus, &caller).await);
        count("descriptors and credentials refused", every_bad_document(w, &caller).await);
        // SecretRequired: after a reboot the one by credential comes back, and the other waits.
        caller.mounted().await;
        w.reboot().await;
        let client = w.start().await;
        bus.has_csid().await;
        eventually("it waits for its secret", async || {
            state(&client, &volume(Descriptor), "job").await == "waiting"
        })
        .await;
        eventually("it is back", async || state(&client, &volume(Credential), "job").await == "mounted")
            .await;
        let without = MountOptions { secrets: None, ..options(Descriptor) };
        assert!(!caller.mount(Descriptor, without).await, "SecretRequired");
        caller.mounted().await;

        let given = w
            .plugin("p")
            .volume_calls()
            .iter()
            .filter(|c| c.call.secrets.iter().any(|(_, s)| s == SECRET))
            .count();
        count("RPCs that were given the secret", given);
        assert!(given > 150, "{given}");

        let mut haystack = Haystack::default();
        haystack.add(
            "ListMounts",
            format!("{:?}", client.list_mounts(Default::default()).await.unwrap()).as_bytes(),
        );
        haystack.add("GetEvents", format!("{:?}", events(&client, 0).await).as_bytes());
        for path in [MANAGER_PATH, "/org/csid1/plugin/p"] {
            haystack.add("introspection", raw::introspect(&caller.0, path).await.unwrap().as_bytes());
        }
        let (manager, plugin) = (client.manager().await.unwrap(), client.plugin("p").await.unwrap());
        haystack.add("properties", format!("{manager:?} {plugin:?}").as_bytes());
        // What is in memory only now may be written at the end.
        haystack.add_written("", w);
        w.stop().await;
        haystack.add_written("", w);
        let [calls, answers] = monitor.seen();
        haystack.add("calls on the bus", &calls);
        haystack.add("answers and signals on the bus", &answers);
        count("places searched", haystack.places());
        count("bytes searched", haystack.bytes());

        let none = std::collections::BTreeSet::new();
        let journal = ["csid.db", "csid.db-wal"];
        let kept = ["log", "ListMounts", "GetEvents", "calls on the bus", "answers and signals on the bus"];
        let found = haystack.hits(MARKER);
        assert!(
            kept.iter().chain(&journal).all(|place| found.contains(place)),
            "what is no secret is found: {found:?}"
        );
        assert!(!haystack.hits("org.csid1.Manager").is_disjoint(&["introspection"].into()), "and so here");
        assert!(!haystack.hits(&manager.journal_id).is_disjoint(&["properties"].into()), "and here");
        assert_eq!(haystack.hits(SECRET), none, "the secret is found");
        for answer in [CONTEXT, FLAG] {
            // The call itself carries them, and the journal keeps them: a restore needs them.
            let others = haystack
                .hits(answer)
                .into_iter()
                .filter(|place| *place != "calls on the bus" && !journal.contains(place));
            assert_eq!(others.collect::<std::collections::BTreeSet<_>>(), none, "{answer} is found");
        }
        count("hits of the secret, its base64 and its hex", haystack.hits(SECRET).len());
    });
}
