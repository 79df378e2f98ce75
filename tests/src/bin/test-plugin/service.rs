//! The CSI services: each call is recorded, held against the script and then done.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::File;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use csi_proto::csi::v1::volume_capability::AccessType;
use csi_proto::csi::v1::volume_capability::access_mode::Mode;
use csi_proto::csi::v1::*;
use csid_tests::script::{self, Act, Call, End, Lie, Line, Probe, Script};
use tonic::{Request, Response, Status, async_trait};

use crate::effects;

type Answer<T> = Result<Response<T>, Status>;

pub struct Plugin {
    directory: PathBuf,
    shared: Arc<Shared>,
}

struct Shared {
    record: File,
    started: Instant,
    counts: Mutex<Counts>,
    /// Volumes whose stubborn call is still at work: others get ABORTED, as the specification asks.
    busy: Mutex<HashSet<String>>,
}

#[derive(Default)]
struct Counts {
    generation: u64,
    next_id: u64,
    /// By rule.
    seen: HashMap<usize, u64>,
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

    fn busy(&self) -> MutexGuard<'_, HashSet<String>> {
        self.busy.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn now(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_micros()).unwrap_or(u64::MAX)
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
        End { id: self.id, code, at: self.shared.now() }
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
    pub fn new(directory: PathBuf) -> std::io::Result<Self> {
        let record = script::record(&directory)?;
        // Larger than any before: each call is a line of more than one byte.
        let next_id = script::size(&directory)? as u64;
        let shared = Shared {
            record,
            started: Instant::now(),
            counts: Mutex::new(Counts { next_id, ..Counts::default() }),
            busy: Mutex::default(),
        };
        script::append(&shared.record, &Line::Started)?;
        Ok(Plugin { directory, shared: Arc::new(shared) })
    }

