//! Lists of records and claims, read from the cache.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;

use csid::store::registry::{
    Claim, ClaimFilter, ClaimPlace, ListedClaim, OfVolume, Record, RecordFilter, VolumeName,
};

use crate::cache::Volumes;
use crate::error::EtcdError;
use crate::keys::Keys;
use crate::stored::Stored;

/// Returns the records that match, ordered by name.
pub(crate) fn records(
    keys: &Keys,
    volumes: &Volumes,
    filter: &RecordFilter,
) -> Result<Vec<Record>, EtcdError> {
    let begin = match &filter.after {
        Some(after) => Bound::Excluded(after.clone()),
        None => Bound::Included(first(filter.namespace.as_deref())),
    };
    let mut found = Vec::new();
    for (name, stored) in volumes.by_name.range((begin, Bound::Unbounded)) {
        if is_past(name, filter.namespace.as_deref()) || is_full(found.len(), filter.most) {
            break;
        }
        if !is_named(name, &filter.namespace, &filter.volume)
            || filter.prefix.as_ref().is_some_and(|prefix| !name.volume.starts_with(prefix))
        {
            continue;
        }
        let record = readable(keys, stored)?;
        if matches(record, filter) {
            found.push(record.clone());
        }
    }
    Ok(found)
}

/// Returns the claims that match: present ones by volume and consumer; past ones by their end, and in parts by volume and number.
pub(crate) fn claims(
    keys: &Keys,
    volumes: &Volumes,
    filter: &ClaimFilter,
) -> Result<Vec<ListedClaim>, EtcdError> {
    let (first, last) = match &filter.between {
        Some([first, last]) => (first.clone(), Some(last)),
        None => (first(filter.namespace.as_deref()), None),
    };
    let in_parts = filter.after.is_some() || filter.most > 0;
    let begin = match &filter.after {
        Some(place) if place.name > first => place.name.clone(),
        _ => first,
    };
    let mut found = Vec::new();
    for (name, stored) in volumes.by_name.range(begin..) {
        if last.is_some_and(|last| name.as_ref() > last)
            || is_past(name, filter.namespace.as_deref())
            || is_full(found.len(), filter.most)
        {
            break;
        }
        if is_named(name, &filter.namespace, &filter.volume) {
            readable(keys, stored)?;
            let listed = claims_of(stored, filter.past).into_iter().filter(|listed| {
                is_of(&listed.claim, filter)
                    && filter.after.as_ref().is_none_or(|after| is_after(listed, after))
            });
            found.extend(listed);
        }
    }
    if filter.past && !in_parts {
        // Those of the same revision stay in the order of their volumes and numbers.
        found.sort_by_key(|listed| listed.claim.modify_index);
    }
    if filter.most > 0 {
        found.truncate(filter.most);
    }
    Ok(found)
}

/// Returns the records with work that is not done, but for those that cannot be read.
pub(crate) fn restless(volumes: &Volumes) -> Vec<Record> {
    let readable = volumes.restless.iter().filter(|name| !volumes.unreadable.contains(name.as_ref()));
    readable.filter_map(|name| volumes.by_name.get(name)).map(|stored| stored.record.clone()).collect()
}

/// Returns the records that match, of volumes that AttachVolume has attached. Those that cannot be read are left out.
pub(crate) fn attached_by_call(volumes: &Volumes, is_wanted: impl Fn(&Record) -> bool) -> Vec<Record> {
    let readable = volumes.by_call.difference(&volumes.unreadable);
    let records = readable.filter_map(|name| volumes.by_name.get(name)).map(|stored| &stored.record);
    records.filter(|record| is_wanted(record)).cloned().collect()
}

/// Returns the number of claims in each state. A blocked one is parked, whatever its state.
pub(crate) fn claim_states(keys: &Keys, volumes: &Volumes) -> Result<BTreeMap<String, u64>, EtcdError> {
    let mut states = BTreeMap::new();
    for stored in volumes.by_name.values() {
        for claim in &readable(keys, stored)?.claims {
            let state = match &claim.blocked {
                Some(_) => "parked".to_owned(),
                None => word(claim)?,
            };
            *states.entry(state).or_insert(0) += 1;
        }
    }
    Ok(states)
}

