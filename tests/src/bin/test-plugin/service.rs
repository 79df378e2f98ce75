//! The part that all services share: each call is recorded, compared with the script and then carried out. Also the service Identity.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use csi_proto::csi::v1::volume_capability::AccessType;
use csi_proto::csi::v1::volume_capability::access_mode::Mode;
use csi_proto::csi::v1::*;
use csid_tests::backend::Backend;
use csid_tests::script::{self, Act, Call, DIES, End, Half, Lie, Line, Probe, Script};
use tokio::sync::watch;
use tonic::{Request, Response, Status, async_trait};

pub type Answer<T> = Result<Response<T>, Status>;

pub struct Plugin {
    /// The directory of the script and the record.
    directory: PathBuf,
    pub backend: Backend,
    shared: Arc<Shared>,
}

struct Shared {
    record: File,
    counts: Mutex<Counts>,
    /// Volumes with calls at work that no caller ends: other calls get ABORTED, as the specification asks.
    busy: Mutex<HashMap<String, AtWork>>,
    /// The ends of what was begun in the background.
    ends: Mutex<HashMap<String, watch::Receiver<bool>>>,
    /// Whose turn it is of those that are served one at a time.
    serial: tokio::sync::Mutex<()>,
}

#[derive(Default)]
struct Counts {
    generation: u64,
    next_id: u64,
    /// By rule.
    seen: HashMap<usize, u64>,
}

/// The calls at work for a volume.
struct AtWork {
    rpc: String,
    calls: usize,
    /// The same call may come once more.
    repeatable: bool,
}

/// Records that the caller went away, unless the call was ended.
struct Open {
    shared: Arc<Shared>,
    id: u64,
    ended: bool,
}

impl Shared {
    fn counts(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn busy(&self) -> MutexGuard<'_, HashMap<String, AtWork>> {
        self.busy.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn ends(&self) -> MutexGuard<'_, HashMap<String, watch::Receiver<bool>>> {
        self.ends.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn refuses(&self, call: &Call) -> bool {
        let busy = self.busy();
        let at_work = busy.get(&call.volume);
        at_work.is_some_and(|at_work| !at_work.repeatable || at_work.rpc != call.rpc)
    }

    fn begin_work(&self, call: &Call, repeatable: bool) {
        let mut busy = self.busy();
        let new = || AtWork { rpc: call.rpc.clone(), calls: 0, repeatable };
        busy.entry(call.volume.clone()).or_insert_with(new).calls += 1;
    }

    fn end_work(&self, call: &Call) {
        let mut busy = self.busy();
        if let Some(at_work) = busy.get_mut(&call.volume) {
            at_work.calls -= 1;
            if at_work.calls == 0 {
                busy.remove(&call.volume);
            }
        }
    }

    fn write(&self, line: &Line) {
        if let Err(error) = script::append(&self.record, line) {
            // A record with a hole would prove anything.
            eprintln!("test-plugin: cannot record: {error}");
            std::process::abort();
        }
    }
}

impl Open {
    fn at_end(&self, code: i32) -> End {
        End { id: self.id, code, at: script::now() }
    }

    fn end(&mut self, code: i32) {
        self.ended = true;
        self.shared.write(&Line::End(self.at_end(code)));
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        if !self.ended {
            self.shared.write(&Line::Cancelled(self.at_end(0)));
        }
    }
}

impl Plugin {
    pub fn new(directory: PathBuf, backend: Backend) -> std::io::Result<Self> {
        let record = script::record(&directory)?;
        // Larger than any before: each call is a line of more than one byte.
        let next_id = script::size(&directory)? as u64;
        let shared = Shared {
            record,
            counts: Mutex::new(Counts { next_id, ..Counts::default() }),
            busy: Mutex::default(),
            ends: Mutex::default(),
            serial: tokio::sync::Mutex::new(()),
        };
        script::append(&shared.record, &Line::Started)?;
        Ok(Plugin { directory, backend, shared: Arc::new(shared) })
    }

