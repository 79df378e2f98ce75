//! The commands about volumes and claims that an operator gives with `--operator`. Each asks the cluster's servers for what the same
//! command asks csid for on a host, and prints the same.

use std::time::{Duration, Instant, SystemTime};

use anyhow::bail;
use csi_proto::cluster::v1::change_ask::What;
use csi_proto::cluster::v1::cluster_client::ClusterClient;
use csi_proto::cluster::v1::{
    AttachAsk, AttachmentRow, Capability, ChangeAsk, ClaimInList, CreateAsk, DeleteAsk, Deregister,
    DetachAsk, ExpandAsk, ListAsk, OwnAsk, Register, ReleaseAsk, Spec, Topology, VolumeAsk,
};
use csid_client::{AttachmentMode, CreateVolume, RegisterVolume};
use serde_json::{Value, json};

use super::common::{confirmed, done};
use super::spec::{self, Named};
use super::volume::{FORGET_ATTACHMENT, attached};
use crate::{
    args::{Amount, Attach, Claims, Confirm, Name, OneVolume, Release, Volume, Volumes},
    hints::{self, Tried},
    operator::{LeftOut, OperatorError, Servers, rows},
    output::{self, print, print_json},
    shell::quoted,
};

/// How long a list may take in all, and a release. A server waits for a release for 60 s at most.
const LIST: Duration = Duration::from_secs(300);
const RELEASE: Duration = Duration::from_secs(75);
/// How long a creation or deletion is waited for, unless the command line says so.
const CHANGE: Duration = Duration::from_secs(60);

