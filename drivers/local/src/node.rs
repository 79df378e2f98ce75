//! The Node service: attach, format once, mount; bind; and the ways back. Every call first looks at what is there, so
//! it may be repeated, or continue what a killed driver began. It owns no state: volumes are the store's, mounts and
//! devices the kernel's.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use csi_proto::csi::v1::node_server::Node;
use csi_proto::csi::v1::node_service_capability::{Rpc, Type, rpc};
use csi_proto::csi::v1::volume_capability::access_mode::Mode;
use csi_proto::csi::v1::*;
use rustix::mount::MountFlags;
use tonic::{Request, Response, Status};

use crate::capability::Wanted;
use crate::controller::{CONTEXT, topology};
use crate::error::{At, Error, Result};
use crate::format;
use crate::loops::{self, Loop};
use crate::mounts::{self, There, look};
use crate::serve::{blocking, required};
use crate::store::{Content, Store, Volume};

type Answer<T> = std::result::Result<Response<T>, Status>;

#[derive(Clone, Debug)]
pub struct Host {
    pub store: Store,
    pub node_id: String,
    /// Whether volumes are attached through the controller first.
    pub attach: bool,
}

impl Host {
    /// Whether the volume is attached for reading only; an error where it is not attached at all, or not so.
    fn attached_read_only(&self, volume: &Volume, context: &BTreeMap<String, String>) -> Result<bool> {
        if !self.attach {
            return Ok(false);
        }
        match &volume.meta.attached {
            Some(a) if a.node == self.node_id && context.get(CONTEXT) == Some(&a.context) => Ok(a.read_only),
            Some(a) if a.node == self.node_id => Err(Error::Precondition(format!(
                "publish_context is not that of the attachment of volume {}; hand on what ControllerPublishVolume \
                 answers",
                volume.id
            ))),
            _ => Err(Error::Precondition(format!(
                "volume {} is not attached to node {}; ControllerPublishVolume comes first",
                volume.id, self.node_id
            ))),
        }
    }
}

fn path(what: &str, path: &str) -> Result<PathBuf> {
    if Path::new(required(what, path)?).is_absolute() {
        Ok(PathBuf::from(path))
    } else {
        Err(Error::Invalid(format!("{what} must be an absolute path")))
    }
}

fn stage(host: &Host, request: &NodeStageVolumeRequest) -> Result<()> {
    let id = required("volume_id", &request.volume_id)?;
    let staging = path("staging_target_path", &request.staging_target_path)?;
    let mut wanted = Wanted::parse(request.volume_capability.as_ref())?;
    let mut volume = host.store.volume(id)?;
    wanted.fits(volume.meta.content)?;
    if host.attached_read_only(&volume, &request.publish_context)? {
        wanted.options.flags |= MountFlags::RDONLY;
    }
    match volume.meta.content {
        Content::Block => stage_block(&volume, wanted.options.flags.contains(MountFlags::RDONLY)),
        content => {
            let read_only = wanted.options.flags.contains(MountFlags::RDONLY);
            match look(&staging, &volume)? {
                There::Volume(attached) if mounts::is_read_only(&staging)? == read_only => {
                    return fill(&volume, &staging, &attached, read_only);
                }
                There::Volume(_) => {
                    return Err(Error::Exists(format!(
                        "volume {id} is staged and differs in being read-only"
                    )));
                }
                There::Foreign => return Err(mounts::foreign(&staging, &volume)),
                There::NoMount(meta) if meta.is_dir() => {}
                There::NoMount(_) | There::Nothing => {
                    return Err(Error::Invalid(
                        "staging_target_path must be a directory that the caller made".into(),
                    ));
                }
            }
            // Two devices on one image would ruin the file-system: one that is attached is used again.
            let attached = match loops::of_image(&volume.image())?.pop() {
                Some(attached) => attached,
                None => {
                    format::ensure(&mut volume)?;
                    loops::attach(&volume.image(), false, true)?
                }
            };
            if content == Content::Xfs && volume.meta.source.is_some() {
                // The copy has the UUID of what it was copied from, which may be mounted too.
                wanted.options.add_data(c"nouuid");
            }
            mounts::mount_filesystem(content, &attached, &staging, &wanted.options)?;
            fill(&volume, &staging, &attached, read_only)
        }
    }
}