    /// The script, and what it says about this call.
    fn plan(&self, call: &mut Call) -> Result<(Script, Option<Act>), Status> {
        let script = Script::read(&self.directory)
            .map_err(|error| Status::internal(format!("the script cannot be read: {error}")))?;
        let mut counts = self.shared.counts();
        if counts.generation != script.generation {
            counts.generation = script.generation;
            counts.seen.clear();
            // A call in the background goes on, whatever the script says now.
            self.shared.ends().retain(|_, end| !*end.borrow() && end.has_changed().is_ok());
        }
        call.id = counts.next_id;
        counts.next_id += 1;
        let mut plan = None;
        for (place, rule) in script.rules.iter().enumerate() {
            if rule.rpc != call.rpc || rule.volume.as_ref().is_some_and(|v| *v != call.volume) {
                continue;
            }
            let seen = counts.seen.entry(place).or_default();
            *seen += 1;
            if plan.is_none() && *seen >= rule.from && *seen - rule.from < rule.times {
                plan = Some(rule.act.clone());
            }
        }
        Ok((script, plan))
    }

    pub async fn run<T: Default + Send + 'static>(
        &self,
        mut call: Call,
        effect: impl FnOnce(&Script, &Call, Option<Lie>) -> Result<T, Status> + Send + 'static,
    ) -> Answer<T> {
        let (script, act) = self.plan(&mut call)?;
        let generation = script.generation;
        let effect = move |call: &Call, lie| {
            gate(&script, call)?;
            effect(&script, call, lie)
        };
        call.at = script::now();
        self.shared.write(&Line::Start(Box::new(call.clone())));
        let mut open = Open { shared: Arc::clone(&self.shared), id: call.id, ended: false };
        let shared = Arc::clone(&self.shared);
        if !call.volume.is_empty() && shared.refuses(&call) {
            let status = Status::aborted("another call for this volume is at work");
            open.end(status.code() as i32);
            return Err(status);
        }
        // The same call in the background is carried out first. Otherwise it could create again what is deleted after this answer.
        let what = format!("{} {} {} {}", call.rpc, call.volume, call.target, call.node);
        let begun = shared.ends().get(&what).cloned();
        if let Some(mut end) = begun.clone() {
            // The other call drops the sender when it ends.
            let _ = end.wait_for(|ended| *ended).await;
        }
        let sleep = |milliseconds| tokio::time::sleep(Duration::from_millis(milliseconds));
        let result = match act {
            None => effect(&call, None),
            Some(Act::Lie(lie)) => effect(&call, Some(lie)),
            Some(Act::Fail(code)) => Err(Status::new(script::code(code), "the script says so")),
            Some(Act::FailLater(milliseconds, code)) => {
                sleep(milliseconds).await;
                Err(Status::new(script::code(code), "the script says so"))
            }
            Some(Act::Say(code, words)) => Err(Status::new(script::code(code), words)),
            Some(Act::FailAfter(code)) => {
                effect(&call, None).and(Err(Status::new(script::code(code), "done, and denied")))
            }
            Some(Act::Delay(milliseconds)) => {
                sleep(milliseconds).await;
                effect(&call, None)
            }
            Some(Act::DelayAfter(milliseconds)) => {
                let result = effect(&call, None);
                sleep(milliseconds).await;
                result
            }
            Some(Act::Hold) => {
                while Script::read(&self.directory).is_ok_and(|script| script.generation == generation) {
                    sleep(10).await;
                }
                effect(&call, None)
            }
            Some(Act::Stubborn(milliseconds)) => {
                shared.begin_work(&call, false);
                let work = tokio::spawn(async move {
                    tokio::time::sleep(Duration::from_millis(milliseconds)).await;
                    let result = effect(&call, None);
                    shared.end_work(&call);
                    result
                });
                work.await.map_err(|error| Status::internal(error.to_string()))?
            }
            Some(Act::Background(_)) if begun.is_some() => effect(&call, None),
            Some(Act::Background(milliseconds)) => {
                let (end, ended) = watch::channel(false);
                shared.ends().insert(what, ended);
                shared.begin_work(&call, true);
                let work = tokio::spawn(async move {
                    tokio::time::sleep(Duration::from_millis(milliseconds)).await;
                    let result = effect(&call, None);
                    shared.end_work(&call);
                    end.send_replace(true);
                    result
                });
                work.await.map_err(|error| Status::internal(error.to_string()))?
            }
            Some(Act::Serial(milliseconds)) => {
                shared.begin_work(&call, true);
                let work = tokio::spawn(async move {
                    let turn = shared.serial.lock().await;
                    tokio::time::sleep(Duration::from_millis(milliseconds)).await;
                    let result = effect(&call, None);
                    drop(turn);
                    shared.end_work(&call);
                    result
                });
                work.await.map_err(|error| Status::internal(error.to_string()))?
            }
            Some(Act::DieBefore) => std::process::exit(DIES),
            Some(Act::DieAfter) => {
                let _ = effect(&call, None);
                std::process::exit(DIES)
            }
        };
        open.end(result.as_ref().map_or_else(|status| status.code() as i32, |_| 0));
        result.map(Response::new)
    }
}

