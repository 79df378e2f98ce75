//! The controller's calls for attachments by AttachVolume, driven as those for claims are.

use std::time::Duration;

use csid::store::registry::{Attachment, Driver, Record, Registry};
use csid::store::rows::Leg;
use csid::volume::rules::{ClaimAction, ClaimOutcome};
use csid::{Error, Kind};
use csid_etcd::{Expected, Guard, RowKey};

use crate::by_call::{
    Judged, attachment, due_attachments, end, enter_end, failure_name, is_of_backup, name_of_call,
    remove_forgotten, set_called, set_node,
};
use crate::cluster::{meta_guard, node_guard};
use crate::drive::{Driving, NOTHING, Next, SHORT, Turn, unanswered};
use crate::failure::{Result, ServerError};
use crate::forward::{Ended, Ready};
use crate::pace::{BLOCKED, Memory, Wish};
use crate::records::{TRIES, busy};
use crate::rows::NodeState;

impl Driving {
    /// Makes a call that an attachment asks for, if it is time. `of_volume`: how long the volume's own call waits. `generation`: the cluster's.
    pub(crate) async fn turn_of_attachments(
        &self,
        record: &Record,
        memory: &mut Memory,
        guards: Vec<Guard>,
        (of_volume, generation): (Option<Duration>, u64),
    ) -> Result<Turn> {
        let is_there = |wish: &Wish| due_attachments(record).any(|at| Wish::of_attachment(at) == *wish);
        memory.failed.retain(|wish, _| is_there(wish) || (of_volume.is_some() && wish.is_of_volume()));
        let plugin = &record.volume.plugin;
        let hosts = self.cluster.hosts(record, self.sessions.controllers(plugin));
        let Next { host, may_run } = self.choose(record, &hosts, memory);
        let mut pause = of_volume;
        for at in due_attachments(record) {
            let node_id = at.node_id.as_deref().unwrap_or_default();
            let is_of_backup = is_of_backup(at, generation);
            if is_of_backup && at.leg == Leg::Removing {
                // It may have been attached again since. Its owner or an operator has to end it.
                continue;
            }
            let mut guards = guards.clone();
            let (named, unwanted) = match self.named_later(record, at).await {
                Ok(named) => (named, None),
                // Two nodes have the name.
                Err(ServerError::Refused(error)) => (None, Some(error)),
                Err(error) => return Err(error),
            };
            if let Some(node) = named {
                let mut after = record.clone();
                set_node(&mut after, node_id, &node);
                self.cluster.swap(record, after, guards).await?;
                return Ok(Turn::Again);
            }
            let unwanted = match unwanted {
                None => self.unwanted(record, at, &mut guards).await?,
                unwanted => unwanted,
            };
            if unwanted.is_some() && is_of_backup {
                continue;
            }
            if let Some(error) = unwanted {
                let mut after = record.clone();
                end(&mut after, node_id);
                if self.cluster.swap_granting(record, after, guards).await?.is_some() {
                    self.cluster.note_failure(&failure_name(&record.name, node_id), error);
                    self.cluster.was_driven(&record.name);
                }
                return Ok(Turn::Again);
            }
            let wish = Wish::of_attachment(at);
            if let Some(left) = memory.pause(&wish) {
                pause = Some(pause.map_or(left, |pause| pause.min(left)));
                continue;
            }
            let Some(host) = host else { continue };
            let Some(_calling) = self.calls.begin(plugin) else {
                pause = Some(pause.map_or(SHORT, |pause| pause.min(SHORT)));
                continue;
            };
            // What is blocked by any server is sent nothing.
            let Some(of_host) = self.cluster.host_guard(host).await? else { return Ok(Turn::Rest(NOTHING)) };
            if !guards.contains(&of_host) {
                guards.push(of_host);
            }
            match self.call_for_attachment(record, at, host, guards).await? {
                None => {}
                Some(ClaimOutcome::Unknown | ClaimOutcome::Again | ClaimOutcome::NotSent(None)) => {
                    memory.has_failed(wish, Duration::ZERO);
                }
                // A detach that the plugin refuses is blocked from now on, which is another wish.
                Some(ClaimOutcome::Done | ClaimOutcome::Hopeless(_) | ClaimOutcome::NotSent(Some(_))) => {
                    match wish.is_blocked {
                        true => memory.has_failed(wish, BLOCKED),
                        false => drop(memory.failed.remove(&wish)),
                    }
                }
            }
            return Ok(Turn::Again);
        }
        let rest = [pause, may_run].into_iter().flatten().min().unwrap_or(NOTHING).min(NOTHING);
        // A task that waits for long would have the place of another volume's.
        Ok(if pause.is_some() && rest < SHORT { Turn::Wait(rest) } else { Turn::Rest(rest) })
    }

    /// Returns the node that has reported the name of an attachment since its intent was written. `None`: the node is in the row, or none has.
    /// Refuses a name of two nodes, and a node that has no place for the volume.
    async fn named_later(&self, record: &Record, at: &Attachment) -> Result<Option<String>> {
        if at.leg != Leg::Making || !at.node.is_empty() {
            return Ok(None);
        }
        let node_id = at.node_id.as_deref().unwrap_or_default();
        let Some(node) = self.cluster.node_of_id(&record.volume.plugin, node_id).await? else {
            return Ok(None);
        };
        let Some(row) = self.cluster.node(&node).await? else { return Ok(None) };
        match self.cluster.refuse_limit(record, &node, &row.value).await? {
            Some(full) => Err(full.into()),
            None => Ok(Some(node)),
        }
    }

