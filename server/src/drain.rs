//! What a node that drains reports: what it still has of the servers' volumes. etcd keeps the last report, so each server shows it, also when the
//! node is away. It counts for the drain and the boot that it names.

use std::time::Duration;

use csi_proto::cluster::v1::{DrainLeft, Drained};
use csid::error::presentable;
use csid::volume::rules::check_name;
use csid::{Error, Kind};
use csid_etcd::{RowKey, Write, Written};

use crate::cluster::{Cluster, node_guard};
use crate::edges;
use crate::failure::Result;
use crate::rows::{self, DrainLeftRow, DrainedRow, NodeRow, Read};
use crate::time::now_usec;

/// The least time between two reports of a node: each is a change of etcd.
pub const BETWEEN_REPORTS: Duration = Duration::from_millis(500);
/// What a report names at most. It fits in a row then.
const LEFT: usize = 32;
/// The limit of a path or a reason, in bytes. The rest is cut off.
const TEXT: usize = 192;
/// Tries of a write that others are faster with.
const TRIES: usize = 16;

impl Cluster {
    /// Keeps what a node that drains has left. Does nothing if the node drains no more, or has booted since.
    pub async fn keep_drained(&self, node: &str, boot: &str, drained: Drained) -> Result<()> {
        let row = read(node, boot, drained)?;
        if row.drain == 0 {
            return Ok(());
        }
        let key = RowKey::Report(node.to_owned());
        for _ in 0..TRIES {
            let here = self.presence.here()?;
            let Some(present) = self.node_now(node).await? else { return Ok(()) };
            if present.value.boot != boot || present.value.drain() != row.drain {
                return Ok(());
            }
            if self.drained_row(node).await?.is_some_and(|before| before.is_same(&row)) {
                return Ok(());
            }
            let row = DrainedRow { since_usec: now_usec(), ..row.clone() };
            let write = Write { value: Some(rows::write(&key, &row)?), key: key.clone(), lease: 0 };
            match edges::write(&self.rows, &[node_guard(node, &present), here.guard()], vec![write]).await? {
                Written::Done { .. } => return Ok(()),
                Written::Refused(_) | Written::Unknown => {}
            }
        }
        Err(Error::new(Kind::Busy, format!("the row of node {node} has changed")).into())
    }

    /// Returns what a node has reported of its drain, with `most` of what is left. `None`: it does not drain, or has reported nothing in
    /// this boot and drain.
    pub async fn drained(&self, node: &str, row: &Read<NodeRow>, most: usize) -> Result<Option<Drained>> {
        let drain = row.value.drain();
        if drain == 0 {
            return Ok(None);
        }
        let counts = |report: &DrainedRow| (report.drain, &report.boot) == (drain, &row.value.boot);
        Ok(self.drained_row(node).await?.filter(counts).map(|report| shown(report, most)))
    }

    /// Returns a node's last report. `None`: there is none, or this server cannot read it.
    async fn drained_row(&self, node: &str) -> Result<Option<DrainedRow>> {
        let key = RowKey::Report(node.to_owned());
        let Some(row) = self.rows.read(&key).await? else { return Ok(None) };
        match rows::read(&key, &row) {
            Ok(read) => Ok(Some(read.value)),
            Err(error) => {
                tracing::warn!(node, %error, "the report of a node's drain cannot be read");
                Ok(None)
            }
        }
    }
}

/// Checks a report, and returns it as a row. A node may lie.
fn read(node: &str, boot: &str, drained: Drained) -> Result<DrainedRow> {
    let Drained { left, count, since_usec: _, drain } = drained;
    let named = left.len();
    if named > LEFT || u64::try_from(named).unwrap_or(u64::MAX) > count {
        let text = format!(
            "node {node} reports {named} of {count} mounts and claims that are left, and the limit is {LEFT}"
        );
        return Err(Error::invalid(text).into());
    }
    let read = |of: DrainLeft| -> Result<DrainLeftRow> {
        let DrainLeft { namespace, volume, consumer, tag, target, why } = of;
        for (what, name) in [("namespace", &namespace), ("volume", &volume), ("consumer", &consumer)] {
            check_name(what, name)?;
        }
        if !tag.is_empty() {
            check_name("tag", &tag)?;
        }
        let [target, why] = [target, why].map(|text| presentable(&text, TEXT));
        Ok(DrainLeftRow { namespace, volume, consumer, tag, target, why })
    };
    let left = left.into_iter().map(read).collect::<Result<_>>()?;
    Ok(DrainedRow { drain, boot: boot.to_owned(), since_usec: 0, count, left })
}

fn shown(report: DrainedRow, most: usize) -> Drained {
    let DrainedRow { drain, boot: _, since_usec, count, left } = report;
    let left = left.into_iter().take(most).map(|of| {
        let DrainLeftRow { namespace, volume, consumer, tag, target, why } = of;
        DrainLeft { namespace, volume, consumer, tag, target, why }
    });
    Drained { left: left.collect(), count, since_usec, drain }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn left() -> DrainLeft {
        let [namespace, volume, consumer] = ["prod", "data", "web"].map(str::to_owned);
        DrainLeft { namespace, volume, consumer, ..DrainLeft::default() }
    }

    #[test]
    fn report_of_a_lying_node_is_refused() {
        let of =
            |left: Vec<DrainLeft>, count| read("n", "b", Drained { left, count, since_usec: 7, drain: 1 });
        assert_eq!(of(vec![left(); LEFT], 10_000).unwrap().count, 10_000);
        assert!(of(vec![left(); LEFT + 1], 10_000).is_err(), "too much is named");
        assert!(of(vec![left(); 2], 1).is_err(), "more is named than there is");
        for wrong in [
            DrainLeft { volume: String::new(), ..left() },
            DrainLeft { consumer: "a\u{1b}[2J".into(), ..left() },
            DrainLeft { namespace: "n".repeat(129), ..left() },
            DrainLeft { tag: "t".repeat(129), ..left() },
        ] {
            assert!(of(vec![wrong.clone()], 1).is_err(), "{wrong:?}");
        }
    }

    /// The longest names, of characters that are two bytes in JSON.
    #[test]
    fn longest_report_fits_in_a_row() {
        let name = || "\"".repeat(128);
        let long = DrainLeft {
            namespace: name(),
            volume: name(),
            consumer: name(),
            tag: name(),
            target: "\\".repeat(100_000),
            why: "\u{7}\"".repeat(100_000),
        };
        let drained = Drained { left: vec![long; LEFT], count: u64::MAX, since_usec: 0, drain: u64::MAX };
        let row = read("n", &"\"".repeat(128), drained).unwrap();
        let size = rows::write(&RowKey::Report("n".into()), &row).unwrap().len();
        assert!(size < 64 * 1024, "{size} bytes");
        assert!(row.left.iter().all(|of| of.why.len() <= TEXT && !of.why.contains(char::is_control)));
    }
}
