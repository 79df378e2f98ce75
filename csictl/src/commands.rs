//! One function for each command: it makes options of the arguments, calls csid, and passes the answer to `output`.

pub mod cluster;
mod common;
mod events;
mod exec;
mod node;
mod operated;
mod plugin;
mod questions;
mod server;
mod spec;
mod stats;
mod volume;
mod wait_volumes;

use std::{path::Path, process::ExitCode, time::SystemTime};

use anyhow::{Context, bail};
use csid_client::{
    AttachmentMode, CallOptions, Client, MountFilter, MountOptions, ReconcileOptions, UnmountOptions, Via,
};
use serde_json::json;

use crate::{
    args::{AdoptMount, Cli, Cluster, Command, Deadline, Mount, Mounts, Name, Reconcile, Unmount, Volume},
    doctor, generate,
    helpers::fstab::faults,
    hints::Tried,
    installed,
    operator::Servers,
    output::{self, plain, print, print_json},
    shell::quoted,
    wait,
};
use common::{begin, done, pairs, sealed, some, yes};

/// An error, and the facts about the command that a hint needs.
pub struct Failure {
    pub error: anyhow::Error,
    pub tried: Tried,
}

pub async fn run(cli: Cli) -> Result<ExitCode, Failure> {
    let mut tried = Tried::default();
    dispatch(cli, &mut tried).await.map_err(|error| Failure { error, tried })
}

