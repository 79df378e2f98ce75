//! Mounts of the type csi by fstab and mount units, and the targets that csid restores.

use std::{collections::BTreeMap, ffi::OsStr, fs, path::Path};

use csid_client::MountRow;

use super::finding::Report;
use super::services::{self, Order};
use super::systemctl::{Unit, show};
use crate::args::FSTAB;
use crate::helpers::{
    fstab::{self, CsiLine},
    mount_table::MountTable,
    unit,
};

const REMOTE: &str = "remote-fs-pre.target";

/// `rows`: csid's mounts that have a target.
pub async fn look(rows: &[MountRow], report: &mut Report) {
    let lines = fstab::lines(Path::new(FSTAB));
    let table = MountTable::read().ok();
    let units = match show(&["*.mount"], &["Id", "Where", "FragmentPath", "After", "ActiveState"]).await {
        Ok(units) => units,
        // It was found that systemd does not answer.
        Err(_) => return,
    };
    let mut targets: BTreeMap<String, Order> = BTreeMap::new();
    for line in &lines {
        not_mounted(line, table.as_ref(), report);
        targets.insert(line.target.clone(), Order::MountUnit);
        if !units.iter().any(|unit| unit.is("Where", &line.target)) {
            let found = format!("systemd does not know the line of {}", line.target);
            report.warning("fstab", &found, "`systemctl daemon-reload`");
        }
    }
    for of_csi in units.iter().filter(|unit| is_of_csi(unit)) {
        let place = of_csi.get("Where").to_owned();
        if !of_csi.lists("After", REMOTE) && !is_faulty(&lines, &place) {
            let found = format!(
                "the mount of {place} is not ordered after {REMOTE}: it may be tried before csid runs, and is still mounted when \
                 csid stops"
            );
            report.error(of_csi.id(), &found, "add _netdev to its Options=, then `systemctl daemon-reload`");
        }
        targets.insert(place, Order::MountUnit);
    }
    for row in rows.iter().filter(|row| !row.target.is_empty() && row.restore == "auto") {
        if row.consumer != unit::of_target(&row.target) {
            targets.entry(row.target.clone()).or_insert(Order::Volumes);
        }
    }
    services::look(&targets, report).await;
}

fn not_mounted(line: &CsiLine, table: Option<&MountTable>, report: &mut Report) {
    let is_missing = table.is_some_and(|table| table.at(OsStr::new(&line.target)).is_none());
    if is_missing && line.is_automatic() {
        let unit = unit::of_target(&line.target);
        let found = format!("the volume of the line of {} is not mounted", line.target);
        report.warning(
            "fstab",
            &found,
            &format!("`systemctl status {unit}` has the reason; `systemctl start {unit}`"),
        );
    }
}

/// Returns whether the line of the target has a finding of its own.
fn is_faulty(lines: &[CsiLine], target: &str) -> bool {
    lines.iter().any(|line| line.target == target && line.fault().is_some())
}

/// Returns whether the unit's file, or the generator that read fstab, names the type csi.
fn is_of_csi(unit: &Unit) -> bool {
    let path = unit.get("FragmentPath");
    !path.is_empty() && fs::read_to_string(path).is_ok_and(|text| names_csi(&text))
}

fn names_csi(text: &str) -> bool {
    text.lines()
        .filter_map(|line| line.trim().strip_prefix("Type="))
        .any(|kind| kind == "csi" || kind.starts_with("csi."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn type_of_a_unit_file_is_read() {
        assert!(names_csi("[Mount]\nWhat=prod/pg\n Type=csi\n") && names_csi("Type=csi.xfs"));
        assert!(!names_csi("[Mount]\nType=ext4\n#Type=csi\n"));
    }
}
