//! A cluster recovers after etcd was restored from a backup: the nodes' journals have the claims that the backup lacks.
//!
//! ```text
//!           restored                     resume, while nothing is missing
//!   normal ──────────▶ recovering ───────────────────────────────────────▶ normal
//!        generation + 1
//! ```
//!
//! Both are an operator's words, and nothing else begins or ends a recovery. Missing is a node that has not said what it holds, and
//! a node whose claims were not all taken over, until an operator has forgotten them. A node that was fenced in the recovery is not missing. If the row names another etcd cluster, servers grant nothing and let no node join until the operator's word. A node that
//! has seen more than etcd has is refused, and keeps nobody else out.
//!
//! Each change compares the cluster's row. So nothing that was begun in one of these states is written in another one.

use csi_proto::cluster::v1::node_change::Change;
use csi_proto::cluster::v1::resume_ask::Step;
use csi_proto::cluster::v1::{FenceAsk, Hello, RestoredAsk, ResumeAsk};
use csi_proto::identity::Identity;
use csid::error::shortened;
use csid::store::registry::Registry;
use csid::{Error, Kind};
use csid_etcd::{Guard, RowKey, Walked, Write, Written};

use crate::cluster::{Cluster, RESTORED, meta_guard};
use crate::edges;
use crate::failure::{Result, ServerError};
use crate::grants::May;
use crate::heard::Missing;
use crate::records::busy;
use crate::rows::{self, MetaRow, Mode, Read, RecoveryRow, etcd_name};
use crate::time::now_usec;

/// Tries of a change that others are faster with.
const TRIES: usize = 64;
/// The most places of a queue that end in one transaction, which has a limit of operations.
const PLACES: usize = 64;
/// The most nodes that an error names.
const NAMED: usize = 16;
/// The most generations that a recovery leaves out. Each is a restore that was lost, so a greater number is a lie.
const AHEAD: u64 = 1000;

impl Cluster {
    /// Notes the ID of the etcd cluster in a row from before this version. If the row names another one, etcd is a backup: the log has that, and
    /// nothing is granted until an operator has said it.
    pub async fn notice_restore(&self) -> Result<()> {
        for _ in 0..TRIES {
            let meta = self.meta_now().await?;
            let now = etcd_name(self.rows.etcd_cluster());
            match &meta.value.etcd {
                Some(before) => {
                    if *before != now {
                        tracing::error!(before, now, "{RESTORED}: the rows are of another etcd cluster");
                    }
                    return Ok(());
                }
                None => {
                    let after = MetaRow { etcd: Some(now), ..meta.value.clone() };
                    if self.write_meta(&meta, after, vec![]).await? {
                        return Ok(());
                    }
                }
            }
        }
        Err(changes_too_often())
    }

    /// Begins a recovery by an operator's word, unless it has begun already.
    pub async fn restored(&self, caller: &Identity, ask: &RestoredAsk) -> Result<()> {
        self.require_operator(caller, May::Cluster)?;
        let RestoredAsk { generation: seen, past } = *ask;
        if past.saturating_sub(seen) > AHEAD {
            let text = format!(
                "past is generation {past}, and the limit is {AHEAD} more than generation {seen} of etcd"
            );
            return Err(Error::invalid(text).into());
        }
        self.presence.here()?;
        self.begin_restored(caller, seen, past).await.map_err(ServerError::of_a_change)
    }

    async fn begin_restored(&self, caller: &Identity, seen: u64, past: u64) -> Result<()> {
        for _ in 0..TRIES {
            let here = self.presence.here()?;
            let meta = self.while_here(self.meta_now()).await?;
            let now = meta.value.generation;
            // An earlier try of the call has begun it. It may have ended since.
            let has_begun = meta.value.mode != Mode::Restored && meta.value.recovery.is_some();
            if seen.max(past).checked_add(1) == Some(now) && has_begun {
                return Ok(());
            }
            is_as_seen(now, seen)?;
            let after = MetaRow { generation: now.max(past), ..meta.value.clone() };
            let begun = self.begin_recovery(caller, &meta, after, vec![here.guard()]);
            if self.while_here(begun).await? {
                return Ok(());
            }
        }
        Err(changes_too_often())
    }