/// Returns an error if a volume cannot be read, which any list of all volumes would have to have.
pub(crate) fn all_readable(keys: &Keys, volumes: &Volumes) -> Result<(), EtcdError> {
    for name in &volumes.unreadable {
        if let Some(stored) = volumes.by_name.get(name) {
            readable(keys, stored)?;
        }
    }
    Ok(())
}

fn word(claim: &Claim) -> Result<String, EtcdError> {
    let word = serde_json::to_value(claim.state);
    let word = word.ok().and_then(|word| word.as_str().map(str::to_owned));
    word.ok_or_else(|| EtcdError::Unreadable {
        key: claim.consumer.clone(),
        why: "its state has no name".into(),
    })
}

fn claims_of(stored: &Stored, past: bool) -> Vec<ListedClaim> {
    let listed = |claim: &Claim, of_volume| ListedClaim {
        name: stored.record.name.clone(),
        claim: claim.clone(),
        of_volume,
    };
    match past {
        true => {
            stored.past().into_iter().map(|(number, claim)| listed(claim, OfVolume::Number(number))).collect()
        }
        false => {
            let claims = stored.record.claims.iter();
            claims.map(|claim| listed(claim, OfVolume::Consumer(claim.consumer.clone()))).collect()
        }
    }
}

fn is_of(claim: &Claim, filter: &ClaimFilter) -> bool {
    filter.consumer.as_ref().is_none_or(|consumer| claim.consumer == *consumer)
        && filter.node.as_ref().is_none_or(|node| claim.node == *node)
}

fn is_after(listed: &ListedClaim, after: &ClaimPlace) -> bool {
    match listed.name.cmp(&after.name) {
        std::cmp::Ordering::Equal => match (&listed.of_volume, &after.of_volume) {
            (OfVolume::Consumer(one), OfVolume::Consumer(other)) => one > other,
            (OfVolume::Number(one), OfVolume::Number(other)) => one > other,
            // A place of the other kind of list.
            _ => false,
        },
        order => order.is_gt(),
    }
}

fn matches(record: &Record, filter: &RecordFilter) -> bool {
    let is_at = |node: &String| {
        record.claims.iter().any(|claim| claim.node == *node)
            || record.attachments.iter().any(|at| at.node == *node)
    };
    let has_id =
        |id: &String| !record.volume.handle.is_creating() && record.volume.handle.text() == id.as_str();
    filter.plugin.as_ref().is_none_or(|plugin| record.volume.plugin == *plugin)
        && filter.external_id.as_ref().is_none_or(has_id)
        && filter.node.as_ref().is_none_or(is_at)
        && (!filter.restless || record.is_restless())
        && (!filter.registered || record.registration.is_some())
}

/// Returns the record of a volume; an error if not all of it can be read.
pub(crate) fn readable<'a>(keys: &Keys, stored: &'a Arc<Stored>) -> Result<&'a Record, EtcdError> {
    match stored.unreadable(keys) {
        Some(error) => Err(error),
        None => Ok(&stored.record),
    }
}

fn is_named(name: &VolumeName, namespace: &Option<String>, volume: &Option<String>) -> bool {
    namespace.as_ref().is_none_or(|namespace| name.namespace == *namespace)
        && volume.as_ref().is_none_or(|volume| name.volume == *volume)
}

/// Returns where a namespace begins. `None`: all of them.
fn first(namespace: Option<&str>) -> VolumeName {
    VolumeName { namespace: namespace.unwrap_or_default().to_owned(), volume: String::new() }
}

fn is_past(name: &VolumeName, namespace: Option<&str>) -> bool {
    namespace.is_some_and(|namespace| name.namespace.as_str() > namespace)
}

fn is_full(found: usize, most: usize) -> bool {
    most > 0 && found >= most
}
