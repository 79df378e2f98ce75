//! The items of a registered volume: the registration, a consumer's claim with its mount, an attachment. Each has its calls, and the
//! states that are possible after them.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use csi_witness::GRPC_CODES;
use csid_client::{
    AttachOptions, AttachmentMode, Capability, ClaimMode, ClaimOptions, Client, CreateVolume, DetachOptions,
    Error, ExpandOptions, Kind, MountOptions, RegisterVolume, ReleaseOptions, SnapshotOptions, Target,
    UnmountOptions, Via, VolumeOptions,
};
use csid_tests::ask::NAMESPACE;
use csid_tests::clustered;

use super::{BYTES, Volume};
use crate::model::{Entry, Told};
use crate::slots::POLL;

#[derive(Clone)]
pub struct Item {
    /// The volume's place in the pool.
    pub volume: usize,
    pub thing: Thing,
    /// The states that the item may have.
    pub allowed: BTreeSet<State>,
    /// The last that one client asked of it.
    pub asked: Option<Ask>,
    /// The mounts that it may not lose: their paths and the kernel's numbers.
    pub holds: Vec<(PathBuf, u64)>,
    /// The clients' calls and their answers since the last check.
    pub history: Vec<Entry<(Ask, Told)>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Thing {
    Registration,
    Use {
        consumer: &'static str,
        mode: ClaimMode,
    },
    /// By AttachVolume.
    Attachment {
        node: &'static str,
    },
}

/// An item when nothing is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum State {
    Absent,
    /// Registered, claimed, attached: until it is asked away.
    Kept,
    /// With the claim that its Mount took.
    Mounted,
    KeptMounted,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ask {
    Register,
    Create,
    Expand,
    Snapshot,
    Delete,
    Claim,
    Mount,
    /// By a connection that ends then, and the mount with it.
    Bound,
    Unmount,
    Release,
    Attach,
    Detach,
}

impl Ask {
    /// Returns whether the call ends the item.
    fn ends(self) -> bool {
        matches!(self, Ask::Unmount | Ask::Release | Ask::Detach | Ask::Delete)
    }
}

/// How a caller asks.
#[derive(Clone, Default)]
pub struct Manner {
    pub deadline: Option<Duration>,
    /// The call is cancelled under this name after a while.
    pub cancel: Option<(String, Duration)>,
    /// For claims that are in the way.
    pub wait: Option<Duration>,
    /// The number of the snapshot, and of an expansion the size in bytes.
    pub number: u64,
}

/// A caller's answer, and what it got.
pub type Answer = (Told, Got);

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Got {
    Nothing,
    Bytes(u64),
    /// The id of the snapshot.
    Snapshot(String),
}

/// Returns the states that are possible when `ask` has ended and no call is under way.
pub fn after(before: State, ask: Ask, answer: &Told) -> BTreeSet<State> {
    use State::*;
    let done = match (ask, before) {
        (Ask::Register | Ask::Create | Ask::Claim | Ask::Attach, Absent) | (Ask::Unmount, KeptMounted) => {
            Kept
        }
        (Ask::Mount, Absent) => Mounted,
        (Ask::Claim, Mounted) | (Ask::Mount, Kept) => KeptMounted,
        (Ask::Unmount, Mounted) | (Ask::Bound, _) | (Ask::Release | Ask::Detach | Ask::Delete, _) => Absent,
        _ => before,
    };
    let states: &[State] = match answer {
        Told::Done => &[done],
        Told::CutOff | Told::Refused(Kind::ShuttingDown, _) => &[before, done],
        Told::Refused(Kind::Busy | Kind::ClaimConflict, _) => &[before],
        // Such a call continues without its caller once it has begun.
        Told::Refused(..) if ask.ends() || ask == Ask::Create => &[before, done],
        // The claim is the mount's too, and is not undone.
        Told::Refused(Kind::TimedOut | Kind::Cancelled, _) if before == Mounted => &[before, done],
        // A failed call is rolled back. An earlier answered one is not.
        Told::Refused(..) => &[before],
    };
    states.iter().copied().collect()
}

impl Item {
    pub fn new(volume: usize, thing: Thing) -> Self {
        Item {
            volume,
            thing,
            allowed: [State::Absent].into(),
            asked: None,
            holds: Vec::new(),
            history: Vec::new(),
        }
    }

