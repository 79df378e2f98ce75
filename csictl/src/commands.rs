//! One function per command: arguments to options, one call, the answer to `output`.

mod exec;
mod plugin;
mod spec;
mod stats;
mod volume;

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, BufRead, IsTerminal, Read, Write},
    path::Path,
    process::{Command as Process, ExitCode},
    time::{Duration, SystemTime},
};

use anyhow::{Context, bail};
use csid_client::{
    AttachmentMode, CallOptions, Client, Error, Follower, MountFilter, MountOptions, News, ReconcileOptions,
    Secrets, Target, UnmountOptions, Via,
};
use serde_json::json;
use zeroize::Zeroizing;

use crate::{
    args::{Cli, Command, Deadline, Events, Mount, Mounts, Name, Pair, Reconcile, Unmount},
    generate,
    hints::Tried,
    output::{self, say, say_json},
    wait,
};

/// More than any plugin's secrets, and less than what would be a mistake.
const SECRETS_MOST: u64 = 64 * 1024;
const PAGE: u32 = 256;

/// An error, and what was tried: enough for a hint.
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
    let connect = || Client::connect(&target);
    match cli.command {
        Command::Status => status(&connect().await?, json).await?,
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
        Command::Mount(args) => mount(&connect().await?, *args, json, tried).await?,
        Command::Unmount(args) => unmount(&connect().await?, args, json, tried).await?,
        Command::Mounts(args) => mounts(&connect().await?, args, json, tried).await?,
        Command::HasMount { path } => {
            tried.command = "has-mount";
            let mounted = connect().await?.has_mount(&path).await?;
            if json {
                say_json(&json!({ "mounted": mounted }))?;
            }
            return Ok(ExitCode::from(u8::from(!mounted)));
        }
        Command::Operations => {
            let operations = connect().await?.list_operations().await?;
            if json {
                say_json(&operations)?;
            } else if operations.is_empty() {
                eprintln!("Nothing is under way.");
            } else {
                say(&output::operations(&operations, SystemTime::now()))?;
            }
        }
        Command::Cancel { id } => {
            tried.command = "cancel";
            connect().await?.cancel_operation(&id).await?;
            done(json)?;
        }
        Command::Events(args) => events(&target, args, json).await?,
        Command::Reconcile(args) => reconcile(&connect().await?, args, json, tried).await?,
        Command::Reload => {
            tried.command = "reload";
            connect().await?.reload(CallOptions::default()).await?;
            done(json)?;
        }
        Command::CheckConfig => return check_config(json),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            generate::completions(shell, &mut script);
            say(&String::from_utf8_lossy(&script))?;
        }
        Command::GenMan { directory } => generate::man(&directory)
            .with_context(|| format!("cannot write the man pages to {}", directory.display()))?,
    }
    Ok(ExitCode::SUCCESS)
}

/// A command without an answer: nothing for people, an empty object for programs.
fn done(json: bool) -> io::Result<()> {
    if json { say("{}") } else { Ok(()) }
}

async fn status(client: &Client, json: bool) -> anyhow::Result<()> {
    let (manager, plugins, mounts, operations) = tokio::try_join!(
        client.manager(),
        client.list_plugins(),
        client.list_mounts(MountFilter::default()),
        client.list_operations(),
    )?;
    let via = match client.via() {
        Via::Socket(path) => path.display().to_string(),
        Via::SystemBus => "the system bus".to_owned(),
    };
    // Answered by a csid that waits for a new journal, to those who may begin one.
    let begin =
        ReconcileOptions { dry_run: Some(true), new_journal: Some(true), ..ReconcileOptions::default() };
    let damaged = match manager.state.as_str() {
        "degraded" => client.reconcile(begin).await.ok(),
        _ => None,
    };
    let status = output::Status { via, manager, plugins, mounts, operations, damaged };
    if json {
        say_json(&status.json()?)?
    } else {
        say(&status.text())?
    }
    Ok(())
}

async fn mount(client: &Client, args: Mount, json: bool, tried: &mut Tried) -> anyhow::Result<()> {
    tried.command = "mount";
    tried.plugin.clone_from(&args.plugin);
    let id = begin(&args.name, args.wait.operation_id.clone(), tried)?;
    let what = format!("mount {}", tried.mount.as_deref().unwrap_or_default());
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
    };
    let call = client.mount(&name.namespace, &name.volume, &name.consumer, options);
    let mounted = wait::operation(client, &id, &what, call).await?;
    if json {
        say_json(&mounted)?
    } else {
        say(&mounted.source)?
    }
    Ok(())
}