/// The service that an RPC belongs to and the capability that it needs, "" where it needs none.
fn needs(rpc: &str) -> Option<(Half, &'static str)> {
    use Half::{Controller, Node};
    Some(match rpc {
        "NodeGetVolumeStats" => (Node, "GET_VOLUME_STATS"),
        "NodeExpandVolume" => (Node, "EXPAND_VOLUME"),
        "CreateVolume" | "DeleteVolume" => (Controller, "CREATE_DELETE_VOLUME"),
        "ControllerPublishVolume" | "ControllerUnpublishVolume" => (Controller, "PUBLISH_UNPUBLISH_VOLUME"),
        "ListVolumes" => (Controller, "LIST_VOLUMES"),
        "GetCapacity" => (Controller, "GET_CAPACITY"),
        "CreateSnapshot" | "DeleteSnapshot" => (Controller, "CREATE_DELETE_SNAPSHOT"),
        "ListSnapshots" => (Controller, "LIST_SNAPSHOTS"),
        "ControllerExpandVolume" => (Controller, "EXPAND_VOLUME"),
        "ControllerGetCapabilities" | "ValidateVolumeCapabilities" => (Controller, ""),
        "NodeStageVolume"
        | "NodeUnstageVolume"
        | "NodePublishVolume"
        | "NodeUnpublishVolume"
        | "NodeGetCapabilities"
        | "NodeGetInfo" => (Node, ""),
        _ => return None,
    })
}

const SECRET: [&str; 12] = [
    "CreateVolume",
    "DeleteVolume",
    "ControllerPublishVolume",
    "ControllerUnpublishVolume",
    "ValidateVolumeCapabilities",
    "CreateSnapshot",
    "DeleteSnapshot",
    "ListSnapshots",
    "ControllerExpandVolume",
    "NodeStageVolume",
    "NodePublishVolume",
    "NodeExpandVolume",
];

/// A field that the call must have and has not.
fn missing(call: &Call) -> Option<&'static str> {
    let volume = ("volume_id", &call.volume);
    let staging = ("staging_target_path", &call.staging);
    let usage = ("volume_capability", &call.access_mode);
    let fields = match call.rpc.as_str() {
        "CreateVolume" => vec![("name", &call.volume)],
        "CreateSnapshot" => vec![("source_volume_id", &call.volume), ("name", &call.snapshot)],
        "DeleteSnapshot" => vec![("snapshot_id", &call.snapshot)],
        "ControllerPublishVolume" => vec![volume, ("node_id", &call.node), usage],
        "DeleteVolume"
        | "ControllerUnpublishVolume"
        | "ControllerExpandVolume"
        | "ValidateVolumeCapabilities" => vec![volume],
        "NodeStageVolume" => vec![volume, staging, usage],
        "NodeUnstageVolume" => vec![volume, staging],
        "NodePublishVolume" => vec![volume, ("target_path", &call.target), usage],
        "NodeUnpublishVolume" => vec![volume, ("target_path", &call.target)],
        "NodeGetVolumeStats" | "NodeExpandVolume" => vec![volume, ("volume_path", &call.target)],
        _ => Vec::new(),
    };
    fields.into_iter().find(|(_, value)| value.is_empty()).map(|(field, _)| field)
}

