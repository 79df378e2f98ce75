//! A mount that a client asks for: one consumer's of one volume.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use csi_witness::GRPC_CODES;
use csid_client::{Client, Error, MountOptions, Restore, UnmountOptions};
use csid_tests::ask::*;
use csid_tests::kernel;
use csid_tests::world::World;
use rustix::mount::{UnmountFlags, unmount as unmount_now};

use crate::model::{Ask, Entry, Restores, State, Told, What};
use crate::plan::{Kind, MANY};

pub const CANARY: &str = "c4n4ry-0f-th3-m4tr1x";
const CREDENTIAL: &str = "csid.matrix";
/// The number of volumes of each kind.
const VOLUMES: usize = MANY + 8;

pub struct Slot {
    pub kind: Kind,
    pub volume: String,
    pub consumer: &'static str,
    pub target: Option<PathBuf>,
    pub restores: Restores,
    credential: bool,
    /// The name of what the plugin mounts: its directory of the volume's data, or the device.
    shows: OsString,
    /// The states that the mount may have.
    pub allowed: BTreeSet<State>,
    /// The calls since the last look at it, where calls may overlap.
    pub history: Vec<Entry<What>>,
    /// The mounts that it may not lose: their paths and the kernel's numbers.
    pub holds: Vec<(PathBuf, u64)>,
}

/// How a caller waits.
#[derive(Default)]
pub struct Manner {
    pub deadline: Option<Duration>,
    /// The call is cancelled under this name after a while.
    pub cancel: Option<(String, Duration)>,
}

/// A caller's answer, and the mount's path.
pub type Answer = (Told, Option<PathBuf>);