async fn unmount(client: &Client, args: Unmount, json: bool, tried: &mut Tried) -> anyhow::Result<()> {
    tried.command = "unmount";
    let id = begin(&args.name, args.wait.operation_id.clone(), tried)?;
    let what = format!("unmount {}", tried.mount.as_deref().unwrap_or_default());
    let name = args.name;
    let options = UnmountOptions {
        deadline_usec: args.wait.deadline.usec(),
        operation_id: Some(id.clone()),
        tag: args.tag,
        force: yes(args.force),
        ..UnmountOptions::default()
    };
    let call = client.unmount(&name.namespace, &name.volume, &name.consumer, options);
    wait::operation(client, &id, &what, call).await?;
    done(json)?;
    Ok(())
}

/// The operation's id, and both it and the mount's name kept for a hint.
fn begin(name: &Name, id: Option<String>, tried: &mut Tried) -> anyhow::Result<String> {
    let id = match id {
        Some(id) => id,
        None => wait::operation_id().context("cannot make an operation id")?,
    };
    let words = [&name.namespace, &name.volume, &name.consumer].map(|word| quoted(word));
    tried.mount = Some(words.join(" "));
    tried.volume = Some(words[..2].join(" "));
    tried.operation = Some(id.clone());
    Ok(id)
}

/// Mounts, with the provider of their plugins.
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
    };
    let (mounts, plugins) = tokio::try_join!(client.list_mounts(filter), client.list_plugins())?;
    let provider =
        |id: &str| plugins.iter().find(|plugin| plugin.id == id).map_or("", |plugin| &plugin.provider);
    if json {
        let mut rows = Vec::new();
        for mount in &mounts {
            let mut row = serde_json::to_value(mount)?;
            row["provider"] = json!(provider(&mount.plugin));
            rows.push(row);
        }
        say_json(&rows)?;
    } else if mounts.is_empty() {
        eprintln!("No mounts.");
    } else {
        say(&output::mounts(&mounts, provider))?;
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
        say_json(&report)?
    } else {
        say(&output::report(&report, args.dry_run, args.remove_orphans))?
    }
    if report.failed.is_empty() { Ok(()) } else { bail!("{} could not be reconciled", report.failed.len()) }
}

async fn events(target: &Target, args: Events, json: bool) -> anyhow::Result<()> {
    let client = Client::connect(target).await?;
    if args.follow {
        return follow(target, client, args.since, json).await;
    }
    let mut cursor = args.since.unwrap_or(0);
    loop {
        let (events, gap) = client.get_events(cursor, PAGE).await?;
        // Without --since nobody asked for those that csid no longer keeps.
        if gap && (args.since.is_some() || cursor > 0) {
            tell(&News::Gap, json)?;
        }
        let Some(last) = events.last() else { return Ok(()) };
        cursor = last.sequence;
        for event in events {
            tell(&News::Event(event), json)?;
        }
    }
}