/// A volume may be larger than what it was copied from, and nobody else grows the file-system of a new one.
fn fill(volume: &Volume, staging: &Path, attached: &Loop, read_only: bool) -> Result<()> {
    if volume.meta.source.is_none() || read_only {
        return Ok(());
    }
    format::grow(volume, staging, attached)
}

/// A block volume is staged when a device is attached for good; nothing opens a raw device, so it cannot be autoclear.
fn stage_block(volume: &Volume, read_only: bool) -> Result<()> {
    let attached = loops::of_image(&volume.image())?;
    if attached.iter().any(Loop::autoclear) {
        return Err(Error::Precondition(format!(
            "a device of volume {} was detached while something had it open; close it first",
            volume.id
        )));
    }
    if attached.is_empty() {
        loops::attach(&volume.image(), read_only, false)?;
    }
    Ok(())
}

fn unstage(store: &Store, request: &NodeUnstageVolumeRequest) -> Result<()> {
    let id = required("volume_id", &request.volume_id)?;
    let staging = path("staging_target_path", &request.staging_target_path)?;
    let volume = store.volume(id)?;
    for attached in loops::of_image(&volume.image())? {
        if let Some(user) = mounts::users(&attached, &staging)?.first() {
            return Err(Error::Precondition(format!(
                "volume {id} is still mounted on {}; unpublish it first",
                user.display()
            )));
        }
    }
    mounts::unmount_volume(&staging, &volume)?;
    match (loops::detach_all(&volume.image())?, volume.meta.content) {
        (true, _) => Ok(()),
        (false, Content::Block) => Err(Error::Precondition(format!(
            "the device of volume {id} is still open; stop what uses it (`fuser -v` names it)"
        ))),
        (false, _) => {
            // Here it is unmounted; a stage that follows uses the same device again, and delete refuses.
            tracing::warn!(volume = id, "still mounted in another mount namespace");
            Ok(())
        }
    }
}

fn publish(host: &Host, request: &NodePublishVolumeRequest) -> Result<()> {
    let id = required("volume_id", &request.volume_id)?;
    let target = path("target_path", &request.target_path)?;
    let wanted = Wanted::parse(request.volume_capability.as_ref())?;
    let volume = host.store.volume(id)?;
    wanted.fits(volume.meta.content)?;
    let attached_read_only = host.attached_read_only(&volume, &request.publish_context)?;
    let read_only = request.readonly || wanted.reader_only() || attached_read_only;
    let staging = Path::new(&request.staging_target_path);
    match volume.meta.content {
        Content::Block => publish_block(&volume, &target, read_only, wanted.mode),
        content => {
            if staging.as_os_str().is_empty() {
                return Err(Error::Precondition(
                    "staging_target_path is missing: stage the volume first".into(),
                ));
            }
            let There::Volume(staged) = look(staging, &volume)? else {
                return Err(Error::Precondition(format!(
                    "volume {id} is not staged on {}; stage it first",
                    staging.display()
                )));
            };
            match look(&target, &volume)? {
                There::Volume(_) => {
                    let expected = read_only || mounts::is_read_only(staging)?;
                    return same_access(id, mounts::is_read_only(&target)?, expected);
                }
                There::Foreign => return Err(mounts::foreign(&target, &volume)),
                There::NoMount(meta) if meta.is_dir() => {}
                There::NoMount(_) => return Err(not_a_target(&target)),
                There::Nothing => {}
            }
            one_writer(id, wanted.mode, &mounts::users(&staged, staging)?)?;
            mounts::make_target(&target, content)?;
            mounts::bind(staging, &target, read_only)
        }
    }
}

fn publish_block(volume: &Volume, target: &Path, read_only: bool, mode: Mode) -> Result<()> {
    let image = volume.image();
    let staged = loops::of_image(&image)?;
    if staged.is_empty() {
        return Err(Error::Precondition(format!("volume {} is not staged; stage it first", volume.id)));
    }
    match look(target, volume)? {
        There::Volume(bound) => return same_access(&volume.id, bound.read_only(), read_only),
        There::Foreign => return Err(mounts::foreign(target, volume)),
        There::NoMount(meta) if meta.is_file() && meta.len() == 0 => {}
        There::NoMount(_) => return Err(not_a_target(target)),
        There::Nothing => {}
    }
    let mut users = Vec::new();
    for attached in &staged {
        users.extend(mounts::users(attached, Path::new(""))?);
    }
    one_writer(&volume.id, mode, &users)?;
    // A read-only bind of a device node does not make the device read-only; a device of its own does.
    let attached = match staged.into_iter().find(|l| l.read_only() == read_only) {
        Some(attached) => attached,
        None if read_only => loops::attach(&image, true, false)?,
        None => {
            return Err(Error::Precondition(format!("volume {} is staged for reading only", volume.id)));
        }
    };
    mounts::make_target(target, Content::Block)?;
    mounts::bind(&attached.node(), target, false)?;
    if mounts::is_bound_device(target, &attached)? {
        return Ok(());
    }
    mounts::unmount_volume(target, volume)?;
    Err(Error::Precondition(format!("{} is not the device that was bound there", target.display())))
}