pub async fn volume(servers: &Servers, command: Volume, json: bool, tried: &mut Tried) -> anyhow::Result<()> {
    match command {
        Volume::List(args) => list(servers, args, json, tried).await,
        Volume::Show { volume } => {
            about("volume show", &volume, tried);
            let OneVolume { namespace, volume } = volume;
            let ask = VolumeAsk { namespace, volume, ..VolumeAsk::default() };
            let row = servers.call(None, async |channel| {
                Ok(ClusterClient::new(channel).volume(ask.clone()).await?.into_inner())
            });
            let row = row.await?;
            let shown = rows::volume(&row);
            match json {
                true => print_json(&of_cluster(&shown, &row)?)?,
                false => print(&format!(
                    "{}{}",
                    output::volume(&shown),
                    [output::attachments(&row), output::expansion(&row), output::queue(&row)].concat()
                ))?,
            }
            if row.queue_count > row.queue.len() as u64 {
                let (shown, all) = (row.queue.len(), row.queue_count);
                servers.warn_of_list(&format!("{shown} of {all} claims that wait are shown, the first ones"));
            }
            if row.claim_count > row.claims.len() as u64 {
                let (shown, all) = (row.claims.len(), row.claim_count);
                servers.warn_of_list(&format!("{shown} of {all} claims are shown; `claims` lists all"));
            }
            Ok(())
        }
        Volume::Register(args) => {
            tried.command = "volume register";
            let Named { namespace, volume, spec } = spec::register(args)?;
            tried.volume = Some(format!("{} {}", quoted(&namespace), quoted(&volume)));
            let what = format!("register volume {namespace}/{volume}");
            let register = register(namespace, volume, spec)?;
            change(servers, &what, What::Register(register), json).await
        }
        Volume::Deregister { volume, .. } => {
            about("volume deregister", &volume, tried);
            let OneVolume { namespace, volume } = volume;
            let what = format!("deregister volume {namespace}/{volume}");
            let ask = Deregister { namespace, volume, ..Deregister::default() };
            let asks_id = What::Deregister(Deregister { asks_id: true, ..ask.clone() });
            let Some(id) = registration_id(servers, &what, asks_id, Duration::ZERO).await? else {
                return Ok(done(json)?);
            };
            change(servers, &what, What::Deregister(Deregister { id, ..ask }), json).await
        }
        Volume::Own { volume, from } => {
            about("volume own", &volume, tried);
            let OneVolume { namespace, volume } = volume;
            let what = format!("own volume {namespace}/{volume}");
            change(servers, &what, What::Own(OwnAsk { namespace, volume, from }), json).await
        }
        Volume::Create(args) => {
            tried.command = "volume create";
            let Named { namespace, volume, spec } = spec::create(args)?;
            tried.volume = Some(format!("{} {}", quoted(&namespace), quoted(&volume)));
            let what = format!("create volume {namespace}/{volume}");
            let limit = limit_of(spec.deadline_usec);
            change_within(servers, &what, create(namespace, volume, spec)?, json, limit).await
        }
        Volume::Delete { volume, confirm, wait, .. } => {
            about("volume delete", &volume, tried);
            let OneVolume { namespace, volume } = volume;
            let full = format!("{namespace}/{volume}");
            confirmed(&full, &confirm.yes, "The plugin deletes the volume and its data.")?;
            let what = format!("delete volume {full}");
            let ask = DeleteAsk { namespace, volume, ..DeleteAsk::default() };
            let limit = limit_of(wait.deadline.usec());
            let asks_id = What::Delete(DeleteAsk { asks_id: true, ..ask.clone() });
            let Some(id) = registration_id(servers, &what, asks_id, limit).await? else {
                return Ok(done(json)?);
            };
            change_within(servers, &what, What::Delete(DeleteAsk { id, ..ask }), json, limit).await
        }
        Volume::Expand(args) => {
            about("volume expand", &args.volume, tried);
            let OneVolume { namespace, volume } = args.volume;
            let what = format!("expand volume {namespace}/{volume}");
            let (Amount(required), limit) = (args.capacity, args.limit.map_or(0, |Amount(bytes)| bytes));
            let expand = What::Expand(ExpandAsk { namespace, volume, required, limit });
            change_within(servers, &what, expand, json, limit_of(args.wait.deadline.usec())).await
        }
        Volume::Attach(Attach { volume, node, read_only, access_mode, block, wait, .. }) => {
            about("volume attach", &volume, tried);
            let OneVolume { namespace, volume } = volume;
            let what = format!("attach volume {namespace}/{volume} to {node}");
            let attach = What::Attach(AttachAsk {
                namespace,
                volume,
                node_id: node,
                read_only,
                access_mode: access_mode.map(|mode| mode.as_str().to_owned()).unwrap_or_default(),
                attachment_mode: if block {
                    AttachmentMode::BlockDevice.as_str().to_owned()
                } else {
                    String::new()
                },
                call: csid_client::operation_id("csictl")?,
            });
            let row = changed_within(servers, &what, attach, limit_of(wait.deadline.usec())).await?;
            let context = row.attached.unwrap_or_default().publish_context;
            attached(&context.into_iter().collect(), json)
        }
        Volume::Detach { volume, node, forget, confirm, wait, .. } => {
            about("volume detach", &volume, tried);
            let OneVolume { namespace, volume } = volume;
            let full = format!("{namespace}/{volume}");
            if forget {
                confirmed(&full, &confirm.yes, FORGET_ATTACHMENT)?;
            }
            let what = format!("detach volume {full} from {node}");
            let limit = limit_of(wait.deadline.usec());
            let ask = DetachAsk { namespace, volume, node_id: node, forget, id: String::new() };
            let found = changed_within(servers, &what, What::Detach(ask.clone()), limit).await?;
            let Some(AttachmentRow { id, .. }) = found.attached else { return Ok(done(json)?) };
            change_within(servers, &what, What::Detach(DetachAsk { id, ..ask }), json, limit).await
        }
        // The command line refuses others.
        _ => bail!("an operator cannot do this"),
    }
}

/// Explains why a volume is not where it is wanted.
pub async fn explain(
    servers: &Servers,
    volume: OneVolume,
    json: bool,
    tried: &mut Tried,
) -> anyhow::Result<()> {
    about("explain", &volume, tried);
    let OneVolume { namespace, volume } = volume;
    let ask = VolumeAsk { namespace, volume, ..VolumeAsk::default() };
    let found = servers
        .call(None, async |channel| Ok(ClusterClient::new(channel).explain(ask.clone()).await?.into_inner()));
    let found = found.await?;
    let next = hints::explained_by_servers(&found, tried);
    match json {
        true => print_json(&output::of_servers_json(&found, &next))?,
        false => print(output::of_servers(&found, next).trim_end())?,
    }
    Ok(())
}

fn about(command: &'static str, volume: &OneVolume, tried: &mut Tried) {
    tried.command = command;
    tried.volume = Some(format!("{} {}", quoted(&volume.namespace), quoted(&volume.volume)));
}