    /// Returns the generation and the revision of etcd if a node has seen greater ones: etcd has gone back, or a server has lied to the node, or
    /// the node lies. `None`: it has not. `meta`: the cluster's row, perhaps an old one.
    pub async fn behind(&self, hello: &Hello, meta: &MetaRow) -> Result<Option<(u64, u64)>> {
        // Nothing is granted while the cluster recovers, so nobody has a claim of that generation.
        let is_behind = |meta: &MetaRow, revision: u64| {
            let is_of_generation = hello.generation == meta.generation;
            // A node of an earlier version names a revision of no generation. Before the first recovery there was one alone.
            let is_compared = is_of_generation || (hello.generation == 0 && meta.generation == 1);
            hello.generation > meta.generation
                || (is_of_generation && meta.mode == Mode::Recovering)
                || (is_compared && hello.seen_revision > revision)
        };
        if !is_behind(meta, self.rows.etcd_revision()) {
            return Ok(None);
        }
        let now = self.meta_now().await?.value;
        let revision = self.rows.etcd_revision();
        Ok(is_behind(&now, revision).then_some((now.generation, revision)))
    }

    /// Writes that the cluster recovers, in a generation after that of `after`. Returns `false` if a row has changed meanwhile.
    async fn begin_recovery(
        &self,
        by: &Identity,
        meta: &Read<MetaRow>,
        after: MetaRow,
        guards: Vec<Guard>,
    ) -> Result<bool> {
        let generation = after.generation.saturating_add(1);
        let (etcd, rest) = (Some(etcd_name(self.rows.etcd_cluster())), Default::default());
        let reason = "an operator has restored etcd".to_owned();
        let recovery = RecoveryRow { by: by.to_string(), reason, since_usec: now_usec(), rest };
        let after = MetaRow { generation, mode: Mode::Recovering, etcd, recovery: Some(recovery), ..after };
        let written = self.write_meta(meta, after, guards).await?;
        if written {
            tracing::error!(%by, generation, "the cluster recovers from a backup of etcd");
        }
        Ok(written)
    }

    /// Writes the cluster's row. Returns `false` if it or a guarded row has changed since it was read.
    async fn write_meta(
        &self,
        before: &Read<MetaRow>,
        after: MetaRow,
        mut guards: Vec<Guard>,
    ) -> Result<bool> {
        guards.push(meta_guard(before));
        let write = Write { value: Some(rows::write(&RowKey::Meta, &after)?), key: RowKey::Meta, lease: 0 };
        let written = edges::write(&self.rows, &guards, vec![write]).await?;
        self.forget(&RowKey::Meta);
        match written {
            Written::Done { .. } => {
                // Sessions of the time before end.
                self.meta_now().await?;
                Ok(true)
            }
            Written::Refused(RowKey::Server(_)) => {
                Err(ServerError::Unavailable("this server's row in etcd is gone".into()))
            }
            Written::Refused(key) => {
                self.forget(&key);
                Ok(false)
            }
            Written::Unknown => Ok(false),
        }
    }

    /// Does a step to the end of a recovery. The same call again goes on where an earlier one has ended.
    pub async fn resume(&self, caller: &Identity, ask: &ResumeAsk) -> Result<()> {
        self.require_operator(caller, May::Cluster)?;
        self.presence.here()?;
        match Step::try_from(ask.step) {
            Ok(Step::Fence) => self.resume_without(caller, ask).await,
            Ok(Step::Forget) => {
                self.while_here(self.refuse_other_phase(ask.generation)).await?;
                let forgotten = self.while_here(self.forget_refused(&ask.node, ask.revision)).await;
                forgotten.map_err(ServerError::of_a_change)?;
                tracing::warn!(%caller, node = ask.node, "refused claims of a node are forgotten");
                Ok(())
            }
            Ok(Step::End) => {
                self.end_recovery(caller, ask.generation).await.map_err(ServerError::of_a_change)
            }
            Ok(Step::Unknown) | Err(_) => Err(Error::invalid("step: this server does not know it").into()),
        }
    }

    /// Refuses an operator that has seen another generation, or no operator's word at all. Returns the cluster's row.
    async fn refuse_other_phase(&self, generation: u64) -> Result<Read<MetaRow>> {
        let meta = self.meta_now().await?;
        is_as_seen(meta.value.generation, generation)?;
        match meta.value.mode {
            Mode::Restored => Err(Error::new(Kind::Busy, RESTORED).into()),
            Mode::Normal | Mode::Recovering => Ok(meta),
        }
    }

