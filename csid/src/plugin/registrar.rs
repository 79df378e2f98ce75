//! Plugins that register themselves, as the kubelet has it: a socket appears in csid's registration directory, its listener says
//! which plugin it is and where that listens, and is sent whether csid took it. So node-driver-registrar, and drivers that
//! do without it, work as they are. An instance goes with its socket; csid's next start has it from the journal and asks again.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use csi_proto::pluginregistration::registration_client::RegistrationClient;
use csi_proto::pluginregistration::{InfoRequest, PluginInfo, RegistrationStatus};
use rustix::fs::inotify::{self, CreateFlags, Reader, WatchFlags};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::oneshot::{self, error::RecvError};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use tonic::transport::Channel;

use crate::error::Result;
use crate::plugin::channel;
use crate::plugin::errors::registrar::RegistrarError;
use crate::plugin::registry::Plugins;
use crate::plugin::rpc;
use crate::plugin::self_registered::instance;
use crate::plugin::spec::{Log, PluginSpec, Supervision};

/// For one answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// The pause before the first retry. Each further pause is twice as long.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LAST_PAUSE: Duration = Duration::from_secs(60);

/// A socket under one name may be another one: its inode, and when that was made.
type Identity = (u64, SystemTime);

/// A socket, and what is done about it.
struct Registration {
    /// The identity, and the sender that reports the end of the socket. It is sent to when the socket is gone, and dropped when csid
    /// stops, which ends no plugin.
    there: Option<(Identity, oneshot::Sender<()>)>,
    task: JoinHandle<()>,
}

impl Registration {
    fn is_of(&self, identity: Identity) -> bool {
        self.there.as_ref().is_some_and(|(there, _)| *there == identity)
    }

    fn end(&mut self) {
        self.there.take().map(|(_, gone)| gone.send(()));
    }
}

impl Plugins {
    /// Follows the registration directory without end.
    pub async fn watch_registrations(&self) {
        let directory = self.0.directories.registrations();
        let mut there = BTreeMap::new();
        loop {
            let Err(error) = self.follow(&directory, &mut there).await;
            tracing::error!(directory = %directory.display(), %error, "plugins cannot register themselves");
            sleep(LAST_PAUSE).await;
        }
    }

    async fn follow(
        &self,
        directory: &Path,
        there: &mut BTreeMap<PathBuf, Registration>,
    ) -> io::Result<std::convert::Infallible> {
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
        roots_alone(directory)?;
        let changes = watch(directory)?;
        let mut first = true;
        loop {
            let sockets = sockets(directory)?;
            if std::mem::take(&mut first) {
                // Plugins whose sockets were removed while csid was not running leave now.
                let those: BTreeSet<String> = sockets.keys().map(|name| instance(name)).collect();
                self.part(|instance| !those.contains(instance)).await;
            }
            there.retain(|_, registration| registration.there.is_some() || !registration.task.is_finished());
            for (name, registration) in there.iter_mut() {
                if !sockets.contains_key(name) {
                    registration.end();
                }
            }
            for (name, identity) in sockets {
                if there.get(&name).is_some_and(|registration| registration.is_of(identity)) {
                    continue;
                }
                let before = there.remove(&name).map(|mut before| {
                    before.end();
                    before.task
                });
                let (gone, going) = oneshot::channel();
                let (plugins, socket) = (self.clone(), directory.join(&name));
                let task = tokio::spawn(async move {
                    // Its earlier registration ends first, however long that takes.
                    if let Some(before) = before {
                        let _ = before.await;
                    }
                    plugins.registration(&socket, going).await;
                });
                there.insert(name, Registration { there: Some((identity, gone)), task });
            }
            changed(&changes).await?;
        }
    }

    /// From a socket's appearance to its end.
    async fn registration(&self, socket: &Path, mut gone: oneshot::Receiver<()>) {
        if self.until_gone(socket, &mut gone).await.is_ok() {
            // This includes an instance in the journal that was gone before csid could query it again.
            let own = instance(socket);
            self.part(|instance| instance == own).await;
        }
    }