/// Returns a row as JSON, with what a volume has in a cluster alone.
fn of_cluster(
    shown: &csid_client::VolumeRow,
    row: &csi_proto::cluster::v1::VolumeRow,
) -> anyhow::Result<Value> {
    let mut value = serde_json::to_value(shown)?;
    value["owner"] = json!(row.owner);
    value["expansion"] = output::expansion_json(row);
    value["attachments"] = output::attachments_json(row);
    (value["queue"], value["queue-count"]) = (output::queue_json(row), json!(row.queue_count));
    Ok(value)
}

/// Returns how long a creation or deletion is waited for.
pub fn limit_of(deadline_usec: Option<u64>) -> Duration {
    deadline_usec.map_or(CHANGE, Duration::from_micros)
}

/// Changes a volume. The same change again changes nothing, so the next server may be asked for it.
async fn change(servers: &Servers, what: &str, change: What, json: bool) -> anyhow::Result<()> {
    change_within(servers, what, change, json, Duration::ZERO).await
}

/// Changes a volume, and repeats the call while the servers go on with the change. A server answers after a few seconds, whatever the limit.
async fn change_within(
    servers: &Servers,
    what: &str,
    change: What,
    json: bool,
    limit: Duration,
) -> anyhow::Result<()> {
    let is_end = matches!(change, What::Deregister(_) | What::Delete(_) | What::Detach(_));
    let row = changed_within(servers, what, change, limit).await?;
    match json {
        true if !is_end => print_json(&of_cluster(&rows::volume(&row), &row)?)?,
        _ => done(json)?,
    }
    Ok(())
}

/// Asks for the ID of the registration that is to end. A call that is repeated at another server names it, and ends no registration that was
/// made meanwhile. Empty: the server is of an earlier version. `None`: there is no registration, or a server of an earlier version has ended
/// it.
async fn registration_id(
    servers: &Servers,
    what: &str,
    asks: What,
    limit: Duration,
) -> anyhow::Result<Option<String>> {
    let found = changed_within(servers, what, asks, limit).await?;
    Ok((!found.plugin.is_empty()).then_some(found.registration_id))
}

/// Changes a volume as [`change_within`] does, and returns the server's answer.
pub async fn changed_within(
    servers: &Servers,
    what: &str,
    change: What,
    limit: Duration,
) -> anyhow::Result<csi_proto::cluster::v1::VolumeRow> {
    let ask = ChangeAsk { what: Some(change) };
    let begun = Instant::now();
    loop {
        let row = servers.call(Some(what), async |channel| {
            Ok(ClusterClient::new(channel).change(ask.clone()).await?.into_inner())
        });
        match row.await {
            Err(error) if goes_on(&error) && begun.elapsed() < limit => {}
            row => return row,
        }
    }
}

/// Returns whether the servers go on with a change that was not done in time.
fn goes_on(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(OperatorError::Refused { kind, .. }) if kind == "TimedOut")
}

/// Makes the call that creates a volume.
fn create(namespace: String, volume: String, spec: CreateVolume) -> anyhow::Result<What> {
    let (snapshot, clone) = (spec.snapshot.unwrap_or_default(), spec.clone.unwrap_or_default());
    let (capacity_min, capacity_max) = (spec.capacity_min.unwrap_or(0), spec.capacity_max.unwrap_or(0));
    let of_both = RegisterVolume {
        secrets: spec.secrets,
        credential: spec.credential,
        plugin: spec.plugin,
        name: spec.name,
        capabilities: spec.capabilities,
        fs_type: spec.fs_type,
        mount_flags: spec.mount_flags,
        mount_group: spec.mount_group,
        parameters: spec.parameters,
        topologies: spec.topologies,
        heal: spec.heal,
        suid: spec.suid,
        dev: spec.dev,
        ..RegisterVolume::default()
    };
    let Register { namespace, volume, plugin, spec, .. } = register(namespace, volume, of_both)?;
    let has_source = !snapshot.is_empty() || !clone.is_empty();
    let spec = spec.map(|spec| Spec { snapshot, clone, ..spec });
    let create = CreateAsk { namespace, volume, plugin, spec, capacity_min, capacity_max };
    Ok(if has_source { What::CreateFrom(create) } else { What::Create(create) })
}

