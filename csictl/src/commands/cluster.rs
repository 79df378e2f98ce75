//! The command about this host's cluster.

use csid_client::{Client, Cluster as Row};

use crate::{
    args::Cluster,
    hints::Tried,
    output::{self, print, print_json},
};

/// The feature of a csid that has the interface.
const FEATURE: &str = "cluster";

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
