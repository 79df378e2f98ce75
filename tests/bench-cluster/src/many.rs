//! The part with many volumes: all nodes have claims of a volume each.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use futures_util::future::try_join_all;

use crate::nodes::{At, Fleet, Role};
use crate::parts::{ALL, Bench, OWN};

/// How long a server rests before its memory is looked at.
const REST: Duration = Duration::from_secs(3);

impl Bench {
    pub async fn many(&mut self) -> Result<()> {
        let (nodes, each) = (self.args.nodes(), self.args.claims);
        self.stop()?;
        // The figures are of these volumes. Other parts have made more.
        self.raw.delete_volumes().await?;
        let names = self.new_names(nodes * each);
        let holders = self.names.clone();
        self.raw
            .write_volumes(&self.template, crate::nodes::PLAIN, &names, |n| holders.get(n / each).cloned())
            .await?;
        let of = format!("{0} claims, {0} volumes", names.len());
        for _ in 0..self.args.rounds {
            if self.site.servers[0].is_some() {
                self.site.kill_server(0)?;
            }
            let ready = self.site.start_server(0)?;
            self.report.add("list_s", ready.as_secs_f64(), &of);
        }
        tokio::time::sleep(REST).await;
        self.report.add("server_rss_started", self.site.server(0)?.rss()?, &of);
        self.fleet.join(nodes, &[0]).await?;
        tokio::time::sleep(REST).await;
        self.report.add("server_rss", self.site.server(0)?.rss()?, &format!("{nodes} sessions, {of}"));
        self.site.start_servers()?;
        self.reconnect(each).await?;
        self.again(&names).await
    }

    /// Has all nodes join with new connections, and compare their claims.
    async fn reconnect(&mut self, each: usize) -> Result<()> {
        let nodes = self.args.nodes();
        for _ in 0..self.args.rounds {
            self.fleet = Fleet::new(&self.site, &self.names, &self.pairs)?;
            tokio::time::sleep(REST).await;
            let begun = Instant::now();
            self.fleet.begin(nodes, &ALL, Role::Claims { compares: true });
            self.fleet.wait(nodes, |at| at != At::Nowhere).await?;
            self.report.add("rejoin_s", begun.elapsed().as_secs_f64(), &format!("{nodes} nodes"));
            self.fleet.wait(nodes, |at| matches!(at, At::Compared(_))).await?;
            let of = format!("{nodes} nodes, {each} claims each, each compares 1.5 to 4.5 s after its join");
            self.report.add("compare_s", begun.elapsed().as_secs_f64(), &of);
            for node in &self.fleet.nodes {
                let found = node.found.load(std::sync::atomic::Ordering::Relaxed);
                ensure!(found >= each, "{} has found {found} of its {each} claims", node.name);
            }
        }
        Ok(())
    }

    /// Has all nodes claim again what they have, after their reboot. Each claims one volume after the other.
    async fn again(&mut self, names: &[String]) -> Result<()> {
        let (nodes, each) = (self.args.nodes(), self.args.claims);
        let floor = self.floor(crate::parts::CALLERS).await?.per_s;
        self.report.add("floor_per_s", floor, "");
        self.fleet.leave();
        self.fleet.nodes.iter().for_each(|node| node.reboot());
        self.fleet.join(nodes, &ALL).await?;
        // The first reports of plugins are written.
        tokio::time::sleep(REST).await;
        let of_node = each.min(self.args.again.div_ceil(nodes));
        let begun = Instant::now();
        let claiming = self.fleet.nodes.iter().zip(names.chunks(each)).map(|(node, names)| async move {
            for name in &names[..of_node] {
                node.claim(name, OWN).await?;
            }
            anyhow::Ok(())
        });
        try_join_all(claiming).await?;
        let took = begun.elapsed().as_secs_f64();
        let claims = (nodes * of_node) as f64;
        let of = format!(
            "{claims} claims in {took:.1} s after the joins, {nodes} nodes at once, floor {floor:.0}/s"
        );
        self.report.add("again_per_s", claims / took, "");
        self.report.add("again", took / (claims / (0.6 * floor)), &of);
        Ok(())
    }
}
