//! Lists for the callers of servers, read from the cache in parts. A volume that cannot be read does not fail them: it is left out, and
//! counted. The lists that the rules of csid decide with are in `lists`, and fail.

use std::ops::Bound;

use csid::store::registry::{Claim, Record, VolumeName};

use crate::cache::Volumes;
use crate::keys::Keys;

/// The most names that are looked at for one part. The cache cannot change meanwhile.
const LOOKED_AT: usize = 10_000;

/// What a list is of. Each field that is given has to match.
#[derive(Clone, Debug, Default)]
pub struct ListFilter {
    pub namespace: Option<String>,
    pub volume: Option<String>,
    /// The beginning of the volume's name.
    pub prefix: Option<String>,
    pub plugin: Option<String>,
    /// Only claims of this node, or volumes with one.
    pub node: Option<String>,
    /// Only claims of this consumer, or volumes with one.
    pub consumer: Option<String>,
}

/// A claim as a list of claims has it.
#[derive(Clone, Debug)]
pub struct ClaimInList {
    pub name: VolumeName,
    pub plugin: String,
    pub claim: Claim,
}

/// The place of a list of claims, which is ordered by volume, node and consumer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimsAfter {
    pub name: VolumeName,
    /// The node and consumer of a claim. `None`: the place is after all claims of the volume.
    pub claim: Option<[String; 2]>,
}

/// A part of a list.
#[derive(Clone, Debug)]
pub struct ListPart<T, P> {
    pub rows: Vec<T>,
    /// The revision at which the part was read.
    pub revision: u64,
    /// Where the next part begins. `None`: there is none.
    pub next: Option<P>,
    pub left_out: LeftOut,
}

/// The volumes that a list should have and that cannot be read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LeftOut {
    pub count: usize,
    /// The first of them, and its key in etcd that cannot be read.
    pub first: Option<(VolumeName, String)>,
}

/// The names that a part looks at.
struct Looked<'a> {
    names: Vec<&'a VolumeName>,
    /// The last of them, if there are more.
    last: Option<&'a VolumeName>,
}

/// Returns a part of the volumes, ordered by name. `sees`: whether the caller sees a namespace.
pub(crate) fn volumes(
    keys: &Keys,
    volumes: &Volumes,
    filter: &ListFilter,
    after: Option<&VolumeName>,
    most: usize,
    sees: &dyn Fn(&str) -> bool,
) -> ListPart<Record, VolumeName> {
    let begin = begin(filter, after, Bound::Excluded);
    let looked = look(volumes, filter, begin.clone(), sees);
    let mut rows = Vec::new();
    let mut next = looked.last.cloned();
    for name in looked.names {
        let Some(record) = readable(keys, volumes, name) else { continue };
        if is_of(record, filter) {
            rows.push(record.clone());
            if rows.len() == most {
                next = Some(name.clone());
                break;
            }
        }
    }
    let left_out = left_out(keys, volumes, filter, (begin, next.as_ref()), sees);
    ListPart { rows, revision: volumes.revision, next, left_out }
}

/// Returns a part of the claims, ordered by volume, node and consumer. `sees`: whether the caller sees a namespace.
pub(crate) fn claims(
    keys: &Keys,
    volumes: &Volumes,
    filter: &ListFilter,
    after: Option<&ClaimsAfter>,
    most: usize,
    sees: &dyn Fn(&str) -> bool,
) -> ListPart<ClaimInList, ClaimsAfter> {
    let bound = match after {
        Some(ClaimsAfter { claim: Some(_), .. }) => Bound::Included,
        _ => Bound::Excluded,
    };
    let begin = begin(filter, after.map(|after| &after.name), bound);
    let looked = look(volumes, filter, begin, sees);
    let mut rows = Vec::new();
    let mut next = looked.last.map(|name| ClaimsAfter { name: name.clone(), claim: None });
    'volumes: for name in looked.names {
        let Some(record) = readable(keys, volumes, name) else { continue };
        if filter.plugin.as_ref().is_some_and(|plugin| record.volume.plugin != *plugin) {
            continue;
        }
        let after = after.filter(|after| after.name == *name).and_then(|after| after.claim.as_ref());
        let after = after.map(|[node, consumer]| (node.as_str(), consumer.as_str()));
        let mut claims: Vec<&Claim> = record
            .claims
            .iter()
            .filter(|claim| is_claim_of(claim, filter) && after.is_none_or(|after| place(claim) > after))
            .collect();
        claims.sort_by(|one, other| place(one).cmp(&place(other)));
        for claim in claims {
            let plugin = record.volume.plugin.clone();
            rows.push(ClaimInList { name: name.clone(), plugin, claim: claim.clone() });
            if rows.len() == most {
                let claim = Some([claim.node.clone(), claim.consumer.clone()]);
                next = Some(ClaimsAfter { name: name.clone(), claim });
                break 'volumes;
            }
        }
    }
    // A volume that cannot be read is passed as a whole. It is counted by the part that has its name.
    let begin = self::begin(filter, after.map(|after| &after.name), Bound::Excluded);
    let left_out = left_out(keys, volumes, filter, (begin, next.as_ref().map(|next| &next.name)), sees);
    ListPart { rows, revision: volumes.revision, next, left_out }
}