async fn dispatch(cli: Cli, tried: &mut Tried) -> anyhow::Result<ExitCode> {
    let json = cli.json;
    let target = cli.target();
    let operator = cli.operator();
    let by_operator = cli.is_by_operator();
    let servers = || Servers::open(operator.clone(), json);
    let connect = || Client::connect(&target);
    match cli.command {
        Command::Status => status(&connect().await?, json).await?,
        Command::Volume(command) if by_operator => match *command {
            Volume::Validate { volume, access_mode, block, .. } => {
                return questions::validate(&servers()?, volume, (access_mode, block), json, tried).await;
            }
            Volume::Snapshot(args) => questions::snapshot(&servers()?, args, json, tried).await?,
            command => operated::volume(&servers()?, command, json, tried).await?,
        },
        Command::Plugin(command) if by_operator => {
            questions::plugin(&servers()?, *command, json, tried).await?
        }
        Command::Snapshots(args) if by_operator => {
            questions::snapshots(&servers()?, args, json, tried).await?
        }
        Command::Claims(args) if by_operator => operated::claims(&servers()?, args, json, tried).await?,
        Command::Cluster(Cluster::Status) if by_operator => {
            server::cluster_status(&servers()?, json, tried).await?
        }
        Command::Explain { volume } if by_operator => {
            operated::explain(&servers()?, volume, json, tried).await?
        }
        Command::Release(args) if by_operator => operated::release(&servers()?, args, json, tried).await?,
        Command::Cluster(command) => cluster::cluster(&connect().await?, command, json, tried).await?,
        Command::Plugin(command) => return plugin::plugin(&target, *command, json, tried).await,
        Command::Snapshots(args) => plugin::snapshots(&connect().await?, args, json, tried).await?,
        Command::Volume(command) => {
            return volume::volume(&connect().await?, *command, json, tried).await;
        }
        Command::Claim(args) => volume::claim(&connect().await?, args, json, tried).await?,
        Command::Release(args) => volume::release(&connect().await?, args, json, tried).await?,
        Command::Claims(args) => volume::claims(&connect().await?, args, json, tried).await?,
        Command::Explain { volume } => volume::explain(&connect().await?, volume, json, tried).await?,
        Command::Wait(args) => plugin::wait_for(&connect().await?, args, json, tried).await?,
        Command::WaitVolumes(args) => return wait_volumes::wait_volumes(&target, args, json).await,
        Command::Mount(args) => mount(&connect().await?, *args, None, json, tried).await?,
        Command::AdoptMount(args) => {
            let AdoptMount { published_path, staging_path, mount: args } = *args;
            let adopted = Some(Adopted { published_path, staging_path });
            mount(&connect().await?, args, adopted, json, tried).await?
        }
        Command::Unmount(args) => unmount(&connect().await?, args, json, tried).await?,
        Command::Node(command) => node::node(&servers()?, command, json, tried).await?,
        Command::Server(command) => return server::server(&servers()?, command, json, tried).await,
        Command::Mounts(args) => mounts(&connect().await?, args, json, tried).await?,
        Command::HasMount { path } => {
            tried.command = "has-mount";
            let mounted = connect().await?.has_mount(&path).await?;
            if json {
                print_json(&json!({ "mounted": mounted }))?;
            }
            return Ok(ExitCode::from(u8::from(!mounted)));
        }
        Command::Operations => {
            let operations = connect().await?.list_operations().await?;
            if json {
                print_json(&operations)?;
            } else if operations.is_empty() {
                eprintln!("No operations.");
            } else {
                print(&output::operations(&operations, SystemTime::now()))?;
            }
        }
        Command::Cancel { id } => {
            tried.command = "cancel";
            connect().await?.cancel_operation(&id).await?;
            done(json)?;
        }
        Command::Events(args) => events::events(&target, args, json).await?,
        Command::Reconcile(args) => reconcile(&connect().await?, args, json, tried).await?,
        Command::Reload => {
            tried.command = "reload";
            connect().await?.reload(CallOptions::default()).await?;
            done(json)?;
        }
        Command::Doctor => return doctor::doctor(&target, json, cli.verbose).await,
        Command::CheckConfig { fstab } => return check_config(&fstab, json),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            generate::completions(shell, &mut script);
            print(&String::from_utf8_lossy(&script))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

async fn status(client: &Client, json: bool) -> anyhow::Result<()> {
    let (manager, plugins, mounts, operations) = tokio::try_join!(
        client.manager(),
        client.list_plugins(),
        client.mount_pages(MountFilter::default()).rest(),
        client.list_operations(),
    )?;
    let via = match client.via() {
        Via::Socket(path) => path.display().to_string(),
        Via::SystemBus => "the system bus".to_owned(),
    };
    // Only a csid with a damaged journal answers, and only to callers that may start a new one.
    let begin =
        ReconcileOptions { dry_run: Some(true), new_journal: Some(true), ..ReconcileOptions::default() };
    let damaged = match manager.state.as_str() {
        "degraded" => client.reconcile(begin).await.ok(),
        _ => None,
    };
    let cluster = cluster::present(client, &manager.features).await;
    let status = output::Status { via, manager, cluster, plugins, mounts, operations, damaged };
    if json {
        print_json(&status.json()?)?
    } else {
        print(&status.text())?
    }
    Ok(())
}

/// The paths of a mount that another manager made.
struct Adopted {
    published_path: String,
    staging_path: Option<String>,
}

async fn mount(
    client: &Client,
    args: Mount,
    adopted: Option<Adopted>,
    json: bool,
    tried: &mut Tried,
) -> anyhow::Result<()> {
    tried.command = if adopted.is_some() { "adopt-mount" } else { "mount" };
    tried.plugin.clone_from(&args.plugin);
    let tag = args.tag.as_ref().map(|tag| format!(" --tag {}", quoted(tag))).unwrap_or_default();
    let id = begin(&args.name, &tag, args.wait.operation_id.clone(), tried)?;
    let what = format!("{} {}", tried.command, tried.mount.as_deref().unwrap_or_default());
    let adopts = adopted.is_some();
    let (published_path, staging_path) =
        adopted.map_or((None, None), |at| (Some(at.published_path), at.staging_path));
    let name = args.name;
    let options = MountOptions {
        deadline_usec: args.wait.deadline.usec(),
        operation_id: Some(id.clone()),
        secrets: sealed(args.secrets.secrets_file.as_deref())?,
        credential: args.secrets.credential,
        plugin: args.plugin,
        external_id: args.external_id,
        volume_context: pairs(args.context),
        capabilities: None,
        publish_context: pairs(args.publish_context),
        fs_type: args.fs_type,
        mount_flags: some(args.mount_flag),
        mount_group: args.mount_group,
        access_mode: args.access_mode,
        attachment_mode: args.block.then_some(AttachmentMode::BlockDevice),
        read_only: yes(args.read_only),
        tag: args.tag,
        target: args.target,
        propagation: args.propagation,
        suid: yes(args.suid),
        dev: yes(args.dev),
        restore: args.restore,
        bind: args.bind.unit(),
        grace_usec: Deadline::usec_of(args.bind.grace),
        wait_usec: Deadline::usec_of(args.wait_for),
        staging_path,
        published_path,
        ..MountOptions::default()
    };
    let call = async {
        let Name { namespace, volume, consumer } = &name;
        match adopts {
            true => client.adopt_mount(namespace, volume, consumer, options).await,
            false => client.mount(namespace, volume, consumer, options).await,
        }
    };
    let mounted = wait::operation(client, &id, &what, call).await?;
    if json {
        print_json(&mounted)?
    } else {
        print(&mounted.source)?
    }
    Ok(())
}

async fn unmount(client: &Client, args: Unmount, json: bool, tried: &mut Tried) -> anyhow::Result<()> {
    tried.command = "unmount";
    if args.forget {
        volume::confirm_forgetting(&args.name, &args.confirm)?;
    }
    let tag = match &args.tag {
        Some(tag) => format!(" --tag {}", quoted(tag)),
        None if args.all_tags => " --all-tags".to_owned(),
        None => String::new(),
    };
    let id = begin(&args.name, &tag, args.wait.operation_id.clone(), tried)?;
    let what = format!("unmount {}", tried.mount.as_deref().unwrap_or_default());
    let name = args.name;
    let options = UnmountOptions {
        deadline_usec: args.wait.deadline.usec(),
        operation_id: Some(id.clone()),
        tag: args.tag,
        all_tags: yes(args.all_tags),
        // A forget that finds no mount must fail, as the caller meant another one.
        must_exist: yes(args.must_exist || args.forget),
        force: yes(args.force),
        force_hung: yes(args.force_hung),
        wait: args.no_wait.then_some(false),
        forget: yes(args.forget),
        ..UnmountOptions::default()
    };
    let call = client.unmount(&name.namespace, &name.volume, &name.consumer, options);
    wait::operation(client, &id, &what, call).await?;
    done(json)?;
    Ok(())
}

/// Lists mounts with the providers of their plugins.
async fn mounts(client: &Client, args: Mounts, json: bool, tried: &mut Tried) -> anyhow::Result<()> {
    tried.command = "mounts";
    let filter = MountFilter {
        namespace: args.namespace,
        volume: args.volume,
        consumer: args.consumer,
        tag: args.tag,
        plugin: args.plugin,
        state: args.state,
        uid: args.uid,
        target: args.target,
        ..MountFilter::default()
    };
    let (mounts, plugins) = tokio::try_join!(client.mount_pages(filter).rest(), client.list_plugins())?;
    let provider =
        |id: &str| plugins.iter().find(|plugin| plugin.id == id).map_or("", |plugin| &plugin.provider);
    if json {
        let mut rows = Vec::new();
        for mount in &mounts {
            let mut row = serde_json::to_value(mount)?;
            row["provider"] = json!(provider(&mount.plugin));
            rows.push(row);
        }
        print_json(&rows)?;
    } else if mounts.is_empty() {
        eprintln!("No mounts.");
    } else {
        print(&output::mounts(&mounts, provider, args.wide))?;
    }
    Ok(())
}

async fn reconcile(client: &Client, args: Reconcile, json: bool, tried: &mut Tried) -> anyhow::Result<()> {
    tried.command = "reconcile";
    let options = ReconcileOptions {
        dry_run: yes(args.dry_run),
        remove_orphans: yes(args.remove_orphans),
        new_journal: yes(args.new_journal),
        ..ReconcileOptions::default()
    };
    let report = wait::quietly("reconcile", client.reconcile(options)).await?;
    if json {
        print_json(&report)?
    } else {
        print(&output::report(&report, args.dry_run, args.remove_orphans))?
    }
    if report.failed.is_empty() { Ok(()) } else { bail!("{} could not be reconciled", report.failed.len()) }
}

/// Checks the configuration, by csid, because only csid can read it, and the lines of fstab.
fn check_config(fstab: &Path, json: bool) -> anyhow::Result<ExitCode> {
    let faults = faults(fstab);
    if !json {
        faults.iter().for_each(|fault| eprintln!("csictl: {}", plain(fault)));
    }
    let mut csid = installed::csid()?;
    csid.arg("--check-config");
    let (status, error) = if json {
        let output = csid.output().context("cannot run csid")?;
        (output.status, String::from_utf8_lossy(&output.stderr).trim().to_owned())
    } else {
        (csid.status().context("cannot run csid")?, String::new())
    };
    let valid = status.success() && faults.is_empty();
    if json {
        let errors = (!error.is_empty()).then_some(error).into_iter().chain(faults).collect::<Vec<_>>();
        print_json(&json!({ "valid": valid, "error": errors.join("\n") }))?;
    }
    Ok(ExitCode::from(u8::from(!valid)))
}
