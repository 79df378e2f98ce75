//! The members of org.csid1.Manager that concern claims.

use std::collections::HashMap;
use std::time::Duration;

use zbus::OwnedVariant;

use super::authorise::Action;
use super::dispatch::{Answer, Call, Map};
use super::given;
use super::manager::within;
use super::options::{Keys, Options};
use super::volume_rows;
use crate::names::{self, word};
use crate::store::registry::{Claim, ClaimFilter, ClaimState, VolumeName};
use crate::volume::Authority;
use crate::volume::requests::{ClaimRequest, ReleaseRequest};

const CLAIM: Keys = &[
    ("mode", "s"),
    ("access-mode", "s"),
    ("attachment-mode", "s"),
    ("node", "s"),
    ("wait-usec", "t"),
    ("bind", "s"),
    ("grace-usec", "t"),
];

/// Who waits longer for a claim waits for ever.
const LONGEST_WAIT: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

type Identified = (String, String, String, HashMap<String, OwnedVariant>);

pub(super) async fn claim(call: Call) -> Answer {
    let (namespace, volume, consumer, given): Identified = call.arguments()?;
    let name = given::volume_name(namespace, volume)?;
    names::name("consumer", &consumer)?;
    let mut options = Options::check(given, CLAIM)?;
    let wait = call.wait(&mut options)?;
    let wait_usec = options.number("wait-usec");
    let (mode, access_mode) = (options.word("mode")?, options.word("access-mode")?);
    let attachment_mode = options.word("attachment-mode")?;
    let node = options.checked("node", names::name)?;
    let bound = given::bound(&mut options, &call.permit)?;
    let credential = given::credential(&mut options, &call.permit, &name.namespace)?;
    let secrets = given::secrets(&mut options, &credential).await?;
    let request = ClaimRequest {
        name,
        consumer,
        uid: call.permit.uid(),
        mode,
        access_mode,
        attachment_mode,
        node,
        wait_until: wait_usec
            .and_then(|usec| call.arrived.checked_add(Duration::from_micros(usec).min(LONGEST_WAIT))),
        bound,
        secrets,
        credential,
        wait,
    };
    let claimed = call.server.rooms.volumes.claim(request).await?;
    let mut answer = volume_rows::row(claimed.volume);
    answer.extend([
        ("publish-context", claimed.publish_context.into()),
        ("external-node-id", claimed.external_node_id.into()),
        ("state", state_word(claimed.state).into()),
    ]);
    call.reply(&(answer,))
}

pub(super) async fn release(call: Call) -> Answer {
    let (namespace, volume, consumer, given): Identified = call.arguments()?;
    let name = given::volume_name(namespace, volume)?;
    names::name("consumer", &consumer)?;
    let mut options = Options::check(given, &[("force", "b"), ("node", "s")])?;
    let wait = call.wait(&mut options)?;
    let force = options.flag("force");
    let node = options.checked("node", names::name)?;
    let credential = given::credential(&mut options, &call.permit, &name.namespace)?;
    let volumes = &call.server.rooms.volumes;
    let uid = call.permit.uid();
    let is_root = call.permit.caller().is_root();
    let more =
        force || is_root || volumes.claim_owner(&name, &consumer).await?.is_some_and(|owner| owner != uid);
    let authority = match more {
        true => {
            call.server.authoriser.also(&call.permit, Action::UnmountOthers).await?;
            Authority::Any(uid)
        }
        // The record's change compares again: the claim may have changed hands since.
        false => Authority::Own(uid),
    };
    let secrets = given::secrets(&mut options, &credential).await?;
    let request = ReleaseRequest { name, consumer, authority, force, node, secrets, credential, wait };
    volumes.release(request).await?;
    call.reply(&())
}

pub(super) async fn list_claims(call: Call) -> Answer {
    const FILTER: Keys =
        &[("namespace", "s"), ("volume", "s"), ("consumer", "s"), ("node", "s"), ("past", "b")];
    let mut options = Options::check(call.arguments()?, FILTER)?;
    let wait = options.wait(call.arrived)?;
    let past = options.flag("past");
    let filter = ClaimFilter {
        namespace: options.checked("namespace", names::name)?,
        volume: options.checked("volume", names::name)?,
        consumer: options.checked("consumer", names::name)?,
        node: options.checked("node", names::name)?,
        past,
    };
    let volumes = call.server.rooms.volumes.clone();
    let claims =
        within(&call.slot, wait.deadline, "the list", async move { volumes.claims(filter).await }).await?;
    let rows: Vec<Map> = claims.into_iter().map(|(name, claim)| row(name, claim, past)).collect();
    call.reply(&(rows,))
}