    /// An error: csid stops.
    async fn until_gone(
        &self,
        socket: &Path,
        gone: &mut oneshot::Receiver<()>,
    ) -> std::result::Result<(), RecvError> {
        let listener = channel::AllowedListener::Owner(0);
        let mut registrar =
            RegistrationClient::new(channel::open(socket, listener, Arc::default(), Arc::default()));
        let (mut pause, mut said) = (FIRST_PAUSE, String::new());
        loop {
            let taken = tokio::select! {
                biased;
                ended = &mut *gone => return ended,
                answered = ask(&mut registrar) => match answered {
                    Ok(info) => self.take(socket, info).await,
                    Err(error) => Err(error.into()),
                },
            };
            let status = RegistrationStatus {
                plugin_registered: taken.is_ok(),
                error: taken.as_ref().err().map(|error| error.message.clone()).unwrap_or_default(),
            };
            let notified = tokio::select! {
                ended = &mut *gone => return ended,
                sent = timeout(PATIENCE, registrar.notify_registration_status(status)) => {
                    sent.is_ok_and(|sent| sent.is_ok())
                }
            };
            match taken {
                Ok((id, instance)) => {
                    tracing::info!(plugin = %id, %instance, notified, "plugin {id} has registered itself");
                    return gone.await;
                }
                Err(error) if error.message != said => {
                    tracing::warn!(socket = %socket.display(), %error, "a plugin could not register itself");
                    said = error.message;
                }
                Err(_) => {}
            }
            tokio::select! {
                ended = &mut *gone => return ended,
                () = sleep(pause) => pause = (pause * 2).min(LAST_PAUSE),
            }
        }
    }

    async fn take(&self, socket: &Path, info: PluginInfo) -> Result<(String, String)> {
        let (id, spec) = described(socket, info)?;
        let instance = spec.instance().to_owned();
        self.joined(&id, spec).await?;
        Ok((id, instance))
    }
}

async fn ask(registrar: &mut RegistrationClient<Channel>) -> Result<PluginInfo, RegistrarError> {
    match timeout(PATIENCE, registrar.get_info(InfoRequest {})).await {
        Ok(Ok(info)) => Ok(info.into_inner()),
        Ok(Err(status)) => {
            let cause = rpc::first_cause(&status).map_or(String::new(), |cause| format!(": {cause}"));
            let why = rpc::presentable(&format!("{}{cause}", status.message()));
            Err(RegistrarError::Refused { why })
        }
        Err(_) => Err(RegistrarError::Silent { patience: PATIENCE }),
    }
}