    /// The one state it is in, at rest.
    pub fn state(&self) -> State {
        assert_eq!(self.allowed.len(), 1, "{:?} of volume {} was not looked at", self.thing, self.volume);
        *self.allowed.first().expect("a state")
    }

    /// Returns the calls of the item while its volume is registered, or created.
    pub fn asks(&self, birth: Ask) -> &'static [Ask] {
        match self.thing {
            Thing::Registration if birth == Ask::Create => &[Ask::Create, Ask::Expand, Ask::Snapshot],
            Thing::Registration => &[Ask::Register, Ask::Expand, Ask::Snapshot],
            Thing::Use { .. } => &[Ask::Claim, Ask::Mount, Ask::Unmount, Ask::Release],
            Thing::Attachment { .. } => &[Ask::Attach, Ask::Detach],
        }
    }

    /// Returns the call that removes the item in any state.
    pub fn away(&self) -> Ask {
        match self.thing {
            Thing::Registration => Ask::Delete,
            Thing::Use { .. } => Ask::Release,
            Thing::Attachment { .. } => Ask::Detach,
        }
    }
}

/// Ask for it in this volume.
pub async fn ask(client: &Client, volume: &Volume, thing: Thing, ask: Ask, manner: Manner) -> Answer {
    let Volume { name: volume, access_mode, .. } = volume;
    let capability = Capability { access_mode: *access_mode, attachment_mode: AttachmentMode::FileSystem };
    let Manner { deadline, cancel, .. } = &manner;
    let deadline_usec = deadline.map(usec);
    let operation_id = cancel.as_ref().map(|(id, _)| id.clone());
    let cancel = async {
        if let Some((id, pause)) = cancel {
            tokio::time::sleep(*pause).await;
            // The operation may have ended.
            let _ = client.cancel_operation(id).await;
        }
    };
    let (ns, no) = (NAMESPACE, Got::Nothing);
    let call = async {
        if let (Ask::Bound, Thing::Use { consumer, .. }) = (ask, thing) {
            return bound(client, volume, consumer).await.map(|()| no);
        }
        match (ask, thing) {
            (Ask::Create, _) => {
                let spec = CreateVolume {
                    plugin: Some("p".to_owned()),
                    name: (!clustered::is_used()).then(|| volume.to_owned()),
                    capabilities: Some(vec![capability]),
                    capacity_min: Some(BYTES),
                    deadline_usec,
                    operation_id,
                    ..Default::default()
                };
                client.create_volume(ns, volume, spec).await.map(|_| no)
            }
            (Ask::Register, _) => {
                let spec = RegisterVolume {
                    plugin: Some("p".to_owned()),
                    external_id: Some(volume.to_owned()),
                    capabilities: Some(vec![capability]),
                    deadline_usec,
                    operation_id,
                    ..Default::default()
                };
                client.register_volume(ns, volume, spec).await.map(|_| no)
            }
            (Ask::Expand, _) => {
                let options = ExpandOptions { deadline_usec, operation_id, ..Default::default() };
                let expanded = client.expand_volume(ns, volume, manner.number, 0, options).await?;
                Ok(Got::Bytes(expanded.capacity_bytes))
            }
            (Ask::Snapshot, _) => {
                let options = SnapshotOptions { deadline_usec, operation_id, ..Default::default() };
                let name = format!("{volume}-{}", manner.number);
                client.create_snapshot(ns, volume, &name, options).await.map(|row| Got::Snapshot(row.id))
            }
            (Ask::Delete, _) => {
                let options = VolumeOptions { deadline_usec, operation_id, ..Default::default() };
                client.delete_volume(ns, volume, options).await.map(|()| no)
            }
            (Ask::Claim, Thing::Use { consumer, mode }) => {
                let wait_usec = manner.wait.map(usec);
                let mode = Some(mode);
                let options =
                    ClaimOptions { mode, wait_usec, deadline_usec, operation_id, ..Default::default() };
                client.claim(ns, volume, consumer, options).await.map(|_| no)
            }
            (Ask::Mount, Thing::Use { consumer, mode }) => {
                let read_only = Some(mode == ClaimMode::Read);
                let options = MountOptions { read_only, deadline_usec, operation_id, ..Default::default() };
                client.mount(ns, volume, consumer, options).await.map(|_| no)
            }
            (Ask::Unmount, Thing::Use { consumer, .. }) => {
                let options = UnmountOptions { deadline_usec, operation_id, ..Default::default() };
                client.unmount(ns, volume, consumer, options).await.map(|()| no)
            }
            (Ask::Release, Thing::Use { consumer, .. }) => {
                let options = ReleaseOptions { deadline_usec, operation_id, ..Default::default() };
                client.release(ns, volume, consumer, options).await.map(|()| no)
            }
            (Ask::Attach, Thing::Attachment { node }) => {
                // One of the two attachments is for reading only (CSI rule 32).
                let read_only = Some(node == "node-2");
                let options = AttachOptions { read_only, deadline_usec, operation_id, ..Default::default() };
                client.attach_volume(ns, volume, node, options).await.map(|_| no)
            }
            (Ask::Detach, Thing::Attachment { node }) => {
                let options = DetachOptions { deadline_usec, operation_id, ..Default::default() };
                client.detach_volume(ns, volume, node, options).await.map(|()| no)
            }
            (ask, thing) => panic!("{ask:?} of {thing:?}"),
        }
    };
    match tokio::join!(call, cancel).0 {
        Ok(got) => (Told::Done, got),
        Err(Error::Csid(error)) => {
            let is_wrong = [Kind::Internal, Kind::InvalidArgument].contains(&error.kind);
            assert!(!is_wrong, "{ask:?} {volume} {thing:?}: {error}");
            let code = error.details.grpc_code.map(|code| GRPC_CODES[code as usize]);
            (Told::Refused(error.kind, code), Got::Nothing)
        }
        Err(Error::Disconnected(_)) => (Told::CutOff, Got::Nothing),
        Err(other) => panic!("{ask:?} {volume} {thing:?}: {other}"),
    }
}

