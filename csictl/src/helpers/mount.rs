//! mount.csi.

use std::{
    ffi::{OsStr, OsString},
    os::unix::fs::MetadataExt,
    path::Path,
    pin::pin,
    time::Duration,
};

use csid_client::{Descriptor, Error, Kind, MountOptions, Mounted, UnmountOptions};
use rustix::process::geteuid;
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::{
    arguments::MountArguments,
    failure::HelperFailure,
    fstab,
    lock::TargetLock,
    mount_table::MountEntry,
    options::{HelperOptions, volume},
    session::{Asking, for_client, mount_table, open_target},
    unit, utab,
};

/// How long a cancelled mount is waited for until it is rolled back.
const ROLL_BACK: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(100);

/// The mount that is asked for.
struct Request {
    namespace: String,
    volume: String,
    consumer: String,
    target: String,
    options: MountOptions,
    /// csid had a mount at the target before. It stays, however this helper ends.
    existed: bool,
}

pub async fn mount(words: Vec<OsString>) -> Result<(), HelperFailure> {
    let arguments = MountArguments::parse(words)?;
    if !geteuid().is_root() {
        return Err(usage(
            "only root mounts; the words user and users of fstab have no effect for the type csi",
        ));
    }
    let mut options = HelperOptions::parse(&arguments.options, arguments.sloppy)?;
    options.fs_type = options.fs_type.take().or(arguments.fs_type);
    let target = arguments.target;
    if options.remount {
        return if arguments.fake { Ok(()) } else { remount(&target, options).await };
    }
    let (namespace, volume) = named(&arguments.source, &target)?;
    let consumer = fstab::consumer(&options, &target)?;
    if !options.netdev {
        match (fstab::ends_the_boot(&target), unit::is_around()) {
            (Some(text), false) => return Err(HelperFailure::Usage(text)),
            (Some(text), true) => eprintln!("mount.csi: {text}"),
            (None, true) => eprintln!(
                "mount.csi: the mount unit of {target} needs the option _netdev: without it nothing orders the mount after csid's start"
            ),
            (None, false) => {}
        }
    }
    if arguments.fake {
        return Ok(());
    }
    let mut stop = Stop::listen()?;
    let mut asking = stop.unless(Asking::open("mount", options.deadline())).await?;
    let _lock = locked(&target, &asking, &mut stop).await?;
    let row = stop.unless(asking.row(&target)).await?;
    let existed = row.as_ref().is_some_and(|row| row.state == "mounted");
    // What another boot left at the target, for a line that may have changed since.
    let lost = row.filter(|row| row.state == "lost" && row.consumer == consumer);
    let request = Request { namespace, volume, consumer, options: options.of_call(&target), target, existed };
    asking.about(
        &request.namespace,
        &request.volume,
        &request.consumer,
        options.tag.as_deref().unwrap_or(""),
    );
    let mounted = match request.send(&asking, &mut stop).await {
        Err(failure) if let Some(row) = lost.filter(|_| failure.is_conflict()) => {
            let options = UnmountOptions { tag: Some(row.tag), ..UnmountOptions::default() };
            let names = (row.namespace.as_str(), row.volume.as_str(), row.consumer.as_str());
            stop.unless(asking.unmount(names, options)).await?;
            request.send(&asking, &mut stop).await?
        }
        answer => answer?,
    };
    let Some(entry) = seen(&request.target, &mounted.source)? else {
        request.undo(&asking).await?;
        let undone = if existed { "" } else { "; the mount was undone" };
        return Err(HelperFailure::Failed(format!(
            "{} is not mounted in this mount namespace: csid mounts in the host's{undone}",
            request.target
        )));
    };
    if !arguments.no_utab
        && let Err(why) = utab::note(&entry, &mounted.source, &request.target, options.netdev).await
    {
        eprintln!(
            "mount.csi: {} is mounted, but umount cannot know that it is csid's ({why}). To end it: csictl unmount {}",
            request.target,
            asking.tried.mount.as_deref().unwrap_or_default()
        );
    }
    // A unit's start has systemd read both files when this process ends.
    if options.netdev && !arguments.no_utab && !unit::is_around() {
        let is_ordered = tokio::select! {
            is_ordered = unit::wait_for_order(&request.target) => is_ordered,
            // The mount is made, and stays.
            () = stop.wait() => false,
        };
        if !is_ordered {
            eprintln!(
                "mount.csi: {} is mounted, but systemd does not know the mount yet; a shutdown now may stop csid before the unmount",
                request.target
            );
        }
    }
    Ok(())
}