    /// Fences a node that a cluster that recovers waits for.
    async fn resume_without(&self, caller: &Identity, ask: &ResumeAsk) -> Result<()> {
        self.require_operator(caller, May::Fence)?;
        let ResumeAsk { generation, node, revision, by_hand, step: _ } = ask;
        let meta = self.while_here(self.refuse_other_phase(*generation)).await?;
        let row = self.while_here(self.node_now(node)).await?;
        // An earlier try of the call, or another operator, was faster.
        if row.is_some_and(|row| row.value.is_fenced_in(*generation)) {
            return self.end_fenced_if_normal(caller, node).await.map_err(ServerError::after_a_write);
        }
        let is_awaited = meta.value.mode == Mode::Recovering
            && self.while_here(self.missing(*generation)).await?.awaited.contains(node);
        if !is_awaited {
            let text = format!("the cluster does not wait for a node {}", shortened(node));
            return Err(Error::not_found(text).into());
        }
        let fence = FenceAsk {
            reason: format!("the cluster recovers in generation {generation} without it"),
            revision: *revision,
            by_hand: *by_hand,
        };
        self.change_node(caller, node, &Change::Fence(fence)).await?;
        tracing::warn!(%caller, node, "the cluster recovers without a node");
        self.end_fenced_if_normal(caller, node).await.map_err(ServerError::after_a_write)
    }

    /// Ends a recovery for which nothing is missing. The claims of fenced nodes end later.
    async fn end_recovery(&self, caller: &Identity, generation: u64) -> Result<()> {
        for _ in 0..TRIES {
            let here = self.presence.here()?;
            let meta = self.while_here(self.refuse_other_phase(generation)).await?;
            if meta.value.mode == Mode::Normal {
                return self.while_here(self.drop_heard(&meta)).await;
            }
            refuse_missing(generation, &self.while_here(self.missing(generation)).await?)?;
            self.while_here(self.end_waits(&meta)).await?;
            let after = MetaRow { mode: Mode::Normal, ..meta.value.clone() };
            if self.while_here(self.write_meta(&meta, after, vec![here.guard()])).await? {
                tracing::warn!(%caller, generation, "the recovery of the cluster has ended");
            }
        }
        Err(changes_too_often())
    }

    /// Ends the places of all claims that wait by the backup. A caller that waits still asks again. Of the others none would end what it is granted. Nothing
    /// begins to wait while the cluster recovers. What cannot be read is granted nothing.
    async fn end_waits(&self, meta: &Read<MetaRow>) -> Result<()> {
        let mut walk = self.registry.walk();
        while let Some(walked) = walk.next().await? {
            let Walked::Volume(volume) = walked else { continue };
            if volume.record.queue.is_empty() || !volume.unreadable.is_empty() {
                continue;
            }
            let name = &volume.record.name;
            let mut tries = 0..TRIES;
            loop {
                let before = self.registry.record(name.clone()).await?;
                if before.queue.is_empty() {
                    break;
                }
                let mut after = before.clone();
                after.queue.drain(..before.queue.len().min(PLACES));
                let guards = vec![meta_guard(meta), self.presence.here()?.guard()];
                if self.swap(&before, after, guards).await?.is_none() {
                    tries.next().ok_or_else(|| busy(name))?;
                }
            }
        }
        Ok(())
    }

    /// Ends the claims of a fenced node, unless the cluster recovers. A server ends them later then.
    async fn end_fenced_if_normal(&self, caller: &Identity, node: &str) -> Result<()> {
        match self.while_here(self.meta_now()).await?.value.mode {
            Mode::Normal => self.end_fenced(caller, node).await.map(drop),
            Mode::Recovering | Mode::Restored => Ok(()),
        }
    }
}

/// Refuses an operator that has seen another generation.
fn is_as_seen(now: u64, seen: u64) -> Result<()> {
    match now == seen {
        true => Ok(()),
        false => {
            let text = format!("the operator has seen generation {seen}, and etcd has {now}");
            Err(Error::new(Kind::Busy, text).into())
        }
    }
}

/// Refuses the end of a recovery while something is missing.
fn refuse_missing(generation: u64, missing: &Missing) -> Result<()> {
    let Missing { awaited, refused } = missing;
    let refused: Vec<String> = refused.iter().map(|of| of.node.clone()).collect();
    let named = |nodes: &[String]| {
        let names = nodes.iter().take(NAMED).cloned().collect::<Vec<_>>().join(", ");
        match nodes.len().saturating_sub(NAMED) {
            0 => names,
            more => format!("{names} and {more} more"),
        }
    };
    let mut why = Vec::new();
    if !awaited.is_empty() {
        why.push(format!("nodes that have not said what they hold: {}", named(awaited)));
    }
    if !refused.is_empty() {
        why.push(format!("nodes whose claims were not all brought back: {}", named(&refused)));
    }
    if why.is_empty() {
        return Ok(());
    }
    let text = format!("the cluster recovers in generation {generation}; {}", why.join("; "));
    Err(Error::new(Kind::Busy, text).into())
}

fn changes_too_often() -> ServerError {
    Error::new(Kind::Busy, format!("the row of the cluster changed {TRIES} times meanwhile")).into()
}
