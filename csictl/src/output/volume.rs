//! Output about volumes and claims.

use std::time::{SystemTime, UNIX_EPOCH};

use csi_proto::time::timestamp;
use csid_client::{ClaimRow, Claimed, Explanation, VolumeRow, VolumeStats};

use super::text::{facts, plain, seconds, table};

/// Returns bytes in the largest unit with a whole number, or with one decimal.
pub fn size(bytes: u64) -> String {
    let units = ["PiB", "TiB", "GiB", "MiB", "KiB"];
    for (place, unit) in units.iter().enumerate() {
        let one = 1u64 << (10 * (units.len() - place));
        if bytes >= one && bytes.is_multiple_of(one) {
            return format!("{}{unit}", bytes / one);
        }
        if bytes >= one {
            return format!("{:.1}{unit}", bytes as f64 / one as f64);
        }
    }
    bytes.to_string()
}

/// Returns a size. 0: it is not known, and the text is empty.
pub(super) fn known(bytes: u64) -> String {
    if bytes == 0 { String::new() } else { size(bytes) }
}

pub fn volumes(rows: &[VolumeRow]) -> String {
    table(
        ["NAMESPACE", "VOLUME", "PLUGIN", "PROVIDER", "CAPACITY", "ACCESS", "WRITERS", "READERS", "NOTE"],
        rows.iter().map(|v| {
            let mut notes = Vec::new();
            notes.extend(on_its_way(v).map(str::to_owned));
            if v.standing == "declared" {
                notes.push(format!("not registered yet: csictl explain {} {}", v.namespace, v.id));
            } else if !v.schedulable {
                notes.push("not schedulable".to_owned());
            }
            if v.pending_expand > 0 {
                notes.push(format!("grows to {} when mounted", size(v.pending_expand)));
            }
            [
                v.namespace.clone(),
                v.id.clone(),
                v.plugin.clone(),
                v.provider.clone(),
                known(v.capacity),
                v.access_mode.clone(),
                v.write_claims.join(" "),
                v.read_claims.join(" "),
                notes.join(", "),
            ]
        }),
    )
}

/// Returns the words for a volume that is not registered yet, or no longer.
fn on_its_way(v: &VolumeRow) -> Option<&'static str> {
    match v.standing.as_str() {
        "creating" => Some("being created"),
        "deleting" => Some("being deleted"),
        _ => None,
    }
}

pub fn volume(v: &VolumeRow) -> String {
    let pairs = |map: &std::collections::BTreeMap<String, String>| {
        map.iter().map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join(",")
    };
    let capabilities: Vec<_> =
        v.capabilities.iter().map(|c| format!("{} {}", c.access_mode, c.attachment_mode)).collect();
    let topologies: Vec<_> = v.topologies.iter().map(pairs).collect();
    let yes = |flag| if flag { "yes" } else { "no" }.to_owned();
    facts([
        ("volume", format!("{} {}", v.namespace, v.id)),
        ("state", on_its_way(v).unwrap_or_default().to_owned()),
        ("name", v.name.clone()),
        ("plugin", v.plugin.clone()),
        ("provider", format!("{} {}", v.provider, v.provider_version).trim().to_owned()),
        ("external id", v.external_id.clone()),
        ("capacity", known(v.capacity)),
        ("to be", known(v.pending_expand)),
        ("can be", capabilities.join(", ")),
        ("is", format!("{} {}", v.access_mode, v.attachment_mode).trim().to_owned()),
        ("writers", v.write_claims.join(" ")),
        ("readers", v.read_claims.join(" ")),
        ("past", v.past_claims.join(" ")),
        ("schedulable", yes(v.schedulable)),
        ("controller required", yes(v.controller_required)),
        ("fs type", v.fs_type.clone()),
        ("mount group", v.mount_group.clone()),
        ("heal", v.heal.clone()),
        ("credential", v.credential.clone()),
        ("topologies", topologies.join(" ")),
        ("parameters", pairs(&v.parameters)),
        // Values are only in --json: they may be secret, and text from terminals is pasted into tickets.
        ("context", v.context.keys().cloned().collect::<Vec<_>>().join(" ")),
    ])
}

pub fn stats(stats: &VolumeStats) -> String {
    let amount = |unit: &str, number| if unit == "BYTES" { size(number) } else { number.to_string() };
    let mut text = table(
        ["UNIT", "USED", "AVAILABLE", "TOTAL"],
        stats.usage.iter().map(|of| {
            let amount = |number| amount(&of.unit, number);
            [of.unit.clone(), amount(of.used), amount(of.available), amount(of.total)]
        }),
    );
    if stats.abnormal {
        text += &format!("\nThe plugin reports it as abnormal: {}", plain(&stats.message));
    }
    text
}

pub fn claimed(c: &Claimed) -> String {
    facts([
        ("volume", format!("{} {}", c.namespace, c.id)),
        ("state", c.state.clone()),
        ("plugin", c.plugin.clone()),
        ("provider", c.provider.clone()),
        ("external id", c.external_id.clone()),
        ("access", format!("{} {}", c.access_mode, c.attachment_mode).trim().to_owned()),
        ("node id", c.external_node_id.clone()),
        ("publish context", c.publish_context.keys().cloned().collect::<Vec<_>>().join(" ")),
    ])
}