    /// Returns why an attachment that is being made is not wanted any more: its node takes none, or no call was made and nobody waits. Adds the
    /// guards of that. `None`: it is wanted, or ends already.
    async fn unwanted(
        &self,
        record: &Record,
        at: &Attachment,
        guards: &mut Vec<Guard>,
    ) -> Result<Option<Error>> {
        if at.leg != Leg::Making {
            return Ok(None);
        }
        let (is_ready, guard) = self.is_ready(&at.node).await?;
        guards.extend(guard);
        let Attachment { node, node_id, .. } = at;
        if !is_ready {
            let text = format!("{}: node {node} takes no volume any more", record.name);
            return Ok(Some(Error::new(Kind::Busy, text)));
        }
        let Some(asked) = at.asked.as_ref().filter(|_| at.uncalled) else { return Ok(None) };
        let node_id = node_id.as_deref().unwrap_or_default();
        let call = name_of_call(&asked.owner, &record.name, node_id);
        if !self.cluster.is_abandoned(&call, &asked.keeper, guards).await? {
            return Ok(None);
        }
        let text = format!("{}: nobody waits for the attachment to {node_id}", record.name);
        Ok(Some(Error::new(Kind::TimedOut, text)))
    }

    /// Returns whether volumes may be attached to a node, and the guard of that. A node that the servers do not know takes any.
    async fn is_ready(&self, node: &str) -> Result<(bool, Option<Guard>)> {
        if node.is_empty() {
            return Ok((true, None));
        }
        Ok(match self.cluster.node(node).await? {
            Some(row) => (row.value.state == NodeState::Ready, Some(node_guard(node, &row))),
            None => (false, Some(Guard { key: RowKey::Node(node.to_owned()), is: Expected::Absent })),
        })
    }

    /// Makes one call: writes its intent, sends it, and writes its outcome, which it returns. `None`: the record has changed, so nothing was sent.
    async fn call_for_attachment(
        &self,
        record: &Record,
        at: &Attachment,
        host: &str,
        guards: Vec<Guard>,
    ) -> Result<Option<ClaimOutcome>> {
        let action = if at.leg == Leg::Making { ClaimAction::Attach } else { ClaimAction::Detach };
        let node_id = at.node_id.clone().unwrap_or_default();
        let mut after = record.clone();
        set_called(&mut after, &node_id);
        let time = self.cluster.config.controller_time;
        let mut ready = Ready::of_attachment(&after, &node_id, action, host, time)?;
        let intended = self.enter_intent(&mut after, &ready, &node_id)?;
        let Some(after) = self.cluster.swap(record, after, guards).await? else { return Ok(None) };
        let ended = self.send_intended(&after, &mut ready, &intended).await;
        let unanswered = unanswered(intended.before.as_ref(), &ready, &ended.outcome);
        self.finish_attachment([record, &after], (&ready, &node_id), &ended, unanswered).await?;
        self.cluster.was_driven(&record.name);
        Ok(Some(ended.outcome))
    }

    /// Writes the outcome of a call, unless another server has taken over. `had`, `sent`: the record before the call's intent, and with it.
    /// `unanswered`: the call that the host may still run.
    async fn finish_attachment(
        &self,
        [had, sent]: [&Record; 2],
        (ready, node_id): (&Ready, &str),
        of: &Ended,
        unanswered: Option<String>,
    ) -> Result<()> {
        let name = &had.name;
        let was_asked = attachment(had, node_id).is_none_or(|at| !at.uncalled);
        let action = ready.effect.action;
        let mut written = Some(sent.clone());
        for _ in 0..TRIES {
            let here = self.cluster.presence.here()?;
            let meta = self.cluster.normal().await?;
            let record = match written.take() {
                Some(record) => record,
                None => self.cluster.registry.record(name.clone()).await?,
            };
            let is_mine = |driver: &Driver| driver.call.as_ref().is_some_and(|call| call.id == ready.id);
            if !record.driver.as_ref().is_some_and(is_mine) {
                return Ok(());
            }
            let mut guards = vec![meta_guard(&meta), here.guard()];
            // Nothing is given to a node after its fence.
            let mut node = ready.effect.node.clone();
            if let (true, ClaimAction::Attach) = (node.is_empty(), action)
                && let Ok(Some(named)) = self.cluster.node_of_id(&record.volume.plugin, node_id).await
            {
                // A fence that came during the call may be of it.
                node = named;
            }
            let (is_ready, guard) = self.is_ready(&node).await?;
            guards.extend(guard);
            let mut after = record.clone();
            let judged = Judged { was_asked, is_ready, generation: meta.value.generation };
            enter_end(&mut after, node_id, action, of, &judged);
            after.driver = record.driver.as_ref().zip(unanswered.clone()).map(|(driver, unanswered)| {
                Driver { server: String::new(), call: None, unanswered, ..driver.clone() }
            });
            if after.driver.is_none() {
                remove_forgotten(&mut after);
            }
            let is_over =
                attachment(&after, node_id).is_none_or(|at| !matches!(at.leg, Leg::Making | Leg::Present));
            if self.cluster.swap_granting(&record, after, guards).await?.is_some() {
                if let (ClaimAction::Attach, true, Some(error)) = (action, is_over, &of.error) {
                    self.cluster.note_failure(&failure_name(name, node_id), error.clone());
                }
                return Ok(());
            }
        }
        Err(busy(name))
    }
}