/// Returns the plugin that a registrar describes.
fn described(socket: &Path, info: PluginInfo) -> Result<(String, PluginSpec)> {
    if info.r#type != "CSIPlugin" {
        return Err(RegistrarError::OtherType { found: rpc::presentable(&info.r#type) }.into());
    }
    let is_first = |version: &String| version.trim_start_matches('v').split('.').next() == Some("1");
    if !info.supported_versions.iter().any(is_first) {
        return Err(RegistrarError::OtherVersion.into());
    }
    let endpoint = match info.endpoint.strip_prefix("unix://").unwrap_or(&info.endpoint) {
        "" => socket.to_string_lossy().into_owned(),
        endpoint => endpoint.to_owned(),
    };
    let spec = PluginSpec {
        supervision: Supervision::External,
        argv: Vec::new(),
        environment: BTreeMap::new(),
        credentials: Vec::new(),
        unit: None,
        socket: Some(endpoint),
        instance: Some(instance(socket)),
        plugin_root: None,
        plugin_view: None,
        log: Log::Journal,
        rpc_deadline: None,
        node_calls_at_once: None,
        ..PluginSpec::default()
    };
    spec.validate(&info.name)?;
    Ok((info.name, spec))
}

/// Returns the directory's sockets by their names.
fn sockets(directory: &Path) -> io::Result<BTreeMap<PathBuf, Identity>> {
    let mut sockets = BTreeMap::new();
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        // A socket that is gone again causes another change.
        let Ok(metadata) = entry.metadata() else { continue };
        let name = PathBuf::from(entry.file_name());
        if metadata.file_type().is_socket() && name.extension().is_some_and(|end| end == "sock") {
            // Some file systems do not say when it was made; then any change of it is another one.
            let changed = Duration::new(metadata.ctime().unsigned_abs(), metadata.ctime_nsec() as u32);
            let made = metadata.created().unwrap_or(SystemTime::UNIX_EPOCH + changed);
            sockets.insert(name, (metadata.ino(), made));
        }
    }
    Ok(sockets)
}

/// Checks that only root can make a socket there, for csid trusts each one as root.
fn roots_alone(directory: &Path) -> io::Result<()> {
    let metadata = std::fs::symlink_metadata(directory)?;
    let own = rustix::process::geteuid().as_raw();
    match metadata.is_dir() && metadata.uid() == own && metadata.mode() & 0o022 == 0 {
        true => Ok(()),
        false => Err(io::Error::other("it is not a directory that root alone can write to")),
    }
}

fn watch(directory: &Path) -> io::Result<AsyncFd<OwnedFd>> {
    let changes = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
    let of_entries = WatchFlags::CREATE | WatchFlags::DELETE | WatchFlags::MOVED_FROM | WatchFlags::MOVED_TO;
    let own = WatchFlags::DELETE_SELF | WatchFlags::MOVE_SELF | WatchFlags::ONLYDIR;
    inotify::add_watch(&changes, directory, of_entries | own)?;
    #[expect(deprecated, reason = "safe for an OwnedFd; what replaces it is unsafe for every type")]
    AsyncFd::with_interest(changes, Interest::READABLE)
}

/// Wait for a change; what it is, the directory says better. One that was moved away is an error: another one is made.
async fn changed(changes: &AsyncFd<OwnedFd>) -> io::Result<()> {
    let mut readable = changes.readable().await?;
    let mut buffer = [MaybeUninit::uninit(); 4096];
    let mut reader = Reader::new(changes.get_ref(), &mut buffer);
    loop {
        match reader.next() {
            Ok(event) if event.events().contains(inotify::ReadFlags::MOVE_SELF) => {
                return Err(io::Error::other("it was moved away"));
            }
            Ok(_) => {}
            Err(rustix::io::Errno::AGAIN) => break,
            Err(error) => return Err(error.into()),
        }
    }
    readable.clear_ready();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugin::self_registered;

    fn info(change: impl FnOnce(&mut PluginInfo)) -> PluginInfo {
        let mut info = PluginInfo {
            r#type: "CSIPlugin".into(),
            name: "disk.example.org".into(),
            endpoint: "/run/disk/csi.sock".into(),
            supported_versions: vec!["0.3.0".into(), "1.0.0".into()],
        };
        change(&mut info);
        info
    }

    #[test]
    fn registrar_info_is_checked() {
        let socket = Path::new("/var/lib/csid/plugins_registry/disk.example.org-reg.sock");
        let (id, spec) = described(socket, info(|_| {})).unwrap();
        assert_eq!((id.as_str(), spec.socket.as_deref()), ("disk.example.org", Some("/run/disk/csi.sock")));
        let endpoint = |endpoint: &str| {
            let taken = described(socket, info(|info| info.endpoint = endpoint.into()));
            taken.map(|(_, spec)| spec.socket.unwrap())
        };
        assert_eq!(endpoint("unix:///run/x.sock").unwrap(), "/run/x.sock");
        assert_eq!(endpoint("").unwrap(), socket.to_str().unwrap());
        for wrong in ["run/x.sock", "/run/../x.sock", "/run/x", "tcp://127.0.0.1:1"] {
            assert_eq!(endpoint(wrong).unwrap_err().kind, crate::Kind::InvalidArgument, "{wrong}");
        }
        type Break = (&'static str, fn(&mut PluginInfo));
        let table: [Break; 5] = [
            ("type CSIPlugin", |info| info.r#type = "DevicePlugin".into()),
            ("plugin id", |info| info.name = String::new()),
            ("plugin id", |info| info.name = "../x".into()),
            ("no version 1", |info| info.supported_versions = vec!["0.3.0".into(), "10.0".into()]),
            ("no version 1", |info| info.supported_versions.clear()),
        ];
        for (word, change) in table {
            let error = described(socket, info(change)).unwrap_err();
            assert!(error.message.contains(word), "{word}: {error}");
        }
        assert!(
            self_registered::is_name(spec.instance())
                && !self_registered::is_name("registered")
                && !self_registered::is_name("default")
        );
        assert_eq!(instance(socket), instance(Path::new("/elsewhere/disk.example.org-reg.sock")));
        assert_ne!(instance(socket), instance(Path::new("/elsewhere/other-reg.sock")));
    }
}
