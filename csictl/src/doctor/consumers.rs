//! Mounts of the type csi by fstab and mount units, and the targets that csid restores.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsStr,
    io,
    path::Path,
};

use csid_client::MountRow;
use tokio::process::Command;

use super::bounded::run;
use super::finding::Report;
use super::services::{self, Order};
use super::systemctl::show;
use crate::args::FSTAB;
use crate::helpers::{
    fstab::{self, CsiLine},
    mount_table::MountTable,
    unit::{self, REMOTE},
};
use crate::shell::quoted;

/// `rows`: csid's mounts that have a target.
pub async fn look(rows: &[MountRow], report: &mut Report) {
    let lines = fstab::lines(Path::new(FSTAB));
    let table = MountTable::read().ok();
    let properties = ["Id", "LoadState", "Where", "FragmentPath", "After"];
    let (automounts, units): (Vec<_>, Vec<_>) = match show(&["*.automount", "*.mount"], &properties).await {
        Ok(units) => units
            .into_iter()
            .filter(|unit| !unit.is("LoadState", "not-found"))
            .partition(|unit| unit.id().ends_with(".automount")),
        // It was found that systemd does not answer.
        Err(_) => return,
    };
    // A service that uses such a target makes the mount by that, or an administrator does.
    let mut later: BTreeSet<&str> = automounts.iter().map(|unit| unit.get("Where")).collect();
    later.extend(lines.iter().filter(|line| !line.is_automatic()).map(|line| line.target.as_str()));
    let mut targets: BTreeMap<String, Order> = BTreeMap::new();
    for line in &lines {
        not_mounted(line, table.as_ref(), report);
        if !later.contains(line.target.as_str()) {
            targets.insert(line.target.clone(), Order::MountUnit);
        }
        // systemd loads the unit of a line with noauto alone only where something names the unit.
        if line.is_loaded() && !units.iter().any(|unit| unit.is("Where", &line.target)) {
            let found = format!("systemd does not know the line of {}", line.target);
            report.warning("fstab", &found, "`systemctl daemon-reload`");
        }
    }
    for of_csi in units.iter().filter(|unit| !unit.get("FragmentPath").is_empty()) {
        match is_of_csi(of_csi.id()).await {
            Ok(true) => {}
            Ok(false) => continue,
            Err(error) => {
                let found = format!("its files cannot be read: {error}");
                report.warning(of_csi.id(), &found, &format!("`systemctl cat -- {}`", quoted(of_csi.id())));
                continue;
            }
        }
        let place = of_csi.get("Where").to_owned();
        if !of_csi.lists("After", REMOTE) && !is_faulty(&lines, &place) {
            let found = format!(
                "the mount of {place} is not ordered after {REMOTE}: it may be tried before csid runs, and is still mounted when \
                 csid stops"
            );
            report.error(of_csi.id(), &found, "add _netdev to its Options=, then `systemctl daemon-reload`");
        }
        if !later.contains(place.as_str()) {
            targets.insert(place, Order::MountUnit);
        }
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
        let unit = quoted(&unit::of_target(&line.target));
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

/// Returns whether the unit's file or a drop-in, or the generator that read fstab, names the type csi. The property Type of a unit that is
/// mounted is the kernel's type. The error: the files were not read in time.
async fn is_of_csi(id: &str) -> io::Result<bool> {
    let mut command = Command::new("systemctl");
    command.args(["cat", "--no-pager", "--", id]).env("SYSTEMD_COLORS", "0").env("LC_ALL", "C");
    let ended = run(&mut command).await?;
    Ok(ended.succeeded && names_csi(&ended.stdout))
}

/// `text`: a unit's file and then its drop-ins, of which the last one counts.
fn names_csi(text: &str) -> bool {
    let mut kinds = text.lines().filter_map(|line| line.trim().strip_prefix("Type="));
    kinds.next_back().is_some_and(|kind| kind == "csi" || kind.starts_with("csi."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn type_of_a_unit_file_is_read() {
        assert!(names_csi("[Mount]\nWhat=prod/pg\n Type=csi\n") && names_csi("Type=csi.xfs"));
        assert!(!names_csi("[Mount]\nType=ext4\n#Type=csi\n"));
        let file = "# /etc/systemd/system/srv-pg.mount\n[Mount]\nType=";
        let drop_in = "\n\n# /etc/systemd/system/srv-pg.mount.d/own.conf\n[Mount]\nType=";
        assert!(names_csi(&format!("{file}ext4{drop_in}csi\n")));
        assert!(!names_csi(&format!("{file}csi{drop_in}ext4\n")));
    }
}
