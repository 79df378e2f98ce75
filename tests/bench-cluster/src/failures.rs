//! Programs that are killed: a server with its nodes and a controller's call, and etcd's leader.

use std::sync::Arc;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use tokio::sync::mpsc;

use crate::load;
use crate::nodes::{ATTACHING, Fleet, LIMIT, Role};
use crate::parts::{ALL, Bench, OF_CALLER, OWN};

/// Callers of claims while the leader is killed.
const CALLERS: usize = 16;
/// How long they claim before the leader is killed, and after that.
const BEFORE: Duration = Duration::from_secs(1);
const AFTER: Duration = Duration::from_secs(8);

impl Bench {
    pub async fn failures(&mut self) -> Result<()> {
        for _ in 0..self.args.rounds.min(2) {
            self.server_killed().await?;
            self.call_driven_on().await?;
            self.leader_killed().await?;
        }
        Ok(())
    }

    /// Kills a server. Its nodes join others.
    async fn server_killed(&mut self) -> Result<()> {
        self.site.start_servers()?;
        let nodes = self.args.nodes();
        self.fleet.join(nodes, &ALL).await?;
        let of_first = self.fleet.nodes.iter().filter(|node| node.at.borrow().server() == Some(0)).count();
        let begun = Instant::now();
        self.site.kill_server(0)?;
        self.fleet.wait(nodes, |at| at.server().is_some_and(|server| server != 0)).await?;
        let of = format!("{of_first} nodes of {nodes}");
        self.report.add("server_killed_s", begun.elapsed().as_secs_f64(), &of);
        Ok(())
    }

    /// Kills the server that has sent a controller's call. Another one sends it again.
    async fn call_driven_on(&mut self) -> Result<()> {
        self.site.start_servers()?;
        self.controller =
            Fleet::new(&self.site, &["c0".to_owned()], std::slice::from_ref(&self.of_controller))?;
        self.controller.begin(1, &ALL, Role::Controls);
        self.fleet.join(1, &ALL).await?;
        let names = self.register(2, ATTACHING, OWN).await?;
        let node = Arc::clone(&self.fleet.nodes[0]);
        node.claim(&names[0], OWN).await?;
        let (sender, mut held) = mpsc::unbounded_channel();
        let controller = Arc::clone(&self.controller.nodes[0]);
        let holds = |sender| *controller.holds.lock().unwrap_or_else(PoisonError::into_inner) = sender;
        holds(Some(sender));
        let volume = names[1].clone();
        let claiming = tokio::spawn(async move { node.claim(&volume, OWN).await });
        let called = tokio::time::timeout(LIMIT, held.recv()).await.context("no controller call came")?;
        let (server, _call) = called.context("the controller has ended")?;
        holds(None);
        let begun = Instant::now();
        self.site.kill_server(server)?;
        claiming.await??;
        self.report.add("driven_s", begun.elapsed().as_secs_f64(), "1 call");
        Ok(())
    }

    /// Kills the leader of etcd while claims are taken.
    async fn leader_killed(&mut self) -> Result<()> {
        self.site.start_servers()?;
        let callers = CALLERS.min(self.args.nodes());
        self.fleet.join(callers, &ALL).await?;
        let names = Arc::new(self.free(callers * OF_CALLER, BEFORE + AFTER).await?);
        let (nodes, next) = (Arc::new(self.fleet.nodes.clone()), AtomicUsize::new(0));
        let claiming = tokio::spawn(load::run(callers, BEFORE + AFTER, move |caller| {
            let node = Arc::clone(&nodes[caller]);
            let name = names.get(next.fetch_add(1, Ordering::Relaxed)).cloned();
            async move {
                let Some(name) = name else { return Ok(false) };
                node.claim(&name, OWN).await.map(|()| true)
            }
        }));
        tokio::time::sleep(BEFORE).await;
        let leader = self.site.leader().await?;
        self.site.kill_member(leader)?;
        let claims = claiming.await??;
        let of = format!("{callers} callers, {:.0}/s in all", claims.per_s);
        self.report.add("leader_pause_s", claims.pause_s, &of);
        self.site.start_member_again(leader).await
    }
}
