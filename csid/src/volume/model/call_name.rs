//! Names of calls that take claims: `BEGINNING.PLACE.RANDOM`. The beginning is that of a caller's journal and boot, and the place is a
//! number that grows from call to call. A server has to know the later of two calls, because their messages may come in any order.

/// Returns the name of the call at a place among those that begin so. `random` keeps two calls of one moment apart.
pub fn name_call(beginning: &str, place: u64, random: &str) -> String {
    format!("{beginning}.{place:016x}.{random}")
}

/// Returns whether a call is later than another one. `false` if they begin otherwise, or if a name has no place: their order is not known.
pub fn is_later(call: &str, other: &str) -> bool {
    match (placed(call), placed(other)) {
        (Some((beginning, place)), Some((of_other, other))) => beginning == of_other && place > other,
        _ => false,
    }
}

/// Returns the beginning and the place of a call's name. `None`: the name has another form.
fn placed(call: &str) -> Option<(&str, u64)> {
    // The name of the caller is before a slash, and may have points.
    let (rest, _random) = call.rsplit_once('.').filter(|(_, random)| !random.contains('/'))?;
    let (beginning, place) = rest.rsplit_once('.').filter(|(_, place)| place.len() == 16)?;
    Some((beginning, u64::from_str_radix(place, 16).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_call_of_one_beginning_is_known() {
        let name = |beginning, place| name_call(beginning, place, "r");
        for (one, other) in [(0, 1), (9, 10), (15, 16), (u64::MAX - 1, u64::MAX)] {
            let (one, other) = (name("node/n1/a", one), name("node/n1/a", other));
            assert!(is_later(&other, &one) && !is_later(&one, &other), "{one} {other}");
        }
        let same = [name_call("a", 1, "one"), name_call("a", 1, "two")];
        assert!(!is_later(&same[0], &same[1]) && !is_later(&same[1], &same[0]));
    }

    #[test]
    fn order_of_other_calls_is_not_known() {
        let call = name_call("node/n1/a", 1, "r");
        let later = name_call("node/n1/a", 2, "r");
        for other in ["", ".", "..", "node/n1/a", "node/n1/a.r", "node/n1/a.x.r", "node/n1/a.-1.r"] {
            assert!(!is_later(&later, other) && !is_later(other, &call), "{other:?}");
        }
        let without = ["operator/ops.1.x/c", "operator/ops.2.x/c", "operator/ops.2/c.3"];
        for (one, other) in without.iter().flat_map(|one| without.map(|other| (one, other))) {
            assert!(!is_later(one, other), "{one} {other}");
        }
        for beginning in ["node/n2/a", "node/n1/b", "operator/n1/a"] {
            let other = name_call(beginning, 9, "r");
            assert!(!is_later(&other, &call), "{other}");
        }
    }
}