/// Makes the call of a spec. Servers keep no secrets, and root on a host decides about suid and dev.
fn register(namespace: String, volume: String, spec: RegisterVolume) -> anyhow::Result<Register> {
    for (option, given) in [
        ("--secrets-file", spec.secrets.is_some()),
        ("suid", spec.suid == Some(true)),
        ("dev", spec.dev == Some(true)),
    ] {
        if given {
            bail!("{option}: the servers of a cluster do not keep it");
        }
    }
    let capabilities = spec.capabilities.unwrap_or_default().into_iter().map(|of| Capability {
        access_mode: of.access_mode.as_str().to_owned(),
        attachment_mode: of.attachment_mode.as_str().to_owned(),
    });
    let topologies = spec.topologies.unwrap_or_default().into_iter().map(|segments| Topology { segments });
    Ok(Register {
        namespace,
        volume,
        plugin: spec.plugin.unwrap_or_default(),
        external_id: spec.external_id.unwrap_or_default(),
        spec: Some(Spec {
            name: spec.name.unwrap_or_default(),
            capabilities: capabilities.collect(),
            fs_type: spec.fs_type.unwrap_or_default(),
            mount_flags: spec.mount_flags.unwrap_or_default(),
            mount_group: spec.mount_group.unwrap_or_default(),
            volume_context: spec.context.unwrap_or_default(),
            parameters: spec.parameters.unwrap_or_default(),
            credential: spec.credential.unwrap_or_default(),
            heal: spec.heal.map(|heal| heal.as_str().to_owned()).unwrap_or_default(),
            topologies: topologies.collect(),
            ..Spec::default()
        }),
    })
}

async fn list(servers: &Servers, args: Volumes, json: bool, tried: &mut Tried) -> anyhow::Result<()> {
    tried.command = "volume list";
    let ask = ListAsk {
        namespace: args.namespace.unwrap_or_default(),
        plugin: args.plugin.unwrap_or_default(),
        node: args.node.unwrap_or_default(),
        prefix: args.prefix.unwrap_or_default(),
        ..ListAsk::default()
    };
    let call = servers.call_within(LIST, None, async |channel| {
        let mut pages = ClusterClient::new(channel).volumes(ask.clone()).await?.into_inner();
        let (mut found, mut left_out) = (Vec::new(), LeftOut::default());
        while let Some(page) = Servers::page(&mut pages).await? {
            left_out.add(page.left_out, page.first_left_out);
            found.extend(page.volumes);
        }
        Ok((found, left_out))
    });
    let (found, left_out) = call.await?;
    if json {
        let all: Result<Vec<Value>, _> =
            found.iter().map(|row| of_cluster(&rows::volume(row), row)).collect();
        print_json(&all?)?;
    } else if found.is_empty() {
        eprintln!("No volumes. See `csictl volume register --help`.");
    } else {
        print(&output::volumes(&found.iter().map(rows::volume).collect::<Vec<_>>()))?;
    }
    left_out.warn(servers);
    Ok(())
}

/// Returns the claims that match.
async fn found(servers: &Servers, ask: ListAsk) -> anyhow::Result<(Vec<ClaimInList>, LeftOut)> {
    let call = servers.call_within(LIST, None, async |channel| {
        let mut pages = ClusterClient::new(channel).claims(ask.clone()).await?.into_inner();
        let (mut found, mut left_out) = (Vec::new(), LeftOut::default());
        while let Some(page) = Servers::page(&mut pages).await? {
            left_out.add(page.left_out, page.first_left_out);
            found.extend(page.claims);
        }
        Ok((found, left_out))
    });
    call.await
}

