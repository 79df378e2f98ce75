//! The table of what a node says: each field of each message, and the test of a node that lies in it. A field that is new is in no row, and fails
//! the test.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use crate::descriptors;

/// A lie in a field.
#[derive(Clone, Copy)]
enum Lie {
    /// The name of the test that lies.
    In(&'static str),
    /// Why no test lies: nothing depends on the field that a lie could harm.
    Harmless(&'static str),
}

use Lie::{Harmless, In};

/// A message's name, some of its fields, and the lie.
const FIELDS: &[(&str, &str, Lie)] = &[
    ("FromNode", "hello", In("lie_in_a_session_is_refused")),
    ("FromNode", "plugins", In("lie_in_a_session_is_refused")),
    ("FromNode", "ended", In("lie_about_the_end_of_a_call_counts_for_nothing")),
    ("FromNode", "drained", In("lying_node_reports_little_and_of_itself")),
    ("Hello", "cluster protocol_min protocol_max", In("hello_of_another_machine_or_cluster_is_refused")),
    (
        "Hello",
        "journal_id machine_id boot version generation seen_revision",
        In("lie_in_a_session_is_refused"),
    ),
    ("Hello", "clean", In("lie_of_a_fenced_node_is_refused")),
    ("Plugins", "plugins", In("lie_in_a_session_is_refused")),
    ("PluginReport", "plugin attaches max_volumes", In("lie_in_a_session_is_refused")),
    ("PluginReport", "node_id", In("lie_about_a_nodes_name_ends_the_session")),
    ("PluginReport", "controller", In("node_without_the_grant_is_no_controller")),
    ("PluginReport", "calls", In("lie_about_known_calls_answers_nothing")),
    ("CallEnded", "call epoch answer", In("lie_about_the_end_of_a_call_counts_for_nothing")),
    ("CallEnded", "failed", In("answer_that_is_too_large_is_refused")),
    ("CallEnded", "not_started stale", In("lie_that_no_call_was_made_grants_nothing")),
    ("Answer", "publish_context", In("answer_that_is_too_large_is_refused")),
    ("Answer", "created", In("answer_that_no_node_can_use_is_parked")),
    ("Answer", "expanded", In("lie_in_the_answer_to_an_expansion_is_nothing")),
    ("Answer", "validated listed available", In("controller_that_fails_or_lies_is_no_answer")),
    ("Answer", "snapshot", In("lie_in_the_answer_to_a_snapshot_is_nothing")),
    (
        "CreatedVolume",
        "external_id volume_context capacity topologies",
        In("answer_that_no_node_can_use_is_parked"),
    ),
    ("CreatedVolume", "from_source", In("volume_of_an_unconfirmed_source_is_not_used")),
    ("ExpandedVolume", "capacity", In("lie_in_the_answer_to_an_expansion_is_nothing")),
    (
        "ExpandedVolume",
        "node_expansion_required",
        Harmless("nodes of a volume alone are asked, and each one's plugin is asked what it has"),
    ),
    (
        "Validated",
        "confirmed",
        Harmless(
            "it is the plugin's own word about a volume, and a plugin that denies it refuses the mount later",
        ),
    ),
    ("Validated", "message", In("lie_in_the_answer_to_a_question_is_bounded")),
    ("Listed", "volumes snapshots next", In("lie_in_the_answer_to_a_question_is_bounded")),
    (
        "ExternalVolume",
        "external_id capacity published_node_ids abnormal",
        In("lie_in_the_answer_to_a_question_is_bounded"),
    ),
    ("ExternalSnapshot", "id external_id", In("source_of_another_is_refused")),
    (
        "ExternalSnapshot",
        "size created_usec ready",
        Harmless("an operator is shown them, and nothing depends on them but the wait of a snapshot"),
    ),
    ("AvailableCapacity", "bytes", In("lie_in_the_answer_to_a_question_is_bounded")),
    ("CallFailure", "kind message", In("answer_that_is_too_large_is_refused")),
    ("CallFailure", "class", In("lie_that_no_call_was_made_grants_nothing")),
    ("CallFailure", "code", In("controller_that_fails_or_lies_is_no_answer")),
    ("Drained", "left count", In("lying_node_reports_little_and_of_itself")),
    ("Drained", "drain", In("report_counts_for_its_drain_alone")),
    ("Drained", "since_usec", In("time_of_a_report_is_the_servers")),
    ("DrainLeft", "namespace volume consumer tag target why", In("lying_node_reports_little_and_of_itself")),
    (
        "ClaimAsk",
        "call namespace volume consumer node uid use credential boot",
        In("lie_in_a_claim_is_refused"),
    ),
    ("ClaimAsk", "by_mount queue_ms answer_ms", In("lie_of_a_call_that_waits_is_refused")),
    ("ClaimAsk", "mark", In("claim_by_an_old_mark_changes_nothing")),
    ("ClaimAsk", "brings_secrets", In("claim_that_brings_secrets_attaches_nothing")),
    ("Use", "mode access_mode attachment_mode", In("lie_in_a_claim_is_refused")),
    ("CallName", "call namespace volume boot", In("lie_of_a_call_that_waits_is_refused")),
    ("Owed", "claim namespace volume consumer still_staged boot", In("lie_in_detached_ends_no_claim")),
    ("Owed", "call", In("call_of_another_node_ends_no_claim")),
    ("HeldClaims", "boot generation last", In("late_word_of_another_generation_or_boot_is_refused")),
    ("HeldClaims", "claims", In("lie_about_what_a_node_holds_is_refused")),
    (
        "HeldClaim",
        "claim call namespace volume consumer usage credential plugin external_id publish_context external_node_id",
        In("lie_about_what_a_node_holds_is_refused"),
    ),
    (
        "HeldClaim",
        "uid by_mount granted_boot since_usec volume_credential",
        In("lie_about_a_held_claim_changes_nothing"),
    ),
    ("NodeExpanded", "namespace volume required limit boot", In("node_that_has_done_its_part_owes_nothing")),
    ("ReleaseAsk", "namespace volume node consumer force deadline_ms", In("lie_in_a_release_ends_no_claim")),
    ("ReleaseAsk", "claim asks_id", In("repeated_release_ends_no_later_claim")),
    ("ChangeAsk", "register deregister validate", In("lie_in_a_registration_is_refused")),
    (
        "ChangeAsk",
        "create delete expand snapshot delete_snapshot create_from",
        In("grant_to_create_counts_for_its_namespace_alone"),
    ),
    ("ChangeAsk", "attach detach", In("grant_to_attach_counts_for_its_namespace_alone")),
    ("Register", "namespace volume plugin external_id spec", In("lie_in_a_registration_is_refused")),
    (
        "Spec",
        "name capabilities fs_type mount_flags mount_group volume_context parameters credential heal topologies snapshot clone",
        In("lie_in_a_registration_is_refused"),
    ),
    ("Topology", "segments", In("lie_in_a_registration_is_refused")),
    ("Capability", "access_mode attachment_mode", In("lie_in_a_registration_is_refused")),
    ("ChangeAsk", "own", In("operator_owns_what_a_gone_node_registered")),
    ("OwnAsk", "namespace volume from", In("operator_owns_what_a_gone_node_registered")),
    ("Deregister", "namespace volume", In("lie_in_a_registration_is_refused")),
    ("Deregister", "id asks_id", In("repeated_deregister_ends_no_later_registration")),
    ("ValidateAsk", "namespace volume capabilities", In("lie_in_a_registration_is_refused")),
    ("CreateAsk", "namespace volume", In("grant_to_create_counts_for_its_namespace_alone")),
    ("CreateAsk", "plugin spec capacity_min capacity_max", In("creation_with_a_wrong_field_is_refused")),
    ("DeleteAsk", "namespace volume", In("grant_to_create_counts_for_its_namespace_alone")),
    ("DeleteAsk", "id asks_id", In("repeated_deletion_deletes_no_later_volume")),
    ("ExpandAsk", "namespace volume", In("grant_to_create_counts_for_its_namespace_alone")),
    ("ExpandAsk", "required limit", In("expansion_with_a_wrong_field_is_refused")),
    ("SnapshotAsk", "namespace volume", In("grant_to_create_counts_for_its_namespace_alone")),
    ("SnapshotAsk", "name parameters call", In("snapshot_of_anothers_volume_is_refused")),
    ("SnapshotAsk", "no_wait", Harmless("it says when the caller is answered, and nothing else")),
    ("DeleteSnapshotAsk", "plugin snapshot call", In("grant_to_create_counts_for_its_namespace_alone")),
    (
        "AttachAsk",
        "namespace volume node_id read_only access_mode attachment_mode call",
        In("grant_to_attach_counts_for_its_namespace_alone"),
    ),
    ("DetachAsk", "namespace volume node_id forget id", In("grant_to_attach_counts_for_its_namespace_alone")),
    ("VolumeAsk", "namespace volume", In("lie_in_a_question_shows_nothing")),
    ("VolumeAsk", "plugin external_id", In("volume_is_found_by_the_plugins_id")),
    ("ListAsk", "namespace after_namespace", In("lie_in_a_question_shows_nothing")),
    ("ListAsk", "at_least", In("list_of_a_revision_to_come_is_unavailable")),
    (
        "ListAsk",
        "after_volume own plugin node consumer volume prefix after_node after_consumer",
        In("wrong_list_of_claims_is_refused"),
    ),
    ("InventoryAsk", "plugin list capacity", In("node_asks_no_plugin_for_its_inventory")),
    ("ListExternal", "snapshots snapshot external_id token max", In("node_asks_no_plugin_for_its_inventory")),
    ("MeasureCapacity", "capabilities parameters topology", In("node_asks_no_plugin_for_its_inventory")),
];

/// Returns the names of the tests of this folder.
fn tests() -> BTreeSet<String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cluster");
    let mut tests = BTreeSet::new();
    for file in std::fs::read_dir(folder).unwrap() {
        let text = std::fs::read_to_string(file.unwrap().path()).unwrap();
        let marked = text.split("#[tokio::test]\n").skip(1);
        let names = marked.filter_map(|rest| rest.strip_prefix("async fn ")?.split_once('('));
        tests.extend(names.map(|(name, _)| name.to_owned()));
    }
    tests
}

#[test]
fn each_field_of_a_node_has_a_test_that_lies() {
    let mut rows: BTreeMap<String, Lie> = BTreeMap::new();
    for (message, fields, lie) in FIELDS {
        for field in fields.split(' ') {
            let row = format!("{message}.{field}");
            assert!(rows.insert(row.clone(), *lie).is_none(), "{row} is twice in the table");
        }
    }
    assert_eq!(rows.keys().cloned().collect::<BTreeSet<_>>(), descriptors::said_by_nodes());
    let tests = tests();
    for (row, lie) in rows {
        match lie {
            In(test) => assert!(tests.contains(test), "{row}: there is no test {test}"),
            Harmless(why) => assert!(!why.is_empty(), "{row}"),
        }
    }
}