impl Slot {
    /// The volumes of a kind: restored by themselves and not, with secrets and a credential and without, with a
    /// target and without, and a few with a second consumer.
    pub fn all(w: &mut World, kinds: &[Kind]) -> Vec<Slot> {
        std::fs::write(w.path("credentials").join(CREDENTIAL), format!(r#"{{"password":"{CANARY}"}}"#))
            .expect("a credential");
        let mut slots = Vec::new();
        for kind in kinds {
            for number in 0..VOLUMES {
                let volume = format!("{kind:?}-{number}");
                let shows = match kind {
                    Kind::Block => {
                        w.add_device("p", &volume).writable.file_name().expect("a device").to_owned()
                    }
                    _ => volume.bytes().map(|byte| format!("{byte:02x}")).collect::<String>().into(),
                };
                let consumers: &[_] =
                    if *kind == Kind::FileSystem && number % 6 == 0 { &["one", "two"] } else { &["one"] };
                for consumer in consumers {
                    let restores = match number {
                        n if n < MANY => Restores::Alone,
                        n if n % 2 == 0 => Restores::OnRequest,
                        _ => Restores::WithSecrets,
                    };
                    slots.push(Slot {
                        kind: *kind,
                        volume: volume.clone(),
                        consumer,
                        target: (number % 2 == 0).then(|| target(w, *kind, &format!("{volume}-{consumer}"))),
                        restores,
                        credential: restores == Restores::Alone && number % 3 == 0,
                        shows: shows.clone(),
                        allowed: [State::Absent].into(),
                        history: Vec::new(),
                        holds: Vec::new(),
                    });
                }
            }
        }
        slots
    }

    /// Somebody else who wants this volume.
    pub fn rival(&self) -> Slot {
        let (volume, shows) = (self.volume.clone(), self.shows.clone());
        let Slot { kind, restores, credential, .. } = *self;
        Slot {
            kind,
            volume,
            consumer: "rival",
            target: None,
            restores,
            credential,
            shows,
            allowed: [State::Absent].into(),
            history: Vec::new(),
            holds: Vec::new(),
        }
    }

    /// Only one may have the volume.
    pub fn is_exclusive(&self) -> bool {
        self.kind != Kind::FileSystem
    }

    /// The one state it is in, at rest.
    pub fn state(&self) -> State {
        assert_eq!(self.allowed.len(), 1, "{} {} was not looked at", self.volume, self.consumer);
        *self.allowed.first().expect("a state")
    }

    pub fn must(&self, state: State) -> bool {
        self.allowed.iter().eq([&state])
    }

    fn options(&self) -> MountOptions {
        let base = match self.kind {
            Kind::FileSystem => shared(&self.volume),
            Kind::Block => block(&self.volume),
            Kind::Unstaged => of_plugin("q", &self.volume),
        };
        MountOptions {
            target: self.target.as_ref().map(|path| path.to_str().expect("UTF-8").to_owned()),
            restore: Some(match self.restores {
                Restores::OnRequest => Restore::Hold,
                Restores::Alone | Restores::WithSecrets => Restore::Auto,
            }),
            secrets: (self.restores == Restores::WithSecrets).then(|| secrets(&[("password", CANARY)])),
            credential: self.credential.then(|| CREDENTIAL.to_owned()),
            ..base
        }
    }

    pub fn ask(&self, client: &Client, ask: Ask, manner: Manner) -> impl Future<Output = Answer> + use<> {
        let (client, mut options) = (client.clone(), self.options());
        let (volume, consumer) = (self.volume.clone(), self.consumer);
        let Manner { deadline, cancel } = manner;
        let deadline_usec = deadline.map(|deadline| deadline.as_micros() as u64);
        let operation_id = cancel.as_ref().map(|(id, _)| id.clone());
        async move {
            let cancel = async {
                if let Some((id, pause)) = cancel {
                    tokio::time::sleep(pause).await;
                    // The operation may have ended.
                    let _ = client.cancel_operation(&id).await;
                }
            };
            let call = async {
                match ask {
                    Ask::Mount => {
                        options = MountOptions { deadline_usec, operation_id, ..options };
                        Ok(Some(mount(&client, consumer, options).await?.source.into()))
                    }
                    Ask::Unmount => {
                        let options = UnmountOptions { deadline_usec, operation_id, ..Default::default() };
                        client.unmount(NAMESPACE, &volume, consumer, options).await.map(|()| None)
                    }
                }
            };
            match tokio::join!(call, cancel).0 {
                Ok(source) => (Told::Done, source),
                Err(Error::Csid(error)) => {
                    assert_ne!(error.kind, csid_client::Kind::Internal, "{error}");
                    let code = error.details.grpc_code.map(|code| GRPC_CODES[code as usize]);
                    (Told::Refused(error.kind, code), None)
                }
                Err(Error::Disconnected(_)) => (Told::CutOff, None),
                Err(other) => panic!("{ask:?} {volume} {consumer}: {other}"),
            }
        }
    }

    /// Unmount it behind csid's back. Whether it was there.
    pub fn take_away(&self) -> bool {
        let taken = |(path, _): &&(PathBuf, u64)| unmount_now(path, UnmountFlags::DETACH).is_ok();
        // The target first, and in any case both.
        self.holds.iter().rev().filter(taken).count() > 0
    }

    /// Returns the places of the mount with the kernel's numbers. `None`: it is not at every place, or shows another volume.
    pub fn mounts(&self, table: &[kernel::Mount], source: &Path) -> Option<Vec<(PathBuf, u64)>> {
        let paths = std::iter::once(source).chain(self.target.as_deref());
        paths
            .map(|path| {
                let mut here = table.iter().filter(|mount| mount.point == path);
                here.next()
                    .filter(|mount| mount.root.file_name() == Some(&self.shows) && here.next().is_none())?;
                Some((path.to_owned(), kernel::mount_id(path).ok()?))
            })
            .collect()
    }
}

fn target(w: &World, kind: Kind, name: &str) -> PathBuf {
    let path = w.path("targets").join(name);
    let made = match kind {
        Kind::Block => std::fs::write(&path, ""),
        Kind::FileSystem | Kind::Unstaged => std::fs::create_dir(&path),
    };
    made.expect("a target");
    path
}