/// A row of ListClaims. A claim that is past is free; one that is parked says why in `error`.
fn row(name: VolumeName, claim: Claim, past: bool) -> Map {
    let state = match (past, claim.parked.is_empty()) {
        (true, _) => "free",
        (false, false) => "parked",
        (false, true) => state_word(claim.state),
    };
    let error = if claim.parked.is_empty() { claim.error } else { claim.parked };
    let capability = claim.usage.capability;
    Map::from([
        ("namespace", name.namespace.into()),
        ("volume", name.volume.into()),
        ("consumer", claim.consumer.into()),
        ("node", claim.node.into()),
        ("uid", claim.uid.into()),
        ("mode", word(claim.usage.mode).into()),
        ("access-mode", word(capability.access_mode).into()),
        ("attachment-mode", word(capability.attachment_mode).into()),
        ("state", state.into()),
        ("releasing", claim.releasing.into()),
        ("by-mount", claim.by_mount.into()),
        ("bind", claim.bound.map(|bound| bound.to.to_string()).unwrap_or_default().into()),
        ("error", error.into()),
        ("since", claim.since_usec.into()),
        ("modify-index", claim.modify_index.into()),
    ])
}

fn state_word(state: ClaimState) -> &'static str {
    match state {
        ClaimState::Pending => "pending",
        ClaimState::Taken => "taken",
        ClaimState::NodeDetached => "node-detached",
        ClaimState::ControllerDetached => "controller-detached",
    }
}

#[cfg(test)]
pub(super) mod tests {
    use zbus::Variant;

    use super::*;
    use crate::store::registry::{Bound, BoundTo, ClaimMode, Use};

    pub fn claim() -> Claim {
        Claim {
            consumer: "job".into(),
            node: "host".into(),
            uid: 7,
            usage: Use { mode: ClaimMode::Write, capability: names::capability(None, None) },
            state: ClaimState::NodeDetached,
            releasing: true,
            parked: String::new(),
            by_mount: false,
            kept: true,
            bound: None,
            credential: None,
            secrets_given: true,
            error: "failed once".into(),
            since_usec: 1,
            modify_index: 2,
        }
    }

    #[test]
    fn a_claims_state_is_one_of_the_contracts_words() {
        let told = |claim: Claim, past| {
            let row = row(VolumeName { namespace: "ns".into(), volume: "v".into() }, claim, past);
            let text = |key: &str| <&str>::try_from(&row[key]).unwrap().to_owned();
            (text("state"), text("error"))
        };
        let words = |state: &str, error: &str| (state.to_owned(), error.to_owned());
        assert_eq!(told(claim(), false), words("node-detached", "failed once"));
        let parked = Claim { parked: "needs secrets".into(), ..claim() };
        assert_eq!(told(parked.clone(), false), words("parked", "needs secrets"));
        assert_eq!(told(parked, true).0, "free");
        for (state, word) in [
            (ClaimState::Pending, "pending"),
            (ClaimState::Taken, "taken"),
            (ClaimState::ControllerDetached, "controller-detached"),
        ] {
            assert_eq!(told(Claim { state, ..claim() }, false).0, word);
        }
    }

    #[test]
    fn what_a_claim_is_bound_to_is_said_as_it_was_asked() {
        let bound = |to| Some(Bound::new(to, 0));
        for (bound, word) in [
            (None, ""),
            (bound(BoundTo::Unit("db.service".into())), "unit:db.service"),
            (bound(BoundTo::Caller(":1.7".into())), "caller"),
        ] {
            let name = VolumeName { namespace: "ns".into(), volume: "v".into() };
            let row = row(name, Claim { bound, ..claim() }, false);
            assert_eq!(row["bind"], Variant::from(word));
        }
    }
}