pub fn claims<'v>(
    rows: &[ClaimRow],
    of: impl Fn(&ClaimRow) -> (&'v str, &'v str),
    now: SystemTime,
) -> String {
    let now =
        u64::try_from(now.duration_since(UNIX_EPOCH).unwrap_or_default().as_micros()).unwrap_or(u64::MAX);
    table(
        [
            "NAMESPACE",
            "VOLUME",
            "CONSUMER",
            "NODE",
            "PLUGIN",
            "PROVIDER",
            "MODE",
            "ACCESS",
            "STATE",
            "SINCE",
            "NOTE",
        ],
        rows.iter().map(|c| {
            let (plugin, provider) = of(c);
            let state = match (c.releasing, c.state.as_str()) {
                (true, "taken") => "releasing",
                (_, state) => state,
            };
            [
                c.namespace.clone(),
                c.volume.clone(),
                c.consumer.clone(),
                c.node.clone(),
                plugin.to_owned(),
                provider.to_owned(),
                c.mode.clone(),
                c.access_mode.clone(),
                state.to_owned(),
                if c.since == 0 { String::new() } else { seconds(now.saturating_sub(c.since)) },
                c.error.clone(),
            ]
        }),
    )
}

/// Returns steps with their durations, which are in microseconds, in milliseconds.
pub(super) fn timings(steps: &[(String, u64)]) -> String {
    let timing = |(step, usec): &(String, u64)| format!("{step} {:.1} ms", *usec as f64 / 1_000.0);
    steps.iter().map(timing).collect::<Vec<_>>().join(", ")
}

/// Returns the text of an explanation. `next`: the hint.
pub fn explanation(found: &Explanation, next: String) -> String {
    let waiting_for = if found.waiting_for.is_empty() { "nothing" } else { &found.waiting_for };
    let next_try = if found.next_try == 0 { String::new() } else { timestamp(found.next_try) };
    facts([
        ("waits for", waiting_for.to_owned()),
        ("held by", found.holders.join(" ")),
        ("last error", found.last_error.clone()),
        ("next try", next_try),
        ("steps", found.steps.join(", ")),
        ("last mount", timings(&found.timings)),
        ("do", next),
    ])
}

#[cfg(test)]
mod tests {
    use csid_client::Usage;

    use super::*;

    #[test]
    fn sizes_are_short() {
        for (bytes, said) in [
            (0, "0"),
            (1023, "1023"),
            (1024, "1KiB"),
            (10 << 30, "10GiB"),
            (1536, "1.5KiB"),
            (1 << 40, "1TiB"),
        ] {
            assert_eq!(size(bytes), said);
        }
    }

    fn row() -> VolumeRow {
        VolumeRow {
            namespace: "prod".into(),
            id: "db".into(),
            plugin: "ebs".into(),
            provider: "ebs.example".into(),
            capacity: 10 << 30,
            schedulable: true,
            write_claims: vec!["postgres".into()],
            context: [("token".to_owned(), "hunter2".to_owned())].into(),
            ..VolumeRow::default()
        }
    }

    #[test]
    fn volumes_are_a_table_with_their_provider() {
        let waiting = VolumeRow { schedulable: false, pending_expand: 20 << 30, ..row() };
        let expected = "\
NAMESPACE  VOLUME  PLUGIN  PROVIDER     CAPACITY  ACCESS  WRITERS   READERS  NOTE
prod       db      ebs     ebs.example  10GiB     -       postgres  -        -
prod       db      ebs     ebs.example  10GiB     -       postgres  -        not schedulable, grows to 20GiB when mounted";
        assert_eq!(volumes(&[row(), waiting]), expected);
        let declared = VolumeRow { standing: "declared".into(), schedulable: false, ..row() };
        assert!(volumes(&[declared]).ends_with("  not registered yet: csictl explain prod db"));
        for (standing, note) in [("creating", "being created"), ("deleting", "being deleted")] {
            let row = VolumeRow { standing: standing.into(), ..row() };
            assert!(
                volumes(std::slice::from_ref(&row)).ends_with(note)
                    && volume(&row).contains(&format!("state: {note}\n"))
            );
        }
    }

    #[test]
    fn a_context_is_shown_without_its_values() {
        let text = volume(&row());
        assert!(text.contains("context: token\n") && !text.contains("hunter2"), "{text}");
        let claim = Claimed { publish_context: row().context, ..Claimed::default() };
        assert!(!claimed(&claim).contains("hunter2"));
    }

    #[test]
    fn claims_are_a_table_with_the_plugin() {
        let claim = ClaimRow {
            namespace: "prod".into(),
            volume: "db".into(),
            consumer: "pg".into(),
            node: "host".into(),
            mode: "write".into(),
            access_mode: "single-node-writer".into(),
            state: "taken".into(),
            ..ClaimRow::default()
        };
        let leaving = ClaimRow { releasing: true, error: "try 2\u{7}".into(), ..claim.clone() };
        let expected = "\
NAMESPACE  VOLUME  CONSUMER  NODE  PLUGIN  PROVIDER  MODE   ACCESS              STATE      SINCE  NOTE
prod       db      pg        host  ebs     E         write  single-node-writer  taken      -      -
prod       db      pg        host  ebs     E         write  single-node-writer  releasing  -      try 2\u{fffd}";
        assert_eq!(claims(&[claim, leaving], |_| ("ebs", "E"), UNIX_EPOCH), expected);
    }

    #[test]
    fn stats_show_the_abnormal_condition() {
        let usage = vec![
            Usage { unit: "BYTES".into(), available: 1 << 30, total: 3 << 30, used: 2 << 30 },
            Usage { unit: "INODES".into(), available: 5, total: 7, used: 2 },
        ];
        let text = stats(&VolumeStats { usage, abnormal: true, message: "a disk\nis gone".into() });
        let expected = "\
UNIT    USED  AVAILABLE  TOTAL
BYTES   2GiB  1GiB       3GiB
INODES  2     5          7
The plugin reports it as abnormal: a disk\u{fffd}is gone";
        assert_eq!(text, expected);
    }
}