fn same_access(id: &str, is_read_only: bool, wanted: bool) -> Result<()> {
    if is_read_only == wanted {
        return Ok(());
    }
    Err(Error::Exists(format!("volume {id} is published there and differs in being read-only")))
}

fn one_writer(id: &str, mode: Mode, users: &[PathBuf]) -> Result<()> {
    match users.first() {
        Some(user) if mode == Mode::SingleNodeSingleWriter => Err(Error::Precondition(format!(
            "volume {id} is for one writer and published on {}; unpublish it there first",
            user.display()
        ))),
        _ => Ok(()),
    }
}

fn not_a_target(target: &Path) -> Error {
    Error::Precondition(format!("{} is there and no target of ours; remove it first", target.display()))
}

fn unpublish(store: &Store, request: &NodeUnpublishVolumeRequest) -> Result<()> {
    let id = required("volume_id", &request.volume_id)?;
    let target = path("target_path", &request.target_path)?;
    let volume = store.volume(id)?;
    mounts::unmount_volume(&target, &volume)?;
    mounts::remove_target(&target)
}

/// Where the volume is mounted or bound, for calls that come after publish.
fn at(volume: &Volume, path: &Path) -> Result<Loop> {
    match look(path, volume)? {
        There::Volume(attached) => Ok(attached),
        _ => Err(Error::NotThere { id: volume.id.clone(), path: path.to_owned() }),
    }
}

fn stats(store: &Store, request: &NodeGetVolumeStatsRequest) -> Result<NodeGetVolumeStatsResponse> {
    let id = required("volume_id", &request.volume_id)?;
    let path = Path::new(required("volume_path", &request.volume_path)?);
    let volume = store.volume(id)?;
    at(&volume, path)?;
    let usage = |unit: volume_usage::Unit, total: u64, available: u64, used: u64| VolumeUsage {
        unit: unit.into(),
        total: total as i64,
        available: available as i64,
        used: used as i64,
    };
    let usage = if volume.meta.content == Content::Block {
        vec![usage(volume_usage::Unit::Bytes, volume.capacity()?, 0, 0)]
    } else {
        let s = rustix::fs::statvfs(path).at("look at", path)?;
        let bytes = |blocks: u64| blocks * s.f_frsize;
        let used = s.f_blocks.saturating_sub(s.f_bfree);
        vec![
            usage(volume_usage::Unit::Bytes, bytes(s.f_blocks), bytes(s.f_bavail), bytes(used)),
            usage(volume_usage::Unit::Inodes, s.f_files, s.f_favail, s.f_files.saturating_sub(s.f_ffree)),
        ]
    };
    Ok(NodeGetVolumeStatsResponse { usage, volume_condition: None })
}

fn expand(store: &Store, request: &NodeExpandVolumeRequest) -> Result<NodeExpandVolumeResponse> {
    let id = required("volume_id", &request.volume_id)?;
    let published = Path::new(required("volume_path", &request.volume_path)?);
    let volume = store.volume(id)?;
    let capacity = volume.capacity()?;
    if let Some(range) = &request.capacity_range {
        crate::store::Range::new(range.required_bytes, range.limit_bytes)?;
        if range.required_bytes > capacity as i64 {
            return Err(Error::OutOfRange(format!(
                "volume {id} has {capacity} bytes; expand it by the controller first"
            )));
        }
    }
    let attached = at(&volume, published)?;
    if volume.meta.content == Content::Block {
        // The read-only one too.
        for attached in loops::of_image(&volume.image())? {
            attached.take_new_size()?;
        }
    } else {
        // A target may be read-only where the volume is not.
        let staging = Path::new(&request.staging_target_path);
        let staged = !staging.as_os_str().is_empty() && matches!(look(staging, &volume)?, There::Volume(_));
        let mounted = if staged { staging } else { published };
        if mounts::is_read_only(mounted)? {
            return Err(Error::Precondition(format!(
                "{} is read-only, where a file-system cannot grow",
                mounted.display()
            )));
        }
        format::grow(&volume, mounted, &attached)?;
    }
    Ok(NodeExpandVolumeResponse { capacity_bytes: capacity as i64 })
}

