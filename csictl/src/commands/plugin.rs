//! Commands about plugins, and their volumes and snapshots.

use std::collections::BTreeSet;
use std::future::Future;
use std::process::ExitCode;
use std::time::SystemTime;

use anyhow::{Context, bail};
use csid_client::{
    AttachmentMode, CallOptions, Capability, CapacityOptions, Client, Error, LogOptions, MountFilter,
    PluginSpec, SnapshotFilter, Supervision, Target, UnregisterOptions, UpgradeOptions, VolumeFilter,
};
use serde_json::json;

use super::common::{confirmed, done, pairs, sealed, secrets, some, yes};
use super::exec;
use crate::{
    args::{
        Capacity, DeleteSnapshot, Drain, Logs, Plugin, PluginWait, Register, Snapshots, Topology, Upgrade,
    },
    hints::{self, Tried},
    output::{self, Consumer, print, print_json},
    wait::{self, Progress},
};

/// The time for systemd to stop a unit and for the plugin to become ready.
const RESTART_USEC: u64 = 120_000_000;

pub async fn plugin(
    target: &Target,
    command: Plugin,
    json: bool,
    tried: &mut Tried,
) -> anyhow::Result<ExitCode> {
    let client = &Client::connect(target).await?;
    match command {
        Plugin::List => {
            let plugins = client.list_plugins().await?;
            if json {
                print_json(&plugins)?;
            } else if plugins.is_empty() {
                eprintln!("No plugins. See `csictl plugin register --help`.");
            } else {
                print(&output::plugins(&plugins))?;
            }
        }
        Plugin::Show { plugin } => {
            about("plugin show", &plugin, tried);
            let (shown, consumers) = tokio::try_join!(client.plugin(&plugin), consumers(client, &plugin))?;
            if json {
                let mut value = serde_json::to_value(&shown)?;
                value["consumers"] = serde_json::to_value(&consumers)?;
                print_json(&value)?;
            } else {
                print(&output::plugin(&shown, &consumers, hints::unhealthy(&shown)))?;
            }
        }
        Plugin::Register(args) => {
            about("plugin register", &args.plugin, tried);
            let id = args.plugin.clone();
            let what = format!("register {id}");
            let path = of_plugin(client, &id, &what, client.register_plugin(&id, spec(args))).await?;
            if json {
                print_json(&json!({ "plugin": path }))?;
            }
        }
        Plugin::Unregister { plugin, instance, force } => {
            about("plugin unregister", &plugin, tried);
            let options = UnregisterOptions { instance, force: yes(force), ..UnregisterOptions::default() };
            let call = client.unregister_plugin(&plugin, options);
            of_plugin(client, &plugin, &format!("unregister {plugin}"), call).await?;
            done(json)?;
        }
        Plugin::Wait(args) => wait_for(client, args, json, tried).await?,
        Plugin::Logs(args) => logs(client, args, tried).await?,
        Plugin::Stats { plugin } => {
            about("plugin stats", &plugin, tried);
            super::stats::stats(client, &plugin, json).await?;
        }
        Plugin::Top(args) => super::stats::top(client, args, json).await?,
        Plugin::Restart { plugin, deadline } => {
            about("plugin restart", &plugin, tried);
            let id = csid_client::operation_id("csictl")?;
            let options = CallOptions {
                deadline_usec: deadline.usec().or(Some(RESTART_USEC)),
                operation_id: Some(id.clone()),
                ..CallOptions::default()
            };
            let call = client.restart_plugin(&plugin, options);
            let progress = async || wait::of_operation(client, &id).await;
            wait::watched(&format!("restart {plugin}"), progress, call).await?;
            done(json)?;
        }
        Plugin::AcceptNodeId { plugin, node_id } => {
            about("plugin accept-node-id", &plugin, tried);
            let call = client.accept_node_id(&plugin, &node_id, CallOptions::default());
            of_plugin(client, &plugin, &format!("accept the node id of {plugin}"), call).await?;
            done(json)?;
        }
        Plugin::Upgrade(args) => upgrade(client, args, json, tried).await?,
        Plugin::Drain(args) => drain(client, args, json, tried).await?,
        Plugin::Capacity(args) => capacity(client, args, json, tried).await?,
        Plugin::Volumes { plugin } => {
            about("plugin volumes", &plugin, tried);
            let page = async |token: String| Ok(client.list_external_volumes(&plugin, &token, 0).await?);
            let volumes = pages(&format!("list the volumes of {plugin}"), page).await?;
            if json {
                print_json(&volumes)?;
            } else if volumes.is_empty() {
                eprintln!("The plugin has no volumes.");
            } else {
                print(&output::external_volumes(&volumes))?;
            }
        }
        Plugin::DeleteSnapshot(args) => delete_snapshot(client, args, json, tried).await?,
        Plugin::Exec(args) => {
            about("plugin exec", &args.plugin, tried);
            return exec::exec(target, args).await;
        }
    }
    Ok(ExitCode::SUCCESS)
}