pub async fn claims(servers: &Servers, args: Claims, json: bool, tried: &mut Tried) -> anyhow::Result<()> {
    tried.command = "claims";
    let ask = ListAsk {
        namespace: args.namespace.unwrap_or_default(),
        volume: args.volume.unwrap_or_default(),
        consumer: args.consumer.unwrap_or_default(),
        node: args.node.unwrap_or_default(),
        plugin: args.plugin.unwrap_or_default(),
        ..ListAsk::default()
    };
    let (found, left_out) = found(servers, ask).await?;
    let shown: Vec<_> = found.iter().map(|row| (rows::claim(row), row.plugin.as_str())).collect();
    if json {
        let mut all = Vec::new();
        for (claim, plugin) in &shown {
            let mut row = serde_json::to_value(claim)?;
            row["plugin"] = json!(plugin);
            row["provider"] = json!("");
            all.push(row);
        }
        print_json(&all)?;
    } else if shown.is_empty() {
        eprintln!("No claims.");
    } else {
        let claims: Vec<_> = shown.iter().map(|(claim, _)| claim.clone()).collect();
        let plugins: std::collections::HashMap<(&str, &str), &str> = shown
            .iter()
            .map(|(claim, plugin)| ((claim.namespace.as_str(), claim.volume.as_str()), *plugin))
            .collect();
        let with = |claim: &csid_client::ClaimRow| {
            (plugins.get(&(claim.namespace.as_str(), claim.volume.as_str())).copied().unwrap_or_default(), "")
        };
        print(&output::claims(&claims, with, SystemTime::now()))?;
    }
    left_out.warn(servers);
    Ok(())
}

/// Releases a claim of a host. Without a node, the consumer's only claim.
pub async fn release(servers: &Servers, args: Release, json: bool, tried: &mut Tried) -> anyhow::Result<()> {
    tried.command = "release";
    let Release { name, node, force, confirm, wait, .. } = args;
    let Name { namespace, volume, consumer } = name;
    tried.volume = Some(format!("{} {}", quoted(&namespace), quoted(&volume)));
    tried.mount = Some([&namespace, &volume, &consumer].map(|word| quoted(word)).join(" "));
    let node = match node {
        Some(node) => node,
        None => {
            let ask = ListAsk {
                namespace: namespace.clone(),
                volume: volume.clone(),
                consumer: consumer.clone(),
                ..ListAsk::default()
            };
            let (found, _) = found(servers, ask).await?;
            let mut nodes: Vec<_> =
                found.into_iter().filter_map(|row| row.claim).map(|claim| claim.node).collect();
            match (nodes.pop(), nodes.is_empty()) {
                (None, _) => return Ok(done(json)?),
                (Some(node), true) => node,
                (Some(last), false) => {
                    nodes.push(last);
                    bail!(
                        "{consumer} has a claim on {} nodes: {}; --node names one",
                        nodes.len(),
                        nodes.join(", ")
                    )
                }
            }
        }
    };
    tried.node = Some(node.clone());
    if force {
        force_confirmed(&namespace, &volume, &node, &confirm)?;
    }
    let what = format!("release the claim of {consumer} on node {node} of {namespace}/{volume}");
    let deadline_ms = wait.deadline.usec().map_or(0, |usec| (usec / 1000).max(1));
    let ask = ReleaseAsk { namespace, volume, node, consumer, force, deadline_ms, ..ReleaseAsk::default() };
    let release = async |ask: ReleaseAsk| {
        let call = servers.call_within(RELEASE, Some(&what), async |channel| {
            Ok(ClusterClient::new(channel).release(ask.clone()).await?.into_inner())
        });
        call.await
    };
    // A call that is repeated at another server must not end a claim that the consumer has taken meanwhile.
    let claim = release(ReleaseAsk { asks_id: true, ..ask.clone() }).await?.claim;
    if !claim.is_empty() {
        release(ReleaseAsk { claim, ..ask }).await?;
    }
    Ok(done(json)?)
}

fn force_confirmed(namespace: &str, volume: &str, node: &str, confirm: &Confirm) -> anyhow::Result<()> {
    let what = format!(
        "The claim ends as it is, and another host may get the volume. If node {node} runs, it may still write to the volume: \
         switch it off before."
    );
    confirmed(&format!("{namespace}/{volume}"), &confirm.yes, &what)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spec_that_servers_do_not_keep_is_refused() {
        let spec = || RegisterVolume { plugin: Some("p".into()), ..RegisterVolume::default() };
        let made = |spec| register("ns".into(), "v".into(), spec).map(|made| made.plugin);
        assert_eq!(made(spec()).unwrap(), "p");
        for wrong in
            [RegisterVolume { suid: Some(true), ..spec() }, RegisterVolume { dev: Some(true), ..spec() }]
        {
            assert!(made(wrong).unwrap_err().to_string().contains("do not keep it"));
        }
    }
}