fn place(claim: &Claim) -> (&str, &str) {
    (&claim.node, &claim.consumer)
}

/// Returns where a list begins.
fn begin(
    filter: &ListFilter,
    after: Option<&VolumeName>,
    bound: impl Fn(VolumeName) -> Bound<VolumeName>,
) -> Bound<VolumeName> {
    let volume = filter.volume.as_ref().or(filter.prefix.as_ref()).cloned().unwrap_or_default();
    let first = filter.namespace.clone().map(|namespace| VolumeName { namespace, volume });
    match (after, first) {
        (Some(after), Some(first)) if first > *after => Bound::Included(first),
        (Some(after), _) => bound(after.clone()),
        (None, Some(first)) => Bound::Included(first),
        (None, None) => Bound::Unbounded,
    }
}

/// Returns the names to look at, from a bound on.
fn look<'a>(
    volumes: &'a Volumes,
    filter: &ListFilter,
    begin: Bound<VolumeName>,
    sees: &dyn Fn(&str) -> bool,
) -> Looked<'a> {
    let mut all: Box<dyn Iterator<Item = &'a VolumeName>> = match &filter.node {
        Some(node) => Box::new(volumes.by_node.volumes(node, begin)),
        None => Box::new(volumes.by_name.range((begin, Bound::Unbounded)).map(|(name, _)| name.as_ref())),
    };
    let mut sees = Sees { sees, last: None };
    let mut names = Vec::new();
    let mut last = None;
    for name in all.by_ref().take(LOOKED_AT) {
        if is_past(name, filter) {
            return Looked { names, last: None };
        }
        last = Some(name);
        if is_named(name, filter) && sees.sees(&name.namespace) {
            names.push(name);
        }
    }
    let is_over = all.next().is_none_or(|name| is_past(name, filter));
    Looked { names, last: last.filter(|_| !is_over) }
}

/// What the caller sees, asked once for the names of a namespace, which follow each other.
struct Sees<'a> {
    sees: &'a dyn Fn(&str) -> bool,
    last: Option<(String, bool)>,
}

impl Sees<'_> {
    fn sees(&mut self, namespace: &str) -> bool {
        match &self.last {
            Some((last, sees)) if last == namespace => *sees,
            _ => {
                let sees = (self.sees)(namespace);
                self.last = Some((namespace.to_owned(), sees));
                sees
            }
        }
    }
}

/// Returns what a part of a list leaves out. The part is from a bound to a name; `None`: to the end.
fn left_out(
    keys: &Keys,
    volumes: &Volumes,
    filter: &ListFilter,
    (begin, end): (Bound<VolumeName>, Option<&VolumeName>),
    sees: &dyn Fn(&str) -> bool,
) -> LeftOut {
    let mut left_out = LeftOut::default();
    for name in volumes.unreadable.range((begin, Bound::Unbounded)) {
        if is_past(name, filter) || end.is_some_and(|end| name > end) {
            break;
        }
        // Its plugin and claims are not known, so other filters do not count.
        if !is_named(name, filter) || !sees(&name.namespace) {
            continue;
        }
        left_out.count += 1;
        if left_out.first.is_none() {
            let key = volumes.by_name.get(name).and_then(|stored| stored.unreadable(keys));
            left_out.first = key.and_then(|error| error.key()).map(|key| (name.clone(), key));
        }
    }
    left_out
}

