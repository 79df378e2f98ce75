//! The command about this host's cluster.

use std::collections::BTreeSet;

use csid_client::{ClaimFilter, Client, Cluster as Row, JoinOptions, MountFilter};
use serde_json::json;

use super::common::done;
use crate::{
    args::{self, Cluster},
    hints::Tried,
    output::{self, print, print_json},
};

/// The feature of a csid that has the interface.
const FEATURE: &str = "cluster";
/// The state of a claim whose end the servers have yet to learn.
const OWED: &str = "controller-detached";
/// The most volumes that a refusal names.
const SHOWN: usize = 8;

pub async fn cluster(client: &Client, command: Cluster, json: bool, tried: &mut Tried) -> anyhow::Result<()> {
    match command {
        Cluster::Status => {
            tried.command = "cluster status";
            let row = client.cluster().await?;
            match json {
                true => print_json(&row)?,
                false => print(&output::cluster_status(&row))?,
            }
        }
        Cluster::Join(args::Join { import }) => {
            tried.command = "cluster join";
            client.join(JoinOptions { import: import.then_some(true), ..JoinOptions::default() }).await?;
            done(json)?;
        }
        Cluster::Leave => {
            tried.command = "cluster leave";
            leave(client, json).await?;
        }
    }
    Ok(())
}

/// Checks that nothing of the cluster is held or owed here. csid.toml decides whether the host is in a cluster.
async fn leave(client: &Client, json: bool) -> anyhow::Result<()> {
    let row = client.cluster().await?;
    anyhow::ensure!(row.is_clustered(), "this host has no cluster");
    let claims = client.list_claims(ClaimFilter::default()).await?;
    let mounts = client.list_mounts(MountFilter::default()).await?;
    // `Owed` of the row is up to a second old. A claim that is owed is in the list.
    let (owed, claims): (Vec<_>, Vec<_>) = claims.iter().partition(|of| of.state == OWED);
    let claims = claims.into_iter().map(|of| (&of.namespace, &of.volume, &of.consumer));
    let mounts = mounts.iter().map(|of| (&of.namespace, &of.volume, &of.consumer));
    let held: BTreeSet<String> =
        claims.chain(mounts).map(|(ns, volume, consumer)| format!("{ns}/{volume} of {consumer}")).collect();
    if !held.is_empty() || !owed.is_empty() {
        let shown: Vec<&str> = held.iter().take(SHOWN).map(String::as_str).collect();
        let list = match held.len().saturating_sub(SHOWN) {
            _ if held.is_empty() => String::new(),
            0 => format!(" ({})", shown.join(", ")),
            more => format!(" ({} and {more} more)", shown.join(", ")),
        };
        anyhow::bail!(
            "this host cannot leave the cluster {}: it holds {} volumes{list}, and owes the servers the end of {} claims",
            row.name,
            held.len(),
            owed.len()
        );
    }
    match json {
        true => print_json(&json!({ "cluster": row.name, "held": 0, "owed": 0 }))?,
        false => print(&format!(
            "Nothing of the cluster {} is held or owed. Take the table [cluster] out of /etc/csid/csid.toml, then `systemctl restart csid`. \
             The node's row stays at the servers: an operator revokes its certificate, and then: `csictl node forget {}`.",
            row.name, row.node
        ))?,
    }
    Ok(())
}

/// Returns this host's row in its cluster. `None`: it has no cluster, or csid is of an earlier version.
pub async fn present(client: &Client, features: &[String]) -> Option<Row> {
    if !features.iter().any(|feature| feature == FEATURE) {
        return None;
    }
    client.cluster().await.ok().filter(Row::is_clustered)
}