async fn upgrade(client: &Client, args: Upgrade, json: bool, tried: &mut Tried) -> anyhow::Result<()> {
    about("plugin upgrade", &args.plugin, tried);
    let spec = PluginSpec {
        argv: some(args.argv),
        environment: pairs(args.env),
        credentials: some(args.load_credential),
        socket: args.socket,
        instance: args.instance,
        ..PluginSpec::default()
    };
    let options = UpgradeOptions {
        instance: args.replace,
        deadline_usec: args.deadline.usec(),
        ..UpgradeOptions::default()
    };
    let call = client.upgrade_plugin(&args.plugin, spec, options);
    let instance = of_plugin(client, &args.plugin, &format!("upgrade {}", args.plugin), call).await?;
    match json {
        true => print_json(&json!({ "instance": instance }))?,
        false => print(&instance)?,
    }
    Ok(())
}

async fn drain(client: &Client, args: Drain, json: bool, tried: &mut Tried) -> anyhow::Result<()> {
    about("plugin drain", &args.plugin, tried);
    let filter = MountFilter { plugin: Some(args.plugin.clone()), ..MountFilter::default() };
    // csid refuses an unknown id.
    let mounts = client.list_mounts(filter).await?.len();
    if mounts > 0 {
        let what = format!(
            "This unmounts {mounts} of the plugin's mounts, also those of other users. csid does not mount them again."
        );
        confirmed(&args.plugin, &args.yes, &what)?;
    }
    let options = CallOptions { deadline_usec: args.deadline.usec(), ..CallOptions::default() };
    let progress = async || left(client, &args.plugin).await;
    let call = client.drain_plugin(&args.plugin, options);
    let report = wait::watched(&format!("drain {}", args.plugin), progress, call).await?;
    if json {
        print_json(&report)?;
    } else {
        print(&output::drained(&report))?;
    }
    match report.failed.len() {
        0 => Ok(()),
        failed => bail!("{failed} could not be unmounted. {}", hints::DRAINED),
    }
}

/// Returns how many mounts a plugin still has. `None`: csid did not answer.
async fn left(client: &Client, plugin: &str) -> Option<Progress> {
    let filter = MountFilter { plugin: Some(plugin.to_owned()), ..MountFilter::default() };
    let mut mounts = client.list_mounts(filter).await.ok()?;
    let step = format!("{} mounts left", mounts.len());
    mounts.retain(|mount| !mount.error.is_empty());
    Some(Progress { step, error: mounts.pop().map(|mount| mount.error).unwrap_or_default() })
}

/// Awaits a call about a plugin, and shows the plugin's state.
async fn of_plugin<T>(client: &Client, plugin: &str, what: &str, call: impl Future<Output = T>) -> T {
    wait::watched(what, async || wait::of_plugin(client, plugin).await, call).await
}

async fn logs(client: &Client, args: Logs, tried: &mut Tried) -> anyhow::Result<()> {
    about("plugin logs", &args.plugin, tried);
    let since = args.since.map(|time| SystemTime::now() - time);
    let since = since.and_then(|since| since.duration_since(SystemTime::UNIX_EPOCH).ok());
    let options = LogOptions {
        follow: yes(args.follow),
        since: since.and_then(|since| u64::try_from(since.as_micros()).ok()),
        lines: args.lines,
        ..LogOptions::default()
    };
    let log = client.open_plugin_log(&args.plugin, options).await?;
    let copied = tokio::task::spawn_blocking(move || {
        let mut log = std::fs::File::from(log);
        std::io::copy(&mut log, &mut std::io::stdout().lock())
    });
    match copied.await? {
        // The reader has closed the pipe.
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        copied => copied.map(drop).context("cannot show the log"),
    }
}

pub async fn wait_for(
    client: &Client,
    args: PluginWait,
    json: bool,
    tried: &mut Tried,
) -> anyhow::Result<()> {
    about("plugin wait", &args.plugin, tried);
    let options = CallOptions { deadline_usec: args.deadline.usec(), ..CallOptions::default() };
    let what = format!("wait for {} ({})", args.plugin, args.service.as_str());
    let path = {
        let call = client.wait_for_plugin(&args.plugin, args.service, options);
        of_plugin(client, &args.plugin, &what, call).await?
    };
    if json {
        print_json(&json!({ "plugin": path }))?;
    }
    Ok(())
}

pub async fn snapshots(
    client: &Client,
    args: Snapshots,
    json: bool,
    tried: &mut Tried,
) -> anyhow::Result<()> {
    about("snapshots", &args.plugin, tried);
    let secrets = args.secrets.secrets_file.as_deref().map(secrets).transpose()?;
    let page = async |token: String| {
        // csid reads the descriptor of each call once, so every page needs its own.
        let secrets = secrets.as_ref().map(|secrets| secrets.seal()).transpose();
        let filter = SnapshotFilter {
            volume: args.external_id.clone(),
            token: Some(token),
            secrets: secrets.context("cannot seal the secrets in memory")?,
            credential: args.secrets.credential.clone(),
            ..SnapshotFilter::default()
        };
        Ok(client.list_snapshots(&args.plugin, filter).await?)
    };
    let snapshots = pages(&format!("list the snapshots of {}", args.plugin), page).await?;
    if json {
        print_json(&snapshots)?;
    } else if snapshots.is_empty() {
        eprintln!("No snapshots.");
    } else {
        print(&output::snapshots(&snapshots))?;
    }
    Ok(())
}