fn readable<'a>(keys: &Keys, volumes: &'a Volumes, name: &VolumeName) -> Option<&'a Record> {
    let stored = volumes.by_name.get(name)?;
    stored.unreadable(keys).is_none().then_some(&stored.record)
}

fn is_of(record: &Record, filter: &ListFilter) -> bool {
    let has_claim = || record.claims.iter().any(|claim| is_claim_of(claim, filter));
    filter.plugin.as_ref().is_none_or(|plugin| record.volume.plugin == *plugin)
        && ((filter.node.is_none() && filter.consumer.is_none()) || has_claim())
}

fn is_claim_of(claim: &Claim, filter: &ListFilter) -> bool {
    filter.node.as_ref().is_none_or(|node| claim.node == *node)
        && filter.consumer.as_ref().is_none_or(|consumer| claim.consumer == *consumer)
}

fn is_named(name: &VolumeName, filter: &ListFilter) -> bool {
    filter.namespace.as_ref().is_none_or(|namespace| name.namespace == *namespace)
        && filter.volume.as_ref().is_none_or(|volume| name.volume == *volume)
        && filter.prefix.as_ref().is_none_or(|prefix| name.volume.starts_with(prefix.as_str()))
}

/// Returns whether a name and all later ones do not match.
fn is_past(name: &VolumeName, filter: &ListFilter) -> bool {
    let Some(namespace) = &filter.namespace else { return false };
    let is_past_prefix = || {
        let prefix = filter.prefix.as_ref().filter(|prefix| !name.volume.starts_with(prefix.as_str()));
        filter.volume.as_ref().is_some_and(|volume| name.volume > *volume)
            || prefix.is_some_and(|prefix| name.volume > *prefix)
    };
    match name.namespace.cmp(namespace) {
        std::cmp::Ordering::Greater => true,
        std::cmp::Ordering::Equal => is_past_prefix(),
        std::cmp::Ordering::Less => false,
    }
}

#[cfg(test)]
mod tests {
    use csid::store::registry::ClaimSet;
    use csid::store::testing::samples::{claim, record};

    use super::*;
    use crate::stored::Stored;
    use crate::wire::KeyValue;

    fn in_namespace(namespace: &str, volume: &str) -> VolumeName {
        VolumeName { namespace: namespace.into(), volume: volume.into() }
    }

    /// Makes volumes, each with claims: consumer and node.
    fn cache(all: &[(VolumeName, &[(&str, &str)])]) -> Volumes {
        let mut volumes = Volumes { revision: 7, ..Volumes::default() };
        for (name, claims) in all {
            let mut stored = Stored::none(name.clone());
            let claims: ClaimSet = claims.iter().map(|(consumer, node)| claim(consumer, node)).collect();
            stored.record = Record { name: name.clone(), claims, ..record(&name.volume, &[]) };
            stored.past_number = Some(0);
            let name = std::sync::Arc::new(name.clone());
            volumes.by_node.change(&name, &ClaimSet::default(), &stored.record.claims);
            volumes.by_name.insert(name, stored.into());
        }
        volumes
    }

    fn damage(volumes: &mut Volumes, keys: &Keys, name: &VolumeName) {
        let part = crate::keys::Part::Claim("n1".into(), "bad".into());
        let key = keys.part(name, &part);
        let kv = KeyValue { key, value: b"\"hunter2\"".to_vec(), mod_revision: 7, ..KeyValue::default() };
        std::sync::Arc::make_mut(volumes.by_name.get_mut(name).unwrap()).put(part, &kv);
        volumes.unreadable.insert(name.clone());
    }

    fn all_claims(volumes: &Volumes, filter: &ListFilter, most: usize) -> (Vec<String>, usize) {
        let keys = Keys::new("/csid/");
        let (mut found, mut after, mut left_out) = (Vec::new(), None, 0);
        loop {
            let part =
                claims(&keys, volumes, filter, after.as_ref(), most, &|namespace| namespace != "hidden");
            assert!(part.rows.len() <= most && part.revision == 7);
            left_out += part.left_out.count;
            found.extend(
                part.rows.iter().map(|row| format!("{} {} {}", row.name, row.claim.node, row.claim.consumer)),
            );
            match part.next {
                Some(next) => after = Some(next),
                None => return (found, left_out),
            }
        }
    }