    /// The script, and what it says about this call.
    fn plan(&self, call: &mut Call) -> Result<(Script, Option<Act>), Status> {
        let script = Script::read(&self.directory)
            .map_err(|error| Status::internal(format!("the script cannot be read: {error}")))?;
        let mut counts = self.shared.counts();
        if counts.generation != script.generation {
            counts.generation = script.generation;
            counts.seen.clear();
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

    async fn run<T: Default + Send + 'static>(
        &self,
        mut call: Call,
        effect: impl FnOnce(Script, &Call, Option<Lie>) -> Result<T, Status> + Send + 'static,
    ) -> Answer<T> {
        let (script, act) = self.plan(&mut call)?;
        call.at = self.shared.now();
        self.shared.write(&Line::Start(Box::new(call.clone())));
        let mut open = Open { shared: Arc::clone(&self.shared), id: call.id, ended: false };
        let shared = Arc::clone(&self.shared);
        if !call.volume.is_empty() && shared.busy().contains(&call.volume) {
            let status = Status::aborted("another call for this volume is at work");
            open.end(status.code() as i32);
            return Err(status);
        }
        let sleep = |milliseconds| tokio::time::sleep(Duration::from_millis(milliseconds));
        let result = match act {
            None => effect(script, &call, None),
            Some(Act::Lie(lie)) => effect(script, &call, Some(lie)),
            Some(Act::Fail(code)) => Err(Status::new(script::code(code), "the script says so")),
            Some(Act::Say(code, words)) => Err(Status::new(script::code(code), words)),
            Some(Act::FailAfter(code)) => {
                effect(script, &call, None).and(Err(Status::new(script::code(code), "done, and denied")))
            }
            Some(Act::Delay(milliseconds)) => {
                sleep(milliseconds).await;
                effect(script, &call, None)
            }
            Some(Act::DelayAfter(milliseconds)) => {
                let result = effect(script, &call, None);
                sleep(milliseconds).await;
                result
            }
            Some(Act::Stubborn(milliseconds)) => {
                shared.busy().insert(call.volume.clone());
                let work = tokio::spawn(async move {
                    tokio::time::sleep(Duration::from_millis(milliseconds)).await;
                    let result = effect(script, &call, None);
                    shared.busy().remove(&call.volume);
                    result
                });
                work.await.map_err(|error| Status::internal(error.to_string()))?
            }
            Some(Act::DieBefore) => std::process::exit(9),
            Some(Act::DieAfter) => {
                let _ = effect(script, &call, None);
                std::process::exit(9)
            }
        };
        open.end(result.as_ref().map_or_else(|status| status.code() as i32, |_| 0));
        result.map(Response::new)
    }
}

fn pairs(map: BTreeMap<String, String>) -> Vec<(String, String)> {
    map.into_iter().collect()
}

fn call(rpc: &str, volume: String) -> Call {
    Call { rpc: rpc.to_owned(), volume, ..Call::default() }
}

/// What stage and publish have in common.
fn with_capability(call: Call, capability: Option<VolumeCapability>) -> Call {
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
                name: script.name,
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
        self.run(call("GetPluginCapabilities", String::new()), |_, _, _| Ok(Default::default())).await
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

#[async_trait]
impl node_server::Node for Plugin {
    async fn node_stage_volume(
        &self,
        request: Request<NodeStageVolumeRequest>,
    ) -> Answer<NodeStageVolumeResponse> {
        let r = request.into_inner();
        let call = Call {
            staging: r.staging_target_path,
            context: pairs(r.volume_context),
            publish_context: pairs(r.publish_context),
            secrets: pairs(r.secrets),
            ..call("NodeStageVolume", r.volume_id)
        };
        let directory = self.directory.clone();
        self.run(with_capability(call, r.volume_capability), move |_, call, lie| {
            effects::stage(&directory, call, lie).map(|()| NodeStageVolumeResponse {})
        })
        .await
    }

    async fn node_unstage_volume(
        &self,
        request: Request<NodeUnstageVolumeRequest>,
    ) -> Answer<NodeUnstageVolumeResponse> {
        let r = request.into_inner();
        let call = Call { staging: r.staging_target_path, ..call("NodeUnstageVolume", r.volume_id) };
        self.run(call, |_, call, lie| match lie {
            Some(_) => Ok(NodeUnstageVolumeResponse {}),
            None => effects::unstage(call).map(|()| NodeUnstageVolumeResponse {}),
        })
        .await
    }

    async fn node_publish_volume(
        &self,
        request: Request<NodePublishVolumeRequest>,
    ) -> Answer<NodePublishVolumeResponse> {
        let r = request.into_inner();
        let call = Call {
            staging: r.staging_target_path,
            target: r.target_path,
            read_only: r.readonly,
            context: pairs(r.volume_context),
            publish_context: pairs(r.publish_context),
            secrets: pairs(r.secrets),
            ..call("NodePublishVolume", r.volume_id)
        };
        let directory = self.directory.clone();
        self.run(with_capability(call, r.volume_capability), move |script, call, lie| {
            let staged = script.capabilities.iter().any(|c| c == "STAGE_UNSTAGE_VOLUME");
            effects::publish(&directory, &script.devices, staged, call, lie)
                .map(|()| NodePublishVolumeResponse {})
        })
        .await
    }

    async fn node_unpublish_volume(
        &self,
        request: Request<NodeUnpublishVolumeRequest>,
    ) -> Answer<NodeUnpublishVolumeResponse> {
        let r = request.into_inner();
        let call = Call { target: r.target_path, ..call("NodeUnpublishVolume", r.volume_id) };
        self.run(call, |_, call, lie| match lie {
            Some(_) => Ok(NodeUnpublishVolumeResponse {}),
            None => effects::unpublish(call).map(|()| NodeUnpublishVolumeResponse {}),
        })
        .await
    }

    async fn node_get_capabilities(
        &self,
        _: Request<NodeGetCapabilitiesRequest>,
    ) -> Answer<NodeGetCapabilitiesResponse> {
        use node_service_capability::{Rpc, Type, rpc};
        self.run(call("NodeGetCapabilities", String::new()), |script, _, _| {
            let capability = |name: &String| {
                let known = rpc::Type::from_str_name(name).unwrap_or(rpc::Type::Unknown);
                NodeServiceCapability { r#type: Some(Type::Rpc(Rpc { r#type: known.into() })) }
            };
            Ok(NodeGetCapabilitiesResponse {
                capabilities: script.capabilities.iter().map(capability).collect(),
            })
        })
        .await
    }

    async fn node_get_info(&self, _: Request<NodeGetInfoRequest>) -> Answer<NodeGetInfoResponse> {
        self.run(call("NodeGetInfo", String::new()), |script, _, _| {
            Ok(NodeGetInfoResponse { node_id: script.node_id, ..Default::default() })
        })
        .await
    }

    async fn node_get_volume_stats(
        &self,
        _: Request<NodeGetVolumeStatsRequest>,
    ) -> Answer<NodeGetVolumeStatsResponse> {
        Err(Status::unimplemented("not this plugin"))
    }

    async fn node_expand_volume(
        &self,
        _: Request<NodeExpandVolumeRequest>,
    ) -> Answer<NodeExpandVolumeResponse> {
        Err(Status::unimplemented("not this plugin"))
    }

    async fn node_get_volume_health(
        &self,
        _: Request<NodeGetVolumeHealthRequest>,
    ) -> Answer<NodeGetVolumeHealthResponse> {
        Err(Status::unimplemented("not this plugin"))
    }

    async fn node_get_storage_health(
        &self,
        _: Request<NodeGetStorageHealthRequest>,
    ) -> Answer<NodeGetStorageHealthResponse> {
        Err(Status::unimplemented("not this plugin"))
    }
}