/// Whether this process does such a thing, and for this caller.
fn gate(script: &Script, call: &Call) -> Result<(), Status> {
    if let Some((half, capability)) = needs(&call.rpc) {
        let capabilities = if half == Half::Node { &script.capabilities } else { &script.controller };
        if !script.serves.contains(&half) || !(capability.is_empty() || script::has(capabilities, capability))
        {
            return Err(Status::unimplemented("not this plugin"));
        }
    }
    if let Some(field) = missing(call) {
        return Err(Status::invalid_argument(format!("{field} is missing")));
    }
    match &script.secret {
        Some(secret) if SECRET.contains(&call.rpc.as_str()) && !call.secrets.contains(secret) => {
            Err(Status::unauthenticated("the secret is not given, or another"))
        }
        _ => Ok(()),
    }
}

pub fn pairs(map: BTreeMap<String, String>) -> Vec<(String, String)> {
    map.into_iter().collect()
}

pub fn call(rpc: &str, volume: String) -> Call {
    Call { rpc: rpc.to_owned(), volume, ..Call::default() }
}

/// Adds the fields of a capability to a call.
pub fn with_capability(call: Call, capability: Option<VolumeCapability>) -> Call {
    let Some(capability) = capability else { return call };
    let mode = capability.access_mode.map(|m| m.mode()).unwrap_or(Mode::Unknown);
    let access_mode = mode.as_str_name().to_owned();
    match capability.access_type {
        Some(AccessType::Mount(mount)) => Call {
            access_mode,
            fs_type: mount.fs_type,
            mount_flags: mount.mount_flags,
            mount_group: mount.volume_mount_group,
            ..call
        },
        Some(AccessType::Block(_)) => Call { access_mode, block: true, ..call },
        None => Call { access_mode, ..call },
    }
}

#[async_trait]
impl identity_server::Identity for Plugin {
    async fn get_plugin_info(&self, _: Request<GetPluginInfoRequest>) -> Answer<GetPluginInfoResponse> {
        self.run(call("GetPluginInfo", String::new()), |script, _, _| {
            Ok(GetPluginInfoResponse {
                name: script.name.clone(),
                vendor_version: "1.0".to_owned(),
                ..Default::default()
            })
        })
        .await
    }

    async fn get_plugin_capabilities(
        &self,
        _: Request<GetPluginCapabilitiesRequest>,
    ) -> Answer<GetPluginCapabilitiesResponse> {
        use plugin_capability::{Service, Type, VolumeExpansion, service, volume_expansion};
        self.run(call("GetPluginCapabilities", String::new()), |script, _, _| {
            let capability = |name: &String| {
                let known = match volume_expansion::Type::from_str_name(name) {
                    Some(known) => Type::VolumeExpansion(VolumeExpansion { r#type: known.into() }),
                    None => {
                        let known = service::Type::from_str_name(name).unwrap_or(service::Type::Unknown);
                        Type::Service(Service { r#type: known.into() })
                    }
                };
                PluginCapability { r#type: Some(known) }
            };
            let capabilities = script.plugin.iter().map(capability).collect();
            Ok(GetPluginCapabilitiesResponse { capabilities })
        })
        .await
    }

    async fn probe(&self, _: Request<ProbeRequest>) -> Answer<ProbeResponse> {
        self.run(call("Probe", String::new()), |script, _, _| match script.probe {
            Probe::Ready => Ok(ProbeResponse { ready: Some(true) }),
            Probe::Nil => Ok(ProbeResponse { ready: None }),
            Probe::NotReady => Ok(ProbeResponse { ready: Some(false) }),
            Probe::Fails => Err(Status::internal("the script says so")),
        })
        .await
    }
}