fn about(command: &'static str, plugin: &str, tried: &mut Tried) {
    tried.command = command;
    tried.plugin = Some(plugin.to_owned());
}

fn spec(args: Register) -> PluginSpec {
    let supervision = match (&args.unit, &args.socket) {
        (Some(_), _) => Supervision::Unit,
        (None, Some(_)) => Supervision::External,
        (None, None) => Supervision::Managed,
    };
    PluginSpec {
        supervision: Some(supervision),
        argv: some(args.argv),
        environment: pairs(args.env),
        credentials: some(args.load_credential),
        unit: args.unit,
        socket: args.socket,
        instance: args.instance,
        plugin_root: args.plugin_root,
        plugin_view: args.plugin_view,
        log: args.log,
        profile: args.profile,
        propagation: args.propagation,
        network: args.network,
        ..PluginSpec::default()
    }
}

/// Returns the consumers that have a volume of the plugin mounted or claimed.
async fn consumers(client: &Client, plugin: &str) -> csid_client::Result<BTreeSet<Consumer>> {
    let mounts = MountFilter { plugin: Some(plugin.to_owned()), ..MountFilter::default() };
    let volumes = VolumeFilter { plugin: Some(plugin.to_owned()), ..VolumeFilter::default() };
    let (mounts, volumes) =
        tokio::try_join!(client.mount_pages(mounts).rest(), client.volume_pages(volumes).rest())?;
    let mut consumers: BTreeSet<Consumer> = BTreeSet::new();
    for volume in volumes {
        for consumer in volume.write_claims.iter().chain(&volume.read_claims) {
            consumers.insert(Consumer::new(consumer, &volume.namespace, &volume.id));
        }
    }
    let of_mount = |m: &csid_client::MountRow| Consumer::new(&m.consumer, &m.namespace, &m.volume);
    consumers.extend(mounts.iter().map(of_mount));
    Ok(consumers)
}

async fn capacity(client: &Client, args: Capacity, json: bool, tried: &mut Tried) -> anyhow::Result<()> {
    about("plugin capacity", &args.plugin, tried);
    let attachment_mode = if args.block { AttachmentMode::BlockDevice } else { AttachmentMode::FileSystem };
    let uses = args.access_mode.into_iter().map(|access_mode| Capability { access_mode, attachment_mode });
    let options = CapacityOptions {
        deadline_usec: args.deadline.usec(),
        capabilities: some(uses.collect()),
        parameters: pairs(args.parameter),
        topology: args.topology.and_then(|Topology(segments)| pairs(segments)),
        ..CapacityOptions::default()
    };
    let call = client.capacity(&args.plugin, options);
    let available = wait::quietly(&format!("ask {} for its capacity", args.plugin), call).await?;
    if json {
        print_json(&json!({ "available": available }))?;
    } else {
        print(&output::size(available))?;
    }
    Ok(())
}

async fn delete_snapshot(
    client: &Client,
    args: DeleteSnapshot,
    json: bool,
    tried: &mut Tried,
) -> anyhow::Result<()> {
    about("plugin delete-snapshot", &args.plugin, tried);
    confirmed(&args.snapshot, &args.yes, "The plugin deletes the snapshot and its data.")?;
    let options = CallOptions {
        deadline_usec: args.deadline.usec(),
        secrets: sealed(args.secrets.secrets_file.as_deref())?,
        credential: args.secrets.credential,
        ..CallOptions::default()
    };
    let call = client.delete_snapshot(&args.plugin, &args.snapshot, options);
    wait::quietly(&format!("delete snapshot {}", args.snapshot), call).await?;
    done(json)?;
    Ok(())
}

/// The limit of restarts of a list whose token the plugin no longer knows.
const RESTARTS: usize = 3;
const ABORTED: u32 = 10;

/// Returns all pages of a list. It may change meanwhile. After ABORTED it starts again (CSI rule 40).
pub(super) async fn pages<T>(
    what: &str,
    page: impl AsyncFn(String) -> anyhow::Result<(Vec<T>, String)>,
) -> anyhow::Result<Vec<T>> {
    let (mut all, mut seen, mut token, mut restarts) = (Vec::new(), BTreeSet::new(), String::new(), 0);
    loop {
        let is_first = token.is_empty();
        match wait::quietly(what, page(token)).await {
            Ok((rows, next)) => {
                all.extend(rows);
                if next.is_empty() {
                    return Ok(all);
                }
                if !seen.insert(next.clone()) {
                    bail!("the plugin's list has no end: it returned the same token again");
                }
                token = next;
            }
            Err(error) if !is_first && restarts < RESTARTS && is_stale(&error) => {
                restarts += 1;
                all.clear();
                seen.clear();
                token = String::new();
            }
            Err(error) => return Err(error),
        }
    }
}

fn is_stale(error: &anyhow::Error) -> bool {
    let csids = error.downcast_ref::<Error>().and_then(Error::csid);
    csids.is_some_and(|error| error.details.grpc_code == Some(ABORTED))
}
