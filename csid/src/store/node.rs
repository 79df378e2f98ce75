//! This host's name in claims. It is kept from the first start on: a host that is called otherwise later has its claims
//! still.

use rusqlite::{Connection, OptionalExtension};

use crate::store::error::{StoreError, at};
use crate::store::tables::{meta, put_meta};

const KEY: &str = "node";

pub(super) struct NodeName {
    pub name: String,
    /// The journal says so; until then each transaction does, and a claim is in none before.
    pub kept: bool,
}

impl NodeName {
    /// The name that is asked for, else the one that was kept, else the host's.
    pub fn named(db: &Connection, wanted: Option<&str>) -> Result<NodeName, StoreError> {
        let kept: Option<String> = meta(db, KEY).optional().map_err(at("read the node's name"))?;
        if let (Some(wanted), Some(kept)) = (wanted, &kept)
            && wanted != kept
        {
            tracing::warn!(
                wanted,
                kept,
                "this host has another name now; claims of its earlier one stay that one's"
            );
        }
        let name = wanted.map(str::to_owned).or_else(|| kept.clone()).unwrap_or_else(host_name);
        Ok(NodeName { kept: kept.as_ref() == Some(&name), name })
    }

    pub fn keep(&self, db: &Connection) -> Result<(), StoreError> {
        match self.kept {
            true => Ok(()),
            false => put_meta(db, KEY, &self.name).map_err(at("keep the node's name")),
        }
    }
}

fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}
