//! Every rule, by a bad CO that breaks it and is caught, and a good one that does nearly the same and passes.

mod alone;
mod answers;
mod arguments;
mod history;
mod hosts;
mod order;
mod sockets;
mod unknown;

use std::collections::BTreeSet;

use csi_witness::rules::RULES;
use history::History;

/// A rule and two COs. The bad one breaks it with its last call, and breaks no other.
pub struct Case {
    rule: u8,
    bad: fn(&mut History),
    good: fn(&mut History),
}

#[test]
fn bad_co_is_caught_and_a_good_one_is_not() {
    let all = [
        alone::cases(),
        order::cases(),
        unknown::cases(),
        arguments::cases(),
        answers::cases(),
        sockets::cases(),
        hosts::cases(),
    ];
    let cases: Vec<Case> = all.into_iter().flatten().collect();
    for (number, case) in cases.iter().enumerate() {
        let Case { rule, bad, good } = case;
        let name = format!("case {number}, rule {rule}");
        let (mut broken, mut kept) = (History::new(), History::new());
        bad(&mut broken);
        good(&mut kept);
        let breaches = &broken.verdict().breaches;
        let rules: Vec<u8> = breaches.iter().map(|breach| breach.rule).collect();
        assert_eq!(rules, [*rule], "{name}: {breaches:?}");
        if !broken.at_rest {
            assert_eq!(breaches[0].calls.last(), Some(&broken.last), "{name}: {breaches:?}");
        }
        assert_eq!(kept.verdict().breaches, [], "{name}");
        assert!(kept.verdict().checked.contains_key(rule), "{name}: the good CO was not looked at");
    }
    let tested: BTreeSet<u8> = cases.iter().map(|case| case.rule).collect();
    let known: BTreeSet<u8> = RULES.iter().map(|(rule, _)| *rule).collect();
    assert_eq!(tested, known);
}
