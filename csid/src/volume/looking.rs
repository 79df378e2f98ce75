//! What the kernel shows of mounts: their paths looked at, and what that means for their rows.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use crate::host::Look;
use crate::store::rows::{AttachmentMode, MountRow};
use crate::volume::Shared;
use crate::volume::state::Sight;

/// How long what is stale is given.
const STALE: Duration = Duration::from_secs(1);

impl Shared {
    /// What the kernel shows of a mount that is called mounted. A dead file system is there; one that hangs is, too.
    pub(super) async fn sight(&self, row: &MountRow) -> Sight {
        let look = self.host.look(&row.volume.plugin, Path::new(&row.source)).await;
        self.sight_of(row, &look).await
    }

    /// As [`crate::host::Host::look`], before what is dead is made again: what is stale has to be so twice.
    pub(super) async fn look_surely(&self, row: &MountRow) -> Look {
        let look = self.host.look(&row.volume.plugin, Path::new(&row.source)).await;
        if !look.is_stale() {
            return look;
        }
        tokio::time::sleep(STALE).await;
        self.host.look(&row.volume.plugin, Path::new(&row.source)).await
    }

    /// Each row's mount, looked at now.
    pub(super) async fn sights(&self, rows: &[Arc<MountRow>]) -> Vec<Sight> {
        let rows: Vec<&MountRow> = rows.iter().map(Arc::as_ref).collect();
        let looks = self.looks(&rows).await;
        self.sights_of(&rows, &looks).await
    }

    /// What looks mean for the rows; targets are looked at side by side.
    pub(super) async fn sights_of(&self, rows: &[&MountRow], looks: &[Look]) -> Vec<Sight> {
        type Asking<'a> = Pin<Box<dyn Future<Output = Sight> + Send + 'a>>;
        let asking: Vec<Asking<'_>> = rows
            .iter()
            .zip(looks)
            .map(|(row, look)| Box::pin(self.sight_of(row, look)) as Asking<'_>)
            .collect();
        futures_util::future::join_all(asking).await
    }

    pub(super) async fn sight_of(&self, row: &MountRow, look: &Look) -> Sight {
        if !there(row, look) {
            return Sight::Gone;
        }
        if look.has_lost_its_server() {
            return Sight::Dead;
        }
        // What does not answer is not asked again.
        if !healthy(row, look) {
            return Sight::There;
        }
        match &row.spec.target {
            None => Sight::There,
            Some(target) => {
                let bound =
                    self.host.is_bound(&row.volume.plugin, Path::new(&row.source), Path::new(target)).await;
                // What cannot be looked at is not called gone.
                if bound.unwrap_or(true) { Sight::There } else { Sight::Unbound }
            }
        }
    }

    /// One look at each row's published path, in the rows' order.
    pub(super) async fn looks(&self, rows: &[&MountRow]) -> Vec<Look> {
        type Looking<'a> = Pin<Box<dyn Future<Output = (Vec<usize>, Vec<Look>)> + Send + 'a>>;
        let mut plugins: BTreeMap<&str, (Vec<usize>, Vec<PathBuf>)> = BTreeMap::new();
        for (place, row) in rows.iter().enumerate() {
            let (places, paths) = plugins.entry(&row.volume.plugin).or_default();
            places.push(place);
            paths.push(PathBuf::from(&row.source));
        }
        let looking = plugins.into_iter().map(|(plugin, (places, paths))| {
            Box::pin(async move { (places, self.host.looks(plugin, paths).await) }) as Looking<'_>
        });
        let looking: Vec<Looking<'_>> = looking.collect();
        let mut looks = vec![Look::Missing; rows.len()];
        for (places, found) in futures_util::future::join_all(looking).await {
            for (place, look) in places.into_iter().zip(found) {
                looks[place] = look;
            }
        }
        looks
    }
}

/// What was published is there, and not something else in its place. What does not answer is not called gone.
pub(super) fn there(row: &MountRow, look: &Look) -> bool {
    match (row.spec.usage.attachment_mode, look) {
        (_, Look::Dead(_) | Look::Hung) => true,
        (AttachmentMode::FileSystem, Look::Mounted { device, .. })
        | (AttachmentMode::BlockDevice, Look::Device { rdev: device }) => row.device == Some(*device),
        _ => false,
    }
}

pub(super) fn healthy(row: &MountRow, look: &Look) -> bool {
    there(row, look) && !matches!(look, Look::Dead(_) | Look::Hung)
}

/// Why it is not healthy, for a person.
pub(super) fn why(look: &Look) -> String {
    match look {
        Look::Dead(code) => {
            format!("the file system is dead: {}", std::io::Error::from_raw_os_error(*code))
        }
        Look::Hung => "the file system does not answer".to_owned(),
        _ => "removed behind csid's back".to_owned(),
    }
}
