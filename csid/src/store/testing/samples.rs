//! Records and swaps of the tests.

use std::collections::BTreeMap;

use serde_json::json;

use crate::store::change::Durability;
use crate::store::event_kind::EventKind;
use crate::store::registry::*;
use crate::store::rows::{AccessMode, AttachmentMode, EventDetails, Leg, NewEvent, VolumeKey};

pub fn name(volume: &str) -> VolumeName {
    VolumeName { namespace: "default".into(), volume: volume.into() }
}

pub fn claim(consumer: &str, node: &str) -> Claim {
    let capability = Capability {
        access_mode: AccessMode::MultiNodeMultiWriter,
        attachment_mode: AttachmentMode::BlockDevice,
    };
    Claim {
        consumer: consumer.into(),
        node: node.into(),
        uid: 1000,
        usage: Use { mode: ClaimMode::Write, capability },
        state: ClaimState::Taken,
        releasing: false,
        blocked: None,
        by_mount: true,
        kept: true,
        bound: Some(Bound { to: BoundTo::Unit("db ä.service".into()), grace_usec: 5, ended: false }),
        credential: Some("csid.claim".into()),
        secrets_given: true,
        error: Some("\"quoted\"".into()),
        since_usec: 1_700_000_000_000_000,
        released_usec: 0,
        id: String::new(),
        call: String::new(),
        keeper: String::new(),
        adopted: false,
        grant: None,
        modify_index: 0,
    }
}

/// A registered volume with a claim of each of these consumers, nothing left to do.
pub fn record(volume: &str, consumers: &[&str]) -> Record {
    let spec = VolumeSpec {
        name: "a name".into(),
        fs_type: "ext4".into(),
        context: BTreeMap::from([("share".into(), "ä".into())]),
        credential: Some("csid.vol".into()),
        heal: Heal::Remount,
        ..VolumeSpec::default()
    };
    let registration = Registration {
        uid: 7,
        owner: String::new(),
        id: String::new(),
        spec,
        standing: Standing::Registered,
        origin: Origin::File,
        capacity: None,
        pending_expansion: Some(Expansion { required: 1 << 40, limit: 0, by_controller: true }),
        owed_expansion: None,
        expanded_here: None,
        snapshot: None,
        blocked: None,
        error: None,
    };
    let mut attachment = Attachment::new("n1", Leg::Present);
    attachment.publish_context.insert("device".into(), "/dev/x".into());
    attachment.secrets = Some(AttachSecrets { credential: Some("csid.claim".into()), given: true });
    Record {
        volume: VolumeKey::new("local", format!("ext-{volume}")),
        registration: Some(registration),
        claims: consumers.iter().map(|consumer| claim(consumer, "n1")).collect(),
        attachments: vec![attachment],
        ..Record::none(name(volume))
    }
}

pub fn swap(before: &Record, after: Record) -> Swap {
    Swap { before: before.clone(), after, past: Vec::new(), durability: Durability::Disk }
}

/// Makes a swap together with an event of its volume.
pub async fn swap_in(registry: &impl Registry, swap: Swap) -> Result<u64, RegistryError> {
    let event = event_of(&swap);
    registry.swap(swap, vec![event]).await
}

/// Returns an event of the volume that a swap changes.
pub fn event_of(swap: &Swap) -> NewEvent {
    let details = EventDetails::from([("success", json!(true))]);
    NewEvent { kind: EventKind::VolumeChanged, subject: swap.after.name.volume.clone(), details }
}

/// One of a volume that was not there.
pub fn new(after: Record) -> Swap {
    swap(&Record::none(after.name.clone()), after)
}

/// What the fixtures of the versions that have a registry hold in addition.
pub fn representative_swaps() -> Vec<Swap> {
    let mut creating = record("new", &[]);
    creating.volume = VolumeKey::creating("local", "a name");
    let creation = Creation {
        capacity_min: 1,
        capacity_max: 2,
        register: true,
        secrets_given: true,
        source: Some("of-another".into()),
        sourceless: false,
        ..Creation::default()
    };
    creating.registration.as_mut().unwrap().standing = Standing::Creating(creation);
    let mut attached = record("attached", &[]);
    attached.registration = None;
    let with_past = Swap { past: vec![claim("job/0", "n1")], ..new(record("data", &["job/1", "job/2"])) };
    vec![with_past, new(creating), new(attached)]
}

/// The records of [`representative_swaps`], but for their indexes, are there.
pub async fn assert_representative_swaps(registry: &impl Registry) {
    let (found, _) = registry.records(RecordFilter::default()).await.unwrap();
    let mut due: Vec<_> = representative_swaps().into_iter().map(|swap| swap.after).collect();
    due.sort_by(|a, b| a.name.cmp(&b.name));
    assert!(found.into_iter().map(bare).eq(due));
    let (past, _) = registry.claims(ClaimFilter { past: true, ..ClaimFilter::default() }).await.unwrap();
    assert_eq!(
        past.iter().map(|found| (&*found.name.volume, &*found.claim.consumer)).collect::<Vec<_>>(),
        [("data", "job/0")]
    );
}

/// Without what the store sets.
pub fn bare(mut record: Record) -> Record {
    record.revision = 0;
    record.claims = record.claims.iter().map(|claim| Claim { modify_index: 0, ..claim.clone() }).collect();
    record
}
