//! The version of the values in etcd. It is raised when all servers of a release before are gone, and never lowered by a server.
//!
//! A server that runs and does not know a version stops serving when it meets it (`presence`). So an upgrade is refused while there is one. What a
//! server of an earlier release writes meanwhile compares the cluster's row, which the upgrade changes.

use csi_proto::cluster::v1::{ServerRows, UpgradeAsk};
use csi_proto::identity::Identity;
use csid::error::shortened;
use csid::{Error, Kind};
use csid_etcd::{RowKey, Rows, Write, Written};

use crate::cluster::{Cluster, RESTORED, meta_guard};
use crate::edges;
use crate::failure::Result;
use crate::grants::May;
use crate::rows::{self, MetaRow, Mode, Schemas, ServerRow};

/// Tries of a change that others are faster with.
const TRIES: usize = 16;

impl Cluster {
    /// Raises the version of the values. Returns the servers that run.
    pub async fn upgrade(&self, caller: &Identity, ask: UpgradeAsk) -> Result<ServerRows> {
        self.require_operator(caller, May::Cluster)?;
        for _ in 0..TRIES {
            let here = self.presence.here()?;
            let meta = self.while_here(self.meta_now()).await?;
            if meta.value.schema == ask.schema {
                return self.list_servers().await;
            }
            if ask.schema < meta.value.schema {
                let text = format!(
                    "the values in etcd have version {}, which is not lowered to {}",
                    meta.value.schema, ask.schema
                );
                return Err(Error::invalid(text).into());
            }
            match meta.value.mode {
                Mode::Normal => {}
                Mode::Recovering => {
                    return Err(Error::new(Kind::Busy, "the cluster recovers from a backup").into());
                }
                Mode::Restored => return Err(Error::new(Kind::Busy, RESTORED).into()),
            }
            self.while_here(self.refuse_unknown(ask.schema)).await?;
            let after = MetaRow { schema: ask.schema, ..meta.value.clone() };
            let write =
                Write { value: Some(rows::write(&RowKey::Meta, &after)?), key: RowKey::Meta, lease: 0 };
            let guards = [meta_guard(&meta), here.guard()];
            let written =
                self.while_here(async { Ok(edges::write(&self.rows, &guards, vec![write]).await?) }).await;
            self.forget(&RowKey::Meta);
            match written {
                Ok(Written::Done { .. }) => {
                    let (before, after) = (meta.value.schema, ask.schema);
                    tracing::warn!(%caller, before, after, "the version of the values in etcd was raised");
                    return self.list_servers().await;
                }
                // The row says what came of it.
                Ok(Written::Refused(_) | Written::Unknown) => {}
                Err(error) if error.is_unavailable() => {
                    let text =
                        format!("it is not known whether the values in etcd have version {}", ask.schema);
                    return Err(Error::new(Kind::Uncertain, text).into());
                }
                Err(error) => return Err(error),
            }
        }
        Err(Error::new(Kind::Busy, format!("the cluster's row changed {TRIES} times meanwhile")).into())
    }

    /// Refuses a version that a server which runs does not know.
    async fn refuse_unknown(&self, schema: u32) -> Result<()> {
        for (key, row) in self.rows.all(&Rows::Servers).await? {
            let RowKey::Server(id) = &key else { continue };
            let ServerRow { name, schema_min: min, schema_max: max, version, .. } =
                rows::read(&key, &row)?.value;
            let known = Schemas { min, max };
            if !known.know(schema) {
                let text = format!(
                    "the server {} ({id}, csid-server {}) runs and knows values of version {known}, and not {schema}",
                    shortened(&name),
                    shortened(&version)
                );
                return Err(Error::new(Kind::Busy, text).into());
            }
        }
        Ok(())
    }
}