/// Until Ctrl-C, over restarts of csid.
async fn follow(target: &Target, client: Client, since: Option<u64>, json: bool) -> anyhow::Result<()> {
    let mut journal = client.manager().await?.journal_id;
    let mut follower = client.follow(since).await?;
    loop {
        match follower.next().await {
            Ok(news) => tell(&news, json)?,
            Err(Error::Disconnected(_) | Error::NotRunning(_)) => {
                eprintln!("csictl: csid went away; waiting until it is back");
                follower = again(target, &mut journal, follower.cursor(), json).await?;
                eprintln!("csictl: csid is back");
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// A follower on a new connection, from the cursor on; another journal is told from its beginning, as a gap.
async fn again(target: &Target, journal: &mut String, cursor: u64, json: bool) -> anyhow::Result<Follower> {
    loop {
        tokio::time::sleep(Duration::from_millis(500)).await;
        let attempt = async {
            let client = Client::connect(target).await?;
            let now = client.manager().await?.journal_id;
            let since = if now == *journal { cursor } else { 0 };
            Ok((client.follow(Some(since)).await?, now))
        };
        match attempt.await {
            Ok((follower, now)) => {
                if now != *journal {
                    tell(&News::Gap, json)?;
                    *journal = now;
                }
                return Ok(follower);
            }
            Err(Error::Connect(_) | Error::Disconnected(_) | Error::NotRunning(_)) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

fn tell(news: &News, json: bool) -> io::Result<()> {
    match (news, json) {
        (News::Event(event), false) => say(&output::event(event)),
        (News::Event(event), true) => say(&output::event_json(event)),
        (News::Gap, true) => say(r#"{"gap":true}"#),
        (News::Gap, false) => {
            eprintln!("csictl: a gap: csid no longer keeps the events that came here");
            Ok(())
        }
    }
}

/// csid itself reads its configuration: nobody else knows what it takes.
fn check_config(json: bool) -> anyhow::Result<ExitCode> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut path = std::env::split_paths(&path).collect::<Vec<_>>();
    // Not in everybody's PATH, and there csid is.
    path.push("/usr/sbin".into());
    let mut csid = Process::new("csid");
    csid.arg("--check-config").env("PATH", std::env::join_paths(path)?);
    let (status, error) = if json {
        let output = csid.output().context("cannot run csid")?;
        (output.status, String::from_utf8_lossy(&output.stderr).trim().to_owned())
    } else {
        (csid.status().context("cannot run csid")?, String::new())
    };
    if json {
        say_json(&json!({ "valid": status.success(), "error": error }))?;
    }
    Ok(ExitCode::from(u8::from(!status.success())))
}

/// The secrets of a call, when a file with them was named.
fn sealed(path: Option<&Path>) -> anyhow::Result<Option<csid_client::SealedSecrets>> {
    path.map(|path| secrets(path)?.seal().context("cannot seal the secrets in memory")).transpose()
}

fn secrets(path: &Path) -> anyhow::Result<Secrets> {
    let mut source: Box<dyn Read> = if path == Path::new("-") {
        Box::new(io::stdin().lock())
    } else {
        Box::new(File::open(path).with_context(|| format!("cannot open {}", path.display()))?)
    };
    // All of it at once: a buffer that grows leaves copies behind.
    let mut text = Zeroizing::new(Vec::with_capacity(SECRETS_MOST as usize + 1));
    source.by_ref().take(SECRETS_MOST + 1).read_to_end(&mut text).context("cannot read the secrets")?;
    if text.len() as u64 > SECRETS_MOST {
        bail!("{} is larger than 64 KiB, too large for secrets", path.display());
    }
    Secrets::from_json(&text).with_context(|| format!("cannot use {}", path.display()))
}

/// The name once more, from the command line or typed: what follows cannot be taken back.
fn confirmed(name: &str, given: &Option<String>, what: &str) -> anyhow::Result<()> {
    let typed = match given {
        Some(typed) => typed.clone(),
        None if !io::stdin().is_terminal() => {
            bail!("{what} To do it without being asked: --yes {}", quoted(name));
        }
        None => {
            eprint!("{what}\nType {} to go on: ", output::plain(name));
            io::stderr().flush()?;
            let mut typed = String::new();
            io::stdin().lock().read_line(&mut typed)?;
            typed.trim_end_matches(['\n', '\r']).to_owned()
        }
    };
    match typed == name {
        true => Ok(()),
        false => bail!("that is not {}: nothing was done", output::plain(name)),
    }
}

/// A flag that was not given sends nothing.
fn yes(flag: bool) -> Option<bool> {
    flag.then_some(true)
}

fn some<T>(list: Vec<T>) -> Option<Vec<T>> {
    (!list.is_empty()).then_some(list)
}

fn pairs(pairs: Vec<Pair>) -> Option<BTreeMap<String, String>> {
    (!pairs.is_empty()).then(|| pairs.into_iter().map(|Pair(key, value)| (key, value)).collect())
}

/// For a shell, so that a hint can be copied.
pub fn quoted(word: &str) -> String {
    let safe = |c: char| c.is_ascii_alphanumeric() || "._-/:@%+=,".contains(c);
    if !word.is_empty() && word.chars().all(safe) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hints_can_be_copied_into_a_shell() {
        assert_eq!(quoted("a/b.c"), "a/b.c");
        assert_eq!(quoted("vol[0]"), "'vol[0]'");
        assert_eq!(quoted("it's"), r"'it'\''s'");
        assert_eq!(quoted(""), "''");
    }

    #[test]
    fn an_error_about_secrets_tells_none() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("secrets");
        std::fs::write(&path, r#"{"password": ["hunter2"]}"#).unwrap();
        let error = format!("{:#}", secrets(&path).map(|_| ()).unwrap_err());
        assert!(error.contains("not a JSON object of strings") && !error.contains("hunter2"), "{error}");
        std::fs::write(&path, vec![b' '; 70_000]).unwrap();
        assert!(secrets(&path).is_err_and(|error| error.to_string().contains("larger than 64 KiB")));
    }
}