#[tonic::async_trait]
impl Node for Host {
    async fn node_stage_volume(
        &self,
        request: Request<NodeStageVolumeRequest>,
    ) -> Answer<NodeStageVolumeResponse> {
        let (this, request) = (self.clone(), request.into_inner());
        blocking("NodeStageVolume", request.volume_id.clone(), move || {
            stage(&this, &request).map(|()| NodeStageVolumeResponse {})
        })
        .await
    }

    async fn node_unstage_volume(
        &self,
        request: Request<NodeUnstageVolumeRequest>,
    ) -> Answer<NodeUnstageVolumeResponse> {
        let (this, request) = (self.clone(), request.into_inner());
        blocking("NodeUnstageVolume", request.volume_id.clone(), move || {
            unstage(&this.store, &request).map(|()| NodeUnstageVolumeResponse {})
        })
        .await
    }

    async fn node_publish_volume(
        &self,
        request: Request<NodePublishVolumeRequest>,
    ) -> Answer<NodePublishVolumeResponse> {
        let (this, request) = (self.clone(), request.into_inner());
        blocking("NodePublishVolume", request.volume_id.clone(), move || {
            publish(&this, &request).map(|()| NodePublishVolumeResponse {})
        })
        .await
    }

    async fn node_unpublish_volume(
        &self,
        request: Request<NodeUnpublishVolumeRequest>,
    ) -> Answer<NodeUnpublishVolumeResponse> {
        let (this, request) = (self.clone(), request.into_inner());
        blocking("NodeUnpublishVolume", request.volume_id.clone(), move || {
            unpublish(&this.store, &request).map(|()| NodeUnpublishVolumeResponse {})
        })
        .await
    }

    async fn node_get_volume_stats(
        &self,
        request: Request<NodeGetVolumeStatsRequest>,
    ) -> Answer<NodeGetVolumeStatsResponse> {
        let (this, request) = (self.clone(), request.into_inner());
        blocking("NodeGetVolumeStats", request.volume_id.clone(), move || stats(&this.store, &request)).await
    }

    async fn node_expand_volume(
        &self,
        request: Request<NodeExpandVolumeRequest>,
    ) -> Answer<NodeExpandVolumeResponse> {
        let (this, request) = (self.clone(), request.into_inner());
        blocking("NodeExpandVolume", request.volume_id.clone(), move || expand(&this.store, &request)).await
    }

    async fn node_get_capabilities(
        &self,
        _: Request<NodeGetCapabilitiesRequest>,
    ) -> Answer<NodeGetCapabilitiesResponse> {
        let capabilities = [
            rpc::Type::StageUnstageVolume,
            rpc::Type::GetVolumeStats,
            rpc::Type::ExpandVolume,
            rpc::Type::SingleNodeMultiWriter,
        ];
        let capabilities =
            capabilities.map(|c| NodeServiceCapability { r#type: Some(Type::Rpc(Rpc { r#type: c.into() })) });
        Ok(Response::new(NodeGetCapabilitiesResponse { capabilities: capabilities.into() }))
    }

    async fn node_get_info(&self, _: Request<NodeGetInfoRequest>) -> Answer<NodeGetInfoResponse> {
        Ok(Response::new(NodeGetInfoResponse {
            node_id: self.node_id.clone(),
            max_volumes_per_node: 0,
            accessible_topology: Some(topology(&self.node_id)),
        }))
    }

    async fn node_get_volume_health(
        &self,
        _: Request<NodeGetVolumeHealthRequest>,
    ) -> Answer<NodeGetVolumeHealthResponse> {
        Err(Status::unimplemented("csi-local does not watch the health of volumes"))
    }
    async fn node_get_storage_health(
        &self,
        _: Request<NodeGetStorageHealthRequest>,
    ) -> Answer<NodeGetStorageHealthResponse> {
        Err(Status::unimplemented("csi-local does not watch the health of the host's disks"))
    }
}
