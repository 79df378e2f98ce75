//! Members of org.csid1.Manager about claims.

use std::collections::HashMap;

use zbus::OwnedVariant;

use super::authorise::PolkitAction;
use super::call::{Answer, Call, within};
use super::contract::Map;
use super::options::{Keys, Options};
use super::rows::Rows;
use super::{arguments, cursor, volume_rows};
use crate::error::{Error, Result};
use crate::names::{self, word};
use crate::store::registry::{ClaimFilter, ClaimPlace, ClaimState, ListedClaim, OfVolume, VolumeName};
use crate::volume::api::requests::{ClaimRequest, ReleaseRequest};
use crate::volume::{Authority, ForgetRequest};

const CLAIM: Keys = &[
    ("mode", "s"),
    ("access-mode", "s"),
    ("attachment-mode", "s"),
    ("node", "s"),
    ("wait-usec", "t"),
    ("bind", "s"),
    ("grace-usec", "t"),
];

type Identified = (String, String, String, HashMap<String, OwnedVariant>);

pub(super) async fn claim(call: Call) -> Answer {
    let (namespace, volume, consumer, map): Identified = call.arguments()?;
    let name = arguments::volume_name(namespace, volume)?;
    names::name("consumer", &consumer)?;
    let mut options = Options::check(map, CLAIM)?;
    let wait = call.wait(&mut options)?;
    let wait_until = arguments::wait_until(&mut options, call.arrived);
    let (mode, access_mode) = (options.word("mode")?, options.word("access-mode")?);
    let attachment_mode = options.word("attachment-mode")?;
    let node = options.checked("node", names::name)?;
    let bound = arguments::bound(&mut options, &call.permit)?;
    let credential = arguments::credential(&mut options, &call.permit, &name.namespace)?;
    let secrets = arguments::secrets(&mut options, &credential).await?;
    let request = ClaimRequest {
        name,
        consumer,
        uid: call.permit.uid(),
        mode,
        access_mode,
        attachment_mode,
        node,
        wait_until,
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
    let (namespace, volume, consumer, map): Identified = call.arguments()?;
    let name = arguments::volume_name(namespace, volume)?;
    names::name("consumer", &consumer)?;
    let mut options = Options::check(map, &[("force", "b"), ("node", "s"), ("forget", "b")])?;
    let wait = call.wait(&mut options)?;
    let forget = options.flag("forget");
    arguments::require_root(&call.permit, [(forget, "forget")])?;
    let force = options.flag("force");
    let node = options.checked("node", names::name)?;
    let credential = arguments::credential(&mut options, &call.permit, &name.namespace)?;
    let volumes = &call.server.rooms.volumes;
    if forget {
        call.server.authoriser.also(&call.permit, PolkitAction::UnmountOthers).await?;
        let key = name.key(&consumer);
        let request = ForgetRequest { key, node, all_tags: true, claim: true, must_exist: false, wait };
        volumes.forget(request).await?;
        return call.reply(&());
    }
    let uid = call.permit.uid();
    let is_root = call.permit.caller().is_root();
    let owner = if force || is_root { None } else { volumes.claim_owner(&name, &consumer).await? };
    let more = force || is_root || owner.is_some_and(|owner| owner != uid);
    let authority = match more {
        true => {
            call.server.authoriser.also_of(&call.permit, PolkitAction::UnmountOthers, owner).await?;
            Authority::Any(uid)
        }
        // The change of the record compares again, because the claim may have another owner by then.
        false => Authority::Own(uid),
    };
    let secrets = arguments::secrets(&mut options, &credential).await?;
    let request =
        ReleaseRequest { name, consumer, authority, force, node, secrets, credential, id: None, wait };
    volumes.release(request).await?;
    call.reply(&())
}

pub(super) async fn list_claims(call: Call) -> Answer {
    const FILTER: Keys =
        &[("namespace", "s"), ("volume", "s"), ("consumer", "s"), ("node", "s"), ("past", "b")];
    let mut options = Options::check_all(call.arguments()?, &[FILTER, cursor::PAGE])?;
    let wait = options.wait(call.arrived)?;
    let past = options.flag("past");
    let after = cursor::after(&mut options)?.map(|key| place(key, past)).transpose()?;
    let filter = ClaimFilter {
        namespace: options.text("namespace").map(names::namespace).transpose()?,
        volume: options.checked("volume", names::name)?,
        consumer: options.checked("consumer", names::name)?,
        node: options.checked("node", names::name)?,
        past,
        between: None,
        after,
        most: cursor::most(&mut options),
    };
    let volumes = call.server.rooms.volumes.clone();
    let claims =
        within(&call.slot, wait.deadline, "the list", async move { volumes.claims(filter).await }).await?;
    call.reply(&(Rows::of(claims.into_iter().map(|listed| row(listed, past))),))
}

fn place([namespace, volume, last]: [String; 3], past: bool) -> Result<ClaimPlace> {
    let of_volume = match past {
        true => OfVolume::Number(
            last.parse().map_err(|_| Error::invalid("after is not a cursor of a past claim"))?,
        ),
        false => OfVolume::Consumer(last),
    };
    Ok(ClaimPlace { name: VolumeName { namespace, volume }, of_volume })
}

/// Returns a row of ListClaims. A past claim is free. The `error` of a parked claim says what blocks it.
fn row(ListedClaim { name, claim, of_volume }: ListedClaim, past: bool) -> Map {
    let cursor = match &of_volume {
        OfVolume::Consumer(consumer) => cursor::of(&[&name.namespace, &name.volume, consumer]),
        OfVolume::Number(number) => cursor::of(&[&name.namespace, &name.volume, &number.to_string()]),
    };
    let state = match (past, &claim.blocked) {
        (true, _) => "free",
        (false, Some(_)) => "parked",
        (false, None) => state_word(claim.state),
    };
    let error = claim.blocked.map(|blocked| blocked.reason).or(claim.error).unwrap_or_default();
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
        ("cursor", cursor.into()),
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
    use crate::store::registry::{Blocked, Bound, BoundTo, Claim, ClaimMode, Use};

    pub fn claim() -> Claim {
        Claim {
            consumer: "job".into(),
            node: "host".into(),
            uid: 7,
            usage: Use { mode: ClaimMode::Write, capability: names::capability(None, None) },
            state: ClaimState::NodeDetached,
            releasing: true,
            blocked: None,
            by_mount: false,
            kept: true,
            bound: None,
            credential: None,
            secrets_given: true,
            error: Some("failed once".into()),
            since_usec: 1,
            released_usec: 0,
            id: String::new(),
            call: String::new(),
            keeper: String::new(),
            adopted: false,
            grant: None,
            modify_index: 2,
        }
    }

    fn listed(claim: Claim) -> ListedClaim {
        let name = VolumeName { namespace: "ns".into(), volume: "v".into() };
        ListedClaim { name, of_volume: OfVolume::Consumer(claim.consumer.clone()), claim }
    }

    #[test]
    fn claim_state_is_a_word_of_the_contract() {
        let words_of = |claim: Claim, past| {
            let row = row(listed(claim), past);
            let text = |key: &str| <&str>::try_from(&row[key]).unwrap().to_owned();
            (text("state"), text("error"))
        };
        let words = |state: &str, error: &str| (state.to_owned(), error.to_owned());
        assert_eq!(words_of(claim(), false), words("node-detached", "failed once"));
        let parked = Claim { blocked: Some(Blocked { reason: "needs secrets".into() }), ..claim() };
        assert_eq!(words_of(parked.clone(), false), words("parked", "needs secrets"));
        assert_eq!(words_of(parked, true).0, "free");
        for (state, word) in [
            (ClaimState::Pending, "pending"),
            (ClaimState::Taken, "taken"),
            (ClaimState::ControllerDetached, "controller-detached"),
        ] {
            assert_eq!(words_of(Claim { state, ..claim() }, false).0, word);
        }
    }

    #[test]
    fn bind_is_reported_as_it_was_requested() {
        let bound = |to| Some(Bound::new(to, 0));
        for (bound, word) in [
            (None, ""),
            (bound(BoundTo::Unit("db.service".into())), "unit:db.service"),
            (bound(BoundTo::Caller(":1.7".into())), "caller"),
        ] {
            let row = row(listed(Claim { bound, ..claim() }), false);
            assert_eq!(row["bind"], Variant::from(word));
        }
    }
}
