//! The servers that run, as operators see them.

use csi_proto::cluster::v1::{ServerRow as Shown, ServerRows};
use csid_etcd::{RowKey, Rows};

use crate::cluster::Cluster;
use crate::failure::Result;
use crate::heard::Missing;
use crate::nodes::SERVERS;
use crate::rows::{self, Mode, Read, ServerRow};

impl Cluster {
    /// Returns the servers that run, by their names.
    pub async fn list_servers(&self) -> Result<ServerRows> {
        let here = self.presence.here()?;
        self.while_here(async {
            let meta = self.meta_now().await?.value;
            let mut servers = Vec::new();
            for (key, row) in self.rows.list(&Rows::Servers, SERVERS).await? {
                let RowKey::Server(id) = &key else { continue };
                servers.push(self.shown(id, rows::read(&key, &row)?));
            }
            let (cause, by, since_usec) =
                meta.recovery.map(|of| (of.reason, of.by, of.since_usec)).unwrap_or_default();
            let missing = match meta.mode {
                Mode::Recovering => self.missing(meta.generation).await?,
                Mode::Normal | Mode::Restored => Missing::default(),
            };
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
            })
        })
        .await
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