/// Returns the volume's namespace and name. mount(8) makes the source an absolute path if the current directory has a file of that name.
fn named(source: &str, target: &str) -> Result<(String, String), HelperFailure> {
    // In another directory a link of another user could name another volume.
    let in_root = || {
        let is_there = std::env::current_dir().is_ok_and(|directory| directory == Path::new("/"));
        source.strip_prefix('/').filter(|_| is_there).map(str::to_owned)
    };
    let in_line = || fstab::source_of(target).filter(|own| is_same_file(own, source));
    let own = match source.starts_with('/') {
        true => in_line().or_else(in_root),
        false => Some(source.to_owned()),
    };
    own.as_deref().and_then(volume).ok_or_else(|| {
        let why = if source.starts_with('/') {
            "; the current directory has that name: mount it from /"
        } else {
            ""
        };
        HelperFailure::Usage(format!("the source {source} is not NAMESPACE/VOLUME{why}"))
    })
}

fn is_same_file(one: &str, other: &str) -> bool {
    let number = |path| std::fs::metadata(path).map(|file| (file.dev(), file.ino())).ok();
    number(one).is_some_and(|one| number(other) == Some(one))
}

/// Checks that csid's mount at the target has these options. csid changes no option of a mount.
async fn remount(target: &str, options: HelperOptions) -> Result<(), HelperFailure> {
    let mut asking = Asking::open("mount", options.deadline()).await?;
    let Some(row) = asking.row(target).await?.filter(|row| row.state == "mounted") else {
        return Err(HelperFailure::Failed(format!("no volume of csid's is mounted at {target}")));
    };
    asking.about(&row.namespace, &row.volume, &row.consumer, &row.tag);
    let tag = (!row.tag.is_empty()).then_some(row.tag);
    let options = MountOptions { tag, ..options.of_call(target) };
    let (namespace, volume, consumer) = (row.namespace, row.volume, row.consumer);
    // The same call again is answered alike. With other options it is AlreadyExists.
    let target = target.to_owned();
    let request = Request { namespace, volume, consumer, target, options, existed: true };
    request.send(&asking, &mut Stop::listen()?).await.map(|_| ())
}

/// Waits until no other mount.csi mounts at the target. What this one finds mounted afterwards is not its own.
async fn locked(target: &str, asking: &Asking, stop: &mut Stop) -> Result<Option<TargetLock>, HelperFailure> {
    let locked = tokio::select! {
        locked = TargetLock::wait(target, asking.deadline) => locked,
        () = stop.wait() => {
            return Err(HelperFailure::Cancelled(format!("cancelled; another mount at {target} was under way")));
        }
    };
    match locked {
        Ok(None) => Err(HelperFailure::Failed(format!("another mount at {target} has not ended in time"))),
        Ok(lock) => Ok(lock),
        Err(error) => {
            eprintln!("mount.csi: {target} is mounted without a lock against another mount there: {error}");
            Ok(None)
        }
    }
}

/// The signals that cancel a mount.
struct Stop {
    terminate: Signal,
    interrupt: Signal,
}

impl Stop {
    fn listen() -> Result<Self, HelperFailure> {
        let cannot = |error| HelperFailure::Failed(format!("cannot wait for signals: {error}"));
        Ok(Self {
            terminate: signal(SignalKind::terminate()).map_err(cannot)?,
            interrupt: signal(SignalKind::interrupt()).map_err(cannot)?,
        })
    }

    /// Waits for what comes before the mount. A signal ends the wait.
    async fn unless<T>(
        &mut self,
        before: impl Future<Output = Result<T, HelperFailure>>,
    ) -> Result<T, HelperFailure> {
        tokio::select! {
            done = before => done,
            () = self.wait() => Err(HelperFailure::Cancelled("cancelled; nothing is mounted".to_owned())),
        }
    }