/// Mount for a connection, which ends, and wait until that has ended the claim.
async fn bound(client: &Client, volume: &str, consumer: &str) -> csid_client::Result<()> {
    let Via::Socket(socket) = client.via() else { panic!("the private socket is asked") };
    let other = match Client::connect(&Target::Socket(socket.clone())).await {
        Ok(other) => other,
        // csid is dead.
        Err(_) => client.clone(),
    };
    let options = MountOptions { bind: Some("caller".to_owned()), ..Default::default() };
    other.mount(NAMESPACE, volume, consumer, options).await?;
    drop(other);
    let is_its = |row: &csid_client::ClaimRow| row.volume == volume && row.consumer == consumer;
    while client.list_claims(Default::default()).await?.iter().any(is_its) {
        tokio::time::sleep(POLL).await;
    }
    Ok(())
}

fn usec(duration: Duration) -> u64 {
    duration.as_micros() as u64
}

#[test]
fn answer_holds_until_it_is_asked_away() {
    use State::*;
    let done = |state, ask| after(state, ask, &Told::Done).into_iter().collect::<Vec<_>>();
    assert_eq!(done(Absent, Ask::Mount), [Mounted]);
    assert_eq!(done(Mounted, Ask::Unmount), [Absent], "the Mount's claim goes with it");
    assert_eq!(done(Mounted, Ask::Claim), [KeptMounted], "the consumer's own claim stays");
    assert_eq!(done(KeptMounted, Ask::Unmount), [Kept]);
    assert_eq!(done(KeptMounted, Ask::Release), [Absent]);
    let refused = Told::Refused(Kind::PluginError, Some("UNAVAILABLE"));
    assert_eq!(after(Kept, Ask::Attach, &refused), [Kept].into());
    assert_eq!(after(Kept, Ask::Detach, &refused), [Absent, Kept].into());
}
