//! Commands about volumes and claims.

use std::{
    collections::{BTreeMap, HashMap},
    future::Future,
    process::ExitCode,
    time::SystemTime,
};

use anyhow::{Context, bail};
use csid_client::{
    AttachOptions, AttachmentMode, CallOptions, Capability, ClaimFilter, ClaimOptions, Client,
    DeregisterOptions, DetachOptions, ExpandOptions, MountFilter, ReleaseOptions, SnapshotOptions,
    ValidateOptions, VolumeFilter, VolumeOptions, VolumeRow, operation_id,
};
use serde_json::json;

use super::common::{begin, confirmed, done, pairs, sealed, yes};
use super::spec;
use crate::{
    args::{
        Amount, Attach, Claim, Claims, Confirm, Deadline, Name, OWN, OneVolume, Release, Volume, Volumes,
        Wait,
    },
    hints::{self, Tried},
    output::{self, print, print_json},
    shell::quoted,
    wait,
};

pub async fn volume(
    client: &Client,
    command: Volume,
    json: bool,
    tried: &mut Tried,
) -> anyhow::Result<ExitCode> {
    match command {
        Volume::List(args) => list(client, args, json, tried).await?,
        Volume::Show { volume } => {
            about("volume show", &volume, tried);
            let row = client.volume(&volume.namespace, &volume.volume).await?;
            if json { print_json(&row)? } else { print(&output::volume(&row))? }
        }
        Volume::Register(args) => {
            tried.command = "volume register";
            let operation = args.spec.wait.operation_id.clone();
            let spec::Named { namespace, volume, mut spec } = spec::register(args)?;
            tried.plugin.clone_from(&spec.plugin);
            let volume = OneVolume { namespace, volume };
            let work = Work::begin("register", &volume, operation, tried)?;
            spec.operation_id = Some(work.id.clone());
            let row =
                work.end(client, client.register_volume(&volume.namespace, &volume.volume, spec)).await?;
            if json {
                print_json(&row)?;
            }
        }
        Volume::Create(args) => {
            tried.command = "volume create";
            let operation = args.spec.wait.operation_id.clone();
            let spec::Named { namespace, volume, mut spec } = spec::create(args)?;
            tried.plugin.clone_from(&spec.plugin);
            let volume = OneVolume { namespace, volume };
            let work = Work::begin("create", &volume, operation, tried)?;
            spec.operation_id = Some(work.id.clone());
            let row = work.end(client, client.create_volume(&volume.namespace, &volume.volume, spec)).await?;
            if json { print_json(&row)? } else { print(&output::plain(&row.external_id))? }
        }
        Volume::Validate { volume, access_mode, block, secrets, wait } => {
            tried.command = "volume validate";
            let work = Work::begin("validate", &volume, wait.operation_id.clone(), tried)?;
            let attachment_mode =
                if block { AttachmentMode::BlockDevice } else { AttachmentMode::FileSystem };
            let capability = |access_mode| Capability { access_mode, attachment_mode };
            let capabilities: Vec<_> = access_mode.into_iter().map(capability).collect();
            let options = ValidateOptions {
                deadline_usec: wait.deadline.usec(),
                operation_id: Some(work.id.clone()),
                secrets: sealed(secrets.secrets_file.as_deref())?,
                credential: secrets.credential,
                capabilities: (!capabilities.is_empty()).then_some(capabilities),
                ..ValidateOptions::default()
            };
            let call = client.validate_volume(&volume.namespace, &volume.volume, options);
            let validated = work.end(client, call).await?;
            if json {
                print_json(&validated)?;
            } else if !validated.confirmed {
                print(&format!("not confirmed: {}", output::plain(&validated.message)))?;
            }
            return Ok(ExitCode::from(u8::from(!validated.confirmed)));
        }
        Volume::Expand(args) => {
            tried.command = "volume expand";
            let work = Work::begin("expand", &args.volume, args.wait.operation_id.clone(), tried)?;
            let options = ExpandOptions {
                deadline_usec: args.wait.deadline.usec(),
                operation_id: Some(work.id.clone()),
                secrets: sealed(args.secrets.secrets_file.as_deref())?,
                credential: args.secrets.credential,
                part: args.part,
                ..ExpandOptions::default()
            };
            let (Amount(least), most) = (args.capacity, args.limit.map_or(0, |Amount(bytes)| bytes));
            let OneVolume { namespace, volume } = &args.volume;
            let call = client.expand_volume(namespace, volume, least, most, options);
            let expanded = work.end(client, call).await?;
            if json {
                print_json(&expanded)?;
            } else {
                let later = if expanded.node_expansion_required { ", when it is mounted next" } else { "" };
                print(&format!("{}{later}", output::size(expanded.capacity_bytes)))?;
            }
        }
        Volume::Snapshot(args) => {
            tried.command = "volume snapshot";
            let work = Work::begin("snapshot", &args.volume, args.wait.operation_id.clone(), tried)?;
            let options = SnapshotOptions {
                deadline_usec: args.wait.deadline.usec(),
                operation_id: Some(work.id.clone()),
                secrets: sealed(args.secrets.secrets_file.as_deref())?,
                credential: args.secrets.credential,
                parameters: pairs(args.parameter),
                wait: args.no_wait.then_some(false),
                ..SnapshotOptions::default()
            };
            let OneVolume { namespace, volume } = &args.volume;
            let call = client.create_snapshot(namespace, volume, &args.name, options);
            let snapshot = work.end(client, call).await?;
            if json { print_json(&snapshot)? } else { print(&output::plain(&snapshot.id))? }
        }
        Volume::Stats { volume, wait } => {
            tried.command = "volume stats";
            let work = Work::begin("stats", &volume, wait.operation_id.clone(), tried)?;
            let options = call_options(&wait, &work);
            let call = client.volume_stats(&volume.namespace, &volume.volume, options);
            let stats = work.end(client, call).await?;
            if json { print_json(&stats)? } else { print(&output::stats(&stats))? }
        }
        Volume::Delete { volume, confirm, secrets, wait } => {
            tried.command = "volume delete";
            confirmed(&full(&volume), &confirm.yes, "The plugin deletes the volume and its data.")?;
            let work = Work::begin("delete", &volume, wait.operation_id.clone(), tried)?;
            let options = VolumeOptions {
                deadline_usec: wait.deadline.usec(),
                operation_id: Some(work.id.clone()),
                secrets: sealed(secrets.secrets_file.as_deref())?,
                credential: secrets.credential,
                ..VolumeOptions::default()
            };
            work.end(client, client.delete_volume(&volume.namespace, &volume.volume, options)).await?;
            done(json)?;
        }
        Volume::Attach(Attach { volume, node, read_only, access_mode, block, secrets, wait }) => {
            tried.command = "volume attach";
            let work = Work::begin("attach", &volume, wait.operation_id.clone(), tried)?;
            let options = AttachOptions {
                deadline_usec: wait.deadline.usec(),
                operation_id: Some(work.id.clone()),
                secrets: sealed(secrets.secrets_file.as_deref())?,
                credential: secrets.credential,
                read_only: yes(read_only),
                access_mode,
                attachment_mode: block.then_some(AttachmentMode::BlockDevice),
                ..AttachOptions::default()
            };
            let call = client.attach_volume(&volume.namespace, &volume.volume, &node, options);
            let context = work.end(client, call).await?;
            attached(&context, json)?;
        }
        Volume::Detach { volume, node, forget, confirm, secrets, wait } => {
            tried.command = "volume detach";
            if forget {
                confirmed(&full(&volume), &confirm.yes, FORGET_ATTACHMENT)?;
            }
            let work = Work::begin("detach", &volume, wait.operation_id.clone(), tried)?;
            let options = DetachOptions {
                deadline_usec: wait.deadline.usec(),
                operation_id: Some(work.id.clone()),
                secrets: sealed(secrets.secrets_file.as_deref())?,
                credential: secrets.credential,
                forget: yes(forget),
                ..DetachOptions::default()
            };
            let call = client.detach_volume(&volume.namespace, &volume.volume, &node, options);
            work.end(client, call).await?;
            done(json)?;
        }
        Volume::Own { .. } => bail!(OWN),
        Volume::Deregister { volume, force, forget, confirm, wait } => {
            tried.command = "volume deregister";
            if force {
                confirmed(
                    &full(&volume),
                    &confirm.yes,
                    "All its claims are dropped, on every node. csid detaches nothing.",
                )?;
            } else if forget {
                confirmed(
                    &full(&volume),
                    &confirm.yes,
                    "csid stops creating or deleting it. Anything that the plugin has created stays there.",
                )?;
            }
            let work = Work::begin("deregister", &volume, wait.operation_id.clone(), tried)?;
            let options = DeregisterOptions {
                deadline_usec: wait.deadline.usec(),
                operation_id: Some(work.id.clone()),
                force: yes(force),
                forget: yes(forget),
                ..DeregisterOptions::default()
            };
            work.end(client, client.deregister_volume(&volume.namespace, &volume.volume, options)).await?;
            done(json)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// What `volume detach --forget` does.
pub const FORGET_ATTACHMENT: &str = "The plugin is asked no more. If the volume is still attached to the node, it stays so there, and another one \
                                     may attach it at the same time.";

/// Prints the answer to AttachVolume. The plugin's context may have a secret, so it is for programs alone.
pub fn attached(context: &BTreeMap<String, String>, json: bool) -> anyhow::Result<()> {
    match json {
        true => print_json(&json!({ "publish-context": context }))?,
        false => done(json)?,
    }
    Ok(())
}

/// A call about one volume that may take long.
struct Work {
    id: String,
    what: String,
}

impl Work {
    fn begin(
        verb: &str,
        volume: &OneVolume,
        operation: Option<String>,
        tried: &mut Tried,
    ) -> anyhow::Result<Self> {
        tried.volume = Some(words(volume));
        let id =
            operation.map_or_else(|| operation_id("csictl"), Ok).context("cannot make an operation id")?;
        tried.operation = Some(id.clone());
        Ok(Self { what: format!("{verb} {}", words(volume)), id })
    }

    async fn end<T>(
        &self,
        client: &Client,
        call: impl Future<Output = csid_client::Result<T>>,
    ) -> anyhow::Result<T> {
        wait::operation(client, &self.id, &self.what, call).await
    }
}

fn words(volume: &OneVolume) -> String {
    format!("{} {}", quoted(&volume.namespace), quoted(&volume.volume))
}

/// Returns the name that the user types to confirm.
fn full(volume: &OneVolume) -> String {
    format!("{}/{}", volume.namespace, volume.volume)
}

fn about(command: &'static str, volume: &OneVolume, tried: &mut Tried) {
    tried.command = command;
    tried.volume = Some(words(volume));
}

fn call_options(wait: &Wait, work: &Work) -> CallOptions {
    CallOptions {
        deadline_usec: wait.deadline.usec(),
        operation_id: Some(work.id.clone()),
        ..CallOptions::default()
    }
}

async fn list(client: &Client, args: Volumes, json: bool, tried: &mut Tried) -> anyhow::Result<()> {
    tried.command = "volume list";
    let Volumes { namespace, plugin, node, prefix } = args;
    let declared = Some(true);
    let filter = VolumeFilter { namespace, plugin, node, prefix, declared, ..VolumeFilter::default() };
    let volumes = client.volume_pages(filter).rest().await?;
    if json {
        print_json(&volumes)?;
    } else if volumes.is_empty() {
        eprintln!("No volumes. See `csictl volume register --help`.");
    } else {
        print(&output::volumes(&volumes))?;
    }
    Ok(())
}

pub async fn claim(client: &Client, args: Claim, json: bool, tried: &mut Tried) -> anyhow::Result<()> {
    tried.command = "claim";
    let id = begin(&args.name, "", args.wait.operation_id.clone(), tried)?;
    let what = format!("claim {}", tried.mount.as_deref().unwrap_or_default());
    let options = ClaimOptions {
        deadline_usec: args.wait.deadline.usec(),
        operation_id: Some(id.clone()),
        secrets: sealed(args.secrets.secrets_file.as_deref())?,
        credential: args.secrets.credential,
        mode: args.mode,
        access_mode: args.access_mode,
        attachment_mode: args.block.then_some(AttachmentMode::BlockDevice),
        node: args.node,
        wait_usec: Deadline::usec_of(args.queue),
        bind: args.bind.unit(),
        grace_usec: Deadline::usec_of(args.bind.grace),
    };
    let name = args.name;
    let call = client.claim(&name.namespace, &name.volume, &name.consumer, options);
    let claimed = wait::operation(client, &id, &what, call).await?;
    if json {
        print_json(&claimed)?
    } else {
        print(&output::claimed(&claimed))?
    }
    Ok(())
}

/// Asks the user to confirm that csid drops a claim or mount that the plugin may still have.
pub fn confirm_forgetting(name: &Name, confirm: &Confirm) -> anyhow::Result<()> {
    let volume = OneVolume { namespace: name.namespace.clone(), volume: name.volume.clone() };
    let what = "csid asks the plugin no more; what the plugin still has of it stays there. A later mount of the volume \
                stages it again.";
    confirmed(&full(&volume), &confirm.yes, what)
}

pub async fn release(client: &Client, args: Release, json: bool, tried: &mut Tried) -> anyhow::Result<()> {
    tried.command = "release";
    let name = args.name;
    if args.force {
        let volume = OneVolume { namespace: name.namespace.clone(), volume: name.volume.clone() };
        let what = "The claim is dropped as it is; nothing is unmounted or detached. If its consumer still has \
                    the volume, another one may write to it at the same time.";
        confirmed(&full(&volume), &args.confirm.yes, what)?;
    }
    if args.forget {
        confirm_forgetting(&name, &args.confirm)?;
    }
    let id = begin(&name, "", args.wait.operation_id.clone(), tried)?;
    let what = format!("release {}", tried.mount.as_deref().unwrap_or_default());
    let options = ReleaseOptions {
        deadline_usec: args.wait.deadline.usec(),
        operation_id: Some(id.clone()),
        secrets: sealed(args.secrets.secrets_file.as_deref())?,
        credential: args.secrets.credential,
        force: yes(args.force),
        forget: yes(args.forget),
        node: args.node,
    };
    let call = client.release(&name.namespace, &name.volume, &name.consumer, options);
    wait::operation(client, &id, &what, call).await?;
    done(json)?;
    Ok(())
}

/// Lists claims with the plugins and providers of their volumes.
pub async fn claims(client: &Client, args: Claims, json: bool, tried: &mut Tried) -> anyhow::Result<()> {
    tried.command = "claims";
    let of_volumes = VolumeFilter {
        namespace: args.namespace.clone(),
        plugin: args.plugin.clone(),
        ..VolumeFilter::default()
    };
    let filter = ClaimFilter {
        namespace: args.namespace,
        volume: args.volume,
        consumer: args.consumer,
        node: args.node,
        past: yes(args.past),
        ..ClaimFilter::default()
    };
    let (mut claims, volumes) =
        tokio::try_join!(client.claim_pages(filter).rest(), client.volume_pages(of_volumes).rest())?;
    if args.past {
        // Pages are sorted by volume. People want the claim that ended last at the end.
        claims.sort_by_key(|claim| claim.modify_index);
    }
    let volumes: HashMap<(&str, &str), &VolumeRow> =
        volumes.iter().map(|volume| ((volume.namespace.as_str(), volume.id.as_str()), volume)).collect();
    if args.plugin.is_some() {
        claims.retain(|claim| volumes.contains_key(&(claim.namespace.as_str(), claim.volume.as_str())));
    }
    let with = |claim: &csid_client::ClaimRow| {
        volumes
            .get(&(claim.namespace.as_str(), claim.volume.as_str()))
            .map_or(("", ""), |volume| (volume.plugin.as_str(), volume.provider.as_str()))
    };
    if json {
        let mut rows = Vec::new();
        for claim in &claims {
            let (plugin, provider) = with(claim);
            let mut row = serde_json::to_value(claim)?;
            row["plugin"] = json!(plugin);
            row["provider"] = json!(provider);
            rows.push(row);
        }
        print_json(&rows)?;
    } else if claims.is_empty() {
        eprintln!("No claims.");
    } else {
        print(&output::claims(&claims, with, SystemTime::now()))?;
    }
    Ok(())
}

pub async fn explain(
    client: &Client,
    volume: OneVolume,
    json: bool,
    tried: &mut Tried,
) -> anyhow::Result<()> {
    about("explain", &volume, tried);
    let OneVolume { namespace, volume } = volume;
    let found = client.explain(&namespace, &volume, CallOptions::default()).await?;
    if json {
        print_json(&found)?
    } else {
        // The explanation is useful without them.
        let filter =
            MountFilter { namespace: Some(namespace), volume: Some(volume), ..MountFilter::default() };
        let mounts = client.list_mounts(filter).await.unwrap_or_default();
        print(&output::explanation(&found, hints::explained(&found, &mounts, tried)))?
    }
    Ok(())
}