    async fn wait(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

/// Returns the mount at the target in this process's mount namespace, if it is of the volume at `source`.
fn seen(target: &str, source: &str) -> Result<Option<MountEntry>, HelperFailure> {
    let table = mount_table()?;
    let [at, own] = [target, source].map(|path| table.at(OsStr::new(path)));
    Ok(at.zip(own).filter(|(at, own)| at.shows_the_same(own)).map(|(at, _)| at.clone()))
}

impl Request {
    /// Mounts. SIGTERM and SIGINT cancel the mount.
    async fn send(&self, asking: &Asking, stop: &mut Stop) -> Result<Mounted, HelperFailure> {
        let target_fd = self.automount()?;
        let mut call = pin!(asking.session.ask(Some(asking.deadline), |client, left| {
            let options = MountOptions {
                deadline_usec: left,
                operation_id: Some(asking.id.clone()),
                target_fd: target_fd.as_ref().and_then(|fd| for_client(fd, &client)),
                ..self.options.clone()
            };
            async move { client.mount(&self.namespace, &self.volume, &self.consumer, options).await }
        }));
        tokio::select! {
            answer = &mut call => return answer.map_err(|error| asking.failed(error)),
            () = stop.wait() => {}
        }
        let answer = tokio::select! {
            answer = &mut call => answer,
            never = cancel(asking) => match never {},
        };
        match answer {
            Ok(_) => self.undo(asking).await?,
            Err(Error::Csid(error)) if error.kind == Kind::Cancelled => {}
            Err(error) => return Err(asking.failed(error)),
        }
        if self.existed {
            return Err(HelperFailure::Cancelled(format!("cancelled; {} stays mounted", self.target)));
        }
        let gone = tokio::time::timeout(ROLL_BACK, async {
            while !matches!(asking.row(&self.target).await, Ok(None)) {
                tokio::time::sleep(PAUSE).await;
            }
        });
        Err(HelperFailure::Cancelled(match gone.await {
            Ok(()) => "cancelled; nothing is mounted".to_owned(),
            Err(_) => "cancelled; csid rolls the mount back".to_owned(),
        }))
    }

    /// Returns a descriptor of an automount at the target. csid must not walk there, where it would wait for this mount. `None`: there is
    /// no automount.
    fn automount(&self) -> Result<Option<Descriptor>, HelperFailure> {
        let table = mount_table()?;
        let top = table.at(OsStr::new(&self.target));
        let fd = top.filter(|top| top.fs_type == "autofs").map(|_| open_target(&self.target));
        Ok(fd.transpose()?.map(Descriptor::from))
    }

    /// Unmounts what this helper has mounted.
    async fn undo(&self, asking: &Asking) -> Result<(), HelperFailure> {
        if self.existed {
            return Ok(());
        }
        let options = UnmountOptions { tag: self.options.tag.clone(), ..UnmountOptions::default() };
        asking.unmount((&self.namespace, &self.volume, &self.consumer), options).await
    }
}

/// Cancels the operation, and again: csid may not have it yet, or be restarting.
async fn cancel(asking: &Asking) -> std::convert::Infallible {
    loop {
        if let Ok(client) = asking.session.client().await {
            let _ = client.cancel_operation(&asking.id).await;
        }
        tokio::time::sleep(PAUSE).await;
    }
}

fn usage(text: &str) -> HelperFailure {
    HelperFailure::Usage(text.to_owned())
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use rustix::process::{Signal as Number, getpid, kill_process};

    use super::*;

    #[test]
    fn signal_ends_what_comes_before_the_mount() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            for number in [Number::TERM, Number::INT] {
                let mut stop = Stop::listen().ok().unwrap();
                assert_eq!(stop.unless(async { Ok(7) }).await.ok(), Some(7));
                kill_process(getpid(), number).unwrap();
                let ended =
                    tokio::time::timeout(Duration::from_secs(10), stop.unless(pending::<Result<(), _>>()));
                let failure = ended.await.expect("it ends").expect_err("a signal");
                assert_eq!((failure.code(), failure.text().as_str()), (8, "cancelled; nothing is mounted"));
            }
        });
    }
}
