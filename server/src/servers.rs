//! The servers that run, as operators see them.

use csi_proto::cluster::v1::{AttachmentName, ServerRow as Shown, ServerRows};
use csid_etcd::{RowKey, Rows};

use crate::by_call::half_done;
use crate::cluster::Cluster;
use crate::failure::Result;
use crate::heard::Missing;
use crate::rows::{self, Mode, Read, ServerRow};
use crate::view::attachment_name;

/// The most attachments of a backup that a list names.
const HALF_DONE: usize = 64;

impl Cluster {
    /// Returns the servers that run, by their names.
    pub async fn list_servers(&self) -> Result<ServerRows> {
        let here = self.presence.here()?;
        self.while_here(async {
            let meta = self.meta_now().await?.value;
            let mut servers = Vec::new();
            for (key, row) in self.rows.all(&Rows::Servers).await? {
                let RowKey::Server(id) = &key else { continue };
                servers.push(self.shown(id, rows::read(&key, &row)?));
            }
            let (cause, by, since_usec) =
                meta.recovery.map(|of| (of.reason, of.by, of.since_usec)).unwrap_or_default();
            let missing = match meta.mode {
                Mode::Recovering => self.missing(meta.generation).await?,
                Mode::Normal | Mode::Restored => Missing::default(),
            };
            let half_done = self.half_done(meta.generation).await?;
            servers.sort_by(|a, b| (&a.name, &a.id).cmp(&(&b.name, &b.id)));
            Ok(ServerRows {
                servers,
                server: here.id.clone(),
                cluster: meta.cluster,
                schema: meta.schema,
                generation: meta.generation,
                mode: meta.mode.word().to_owned(),
                awaited: missing.awaited,
                cause,
                by,
                since_usec,
                refused: missing.refused,
                half_done,
            })
        })
        .await
    }

    /// Returns the first attachments by AttachVolume that a backup has half done.
    async fn half_done(&self, generation: u64) -> Result<Vec<AttachmentName>> {
        let records = self.registry.attached_by_call(|record| half_done(record, generation).next().is_some());
        let mut names = Vec::new();
        for record in records.await? {
            names.extend(half_done(&record, generation).map(|at| attachment_name(&record, at)));
        }
        names.truncate(HALF_DONE);
        Ok(names)
    }

    fn shown(&self, id: &str, row: Read<ServerRow>) -> Shown {
        let ServerRow { name, version, schema_min, schema_max, address, grants, beat: _, rest: _ } =
            row.value;
        let since_beat = self.registry.since_beat(id);
        Shown {
            id: id.to_owned(),
            name,
            address,
            version,
            schema_min,
            schema_max,
            grants,
            beat_ms: since_beat.map(|since| u64::try_from(since.as_millis()).unwrap_or(u64::MAX)),
        }
    }
}