    #[test]
    fn claims_are_in_order_whatever_the_part() {
        let both: &[(&str, &str)] = &[("a", "n2"), ("b", "n1"), ("a", "n1")];
        let volumes = cache(&[
            (in_namespace("default", "data"), both),
            (in_namespace("default", "none"), &[]),
            (in_namespace("hidden", "data"), both),
            (in_namespace("shared", "data"), &[("a", "n3")]),
        ]);
        let due = ["default/data n1 a", "default/data n1 b", "default/data n2 a", "shared/data n3 a"];
        for most in 1..6 {
            assert_eq!(
                all_claims(&volumes, &ListFilter::default(), most),
                (due.map(str::to_owned).into(), 0)
            );
            let own = ListFilter { node: Some("n1".into()), ..ListFilter::default() };
            assert_eq!(all_claims(&volumes, &own, most).0, due[..2]);
            let of_consumer = ListFilter { consumer: Some("a".into()), ..ListFilter::default() };
            assert_eq!(all_claims(&volumes, &of_consumer, most).0, [due[0], due[2], due[3]]);
            let one = ListFilter { namespace: Some("shared".into()), ..ListFilter::default() };
            assert_eq!(all_claims(&volumes, &one, most).0, due[3..]);
            let hidden = ListFilter { namespace: Some("hidden".into()), ..ListFilter::default() };
            assert_eq!(all_claims(&volumes, &hidden, most).0, [""; 0]);
        }
    }

    #[test]
    fn unreadable_volume_is_left_out_and_counted_once() {
        let keys = Keys::new("/csid/");
        let names = ["a", "b", "c", "d"].map(|volume| in_namespace("default", volume));
        let hidden = in_namespace("hidden", "x");
        let claims: &[(&str, &str)] = &[("a", "n1"), ("b", "n1")];
        let mut volumes = cache(
            &[names.clone().map(|name| (name, claims)).as_slice(), &[(hidden.clone(), claims)]].concat(),
        );
        for name in [&names[1], &names[3], &hidden] {
            damage(&mut volumes, &keys, name);
        }
        for node in [None, Some("n1".to_owned()), Some("n9".to_owned())] {
            let filter = ListFilter { node: node.clone(), ..ListFilter::default() };
            for most in 1..9 {
                let (found, left_out) = all_claims(&volumes, &filter, most);
                let due = if node.as_deref() == Some("n9") { 0 } else { 4 };
                assert_eq!((found.len(), left_out), (due, 2), "{node:?} {most}");
            }
            let sees = |namespace: &str| namespace != "hidden";
            let part = super::volumes(&keys, &volumes, &filter, None, 9, &sees);
            assert_eq!(part.left_out.count, 2);
            let (first, key) = part.left_out.first.unwrap();
            assert_eq!((first, key.as_str()), (names[1].clone(), "/csid/v1/vol/default/b/claim/n1/bad"));
        }
    }

    #[test]
    fn part_ends_after_many_names_that_do_not_match() {
        let names: Vec<_> = (0..LOOKED_AT + 5).map(|n| in_namespace("default", &format!("{n:06}"))).collect();
        let mut all: Vec<_> = names.iter().map(|name| (name.clone(), &[] as &[(&str, &str)])).collect();
        all[LOOKED_AT + 4].1 = &[("job", "n1")];
        let volumes = cache(&all);
        let keys = Keys::new("/csid/");
        let filter = ListFilter { plugin: Some("none".into()), ..ListFilter::default() };
        let part = super::volumes(&keys, &volumes, &filter, None, 9, &|_| true);
        assert_eq!((part.rows.len(), part.next.as_ref()), (0, Some(&names[LOOKED_AT - 1])));
        let part = super::volumes(&keys, &volumes, &filter, part.next.as_ref(), 9, &|_| true);
        assert_eq!((part.rows.len(), part.next), (0, None));
        let own = ListFilter { node: Some("n1".into()), ..ListFilter::default() };
        let part = claims(&keys, &volumes, &own, None, 9, &|_| true);
        assert_eq!((part.rows.len(), part.next), (1, None), "a node's list looks at all volumes");
        let prefix = ListFilter {
            namespace: Some("default".into()),
            prefix: Some("00000".into()),
            ..ListFilter::default()
        };
        let part = super::volumes(&keys, &volumes, &prefix, None, 99, &|_| true);
        assert_eq!((part.rows.len(), part.next), (10, None), "names after the prefix are looked at");
    }
}
