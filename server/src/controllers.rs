//! Nodes that run controllers of plugins. A node is one only by its grant.

use std::collections::{BTreeSet, HashMap};
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};

use csi_proto::cluster::v1::{Attaches, PluginReport, Plugins};
use csi_proto::identity::{Identity, Role};
use csid::store::registry::{Record, VolumeName};
use csid::{Error, Kind};
use csid_etcd::{Expected, Guard, RowKey, Write, Written};

use crate::cluster::{Cluster, node_guard};
use crate::edges;
use crate::failure::{Result, ServerError};
use crate::rows::{self, NodeRow, NodeState, PluginRow, Read};
use crate::sessions::Hosted;

/// Tries of a change that others are faster with.
const TRIES: usize = 16;
/// The limit of nodes with a controller of one plugin.
const CONTROLLERS: usize = 1000;

impl Cluster {
    /// Returns which of some nodes may be sent a volume's controller calls, the one that is preferred first. Volumes are spread over the
    /// nodes, and one volume stays with one.
    pub fn hosts(&self, record: &Record, nodes: Vec<String>) -> Vec<String> {
        let (plugin, namespace) = (&record.volume.plugin, Some(record.name.namespace.as_str()));
        let mut hosts: Vec<String> = nodes
            .into_iter()
            .filter(|node| self.config.grants.allow_controller(&self.identity_of(node), namespace, plugin))
            .collect();
        let volume = (&record.name.namespace, &record.name.volume);
        let place = |node: &String| BuildHasherDefault::<DefaultHasher>::default().hash_one((volume, node));
        hosts.sort_by_key(|node| std::cmp::Reverse(place(node)));
        hosts
    }

    /// Returns the guard of a call's host: its row as it was when the host could have a session. `None`: it may have none.
    pub async fn host_guard(&self, host: &str) -> Result<Option<Guard>> {
        let row = self.node(host).await?;
        let may_have_one =
            |row: &Read<NodeRow>| matches!(row.value.state, NodeState::Ready | NodeState::Draining);
        Ok(row.filter(may_have_one).map(|row| node_guard(host, &row)))
    }

    pub(crate) fn identity_of(&self, node: &str) -> Identity {
        Identity { cluster: self.config.cluster.clone(), role: Role::Node, name: node.to_owned() }
    }

    /// Returns whether a plugin has a controller for volumes of a namespace, by its row. A node is one where its grant says so, and
    /// nowhere else.
    pub fn has_controllers(&self, namespace: &str, plugin: &str, row: Option<&PluginRow>) -> bool {
        let is_one = |node: &String| {
            self.config.grants.allow_controller(&self.identity_of(node), Some(namespace), plugin)
        };
        row.is_some_and(|row| row.controllers.iter().any(is_one))
    }

    /// Returns the error of a volume that no host can attach. Without a grant no host ever will. Otherwise one may just have begun, and the
    /// node asks again until its caller's deadline.
    pub fn no_controller(&self, name: &VolumeName, plugin: &str) -> ServerError {
        let (kind, why) = match self.config.grants.name_controller(Some(&name.namespace), plugin) {
            true => (Kind::PluginUnavailable, "has reported a controller that does"),
            false => (Kind::NotSupported, "is in csid-server.toml for this namespace"),
        };
        let text = format!(
            "{name}: plugin {plugin} attaches volumes, and no node with the grant controller:{plugin} {why}"
        );
        Error::new(kind, text).into()
    }

    /// Refuses a plugin that no grant for a controller names in the namespace (NotSupported). No host may create the volume by these grants.
    pub fn require_controller(&self, name: &VolumeName, plugin: &str) -> Result<()> {
        match self.config.grants.name_controller(Some(&name.namespace), plugin) {
            true => Ok(()),
            false => {
                let text = format!(
                    "{name}: no node with the grant controller:{plugin} is in csid-server.toml for this namespace"
                );
                Err(Error::new(Kind::NotSupported, text).into())
            }
        }
    }

    /// Returns which of some nodes may be asked about a plugin, in an order that stays the same. `namespace`: for volumes of this one. `None`: of some
    /// namespace.
    pub fn hosts_of_plugin(
        &self,
        plugin: &str,
        namespace: Option<&str>,
        mut nodes: Vec<String>,
    ) -> Vec<String> {
        let grants = &self.config.grants;
        nodes.retain(|node| grants.allow_controller(&self.identity_of(node), namespace, plugin));
        nodes.sort();
        nodes
    }

    /// Returns the plugins whose controllers a node may be sent calls for, of those that are healthy there, and what each does.
    pub fn controllers_of(&self, node: &str, report: &Plugins) -> HashMap<String, Hosted> {
        let identity = self.identity_of(node);
        let is_one = |of: &&PluginReport| {
            of.controller && self.config.grants.allow_controller(&identity, None, &of.plugin)
        };
        let found = report.plugins.iter().filter(is_one);
        let hosted =
            |of: &PluginReport| Hosted { attaches: of.attaches() == Attaches::Yes, answers: of.calls > 0 };
        found.map(|of| (of.plugin.clone(), hosted(of))).collect()
    }

    /// Keeps which plugins of a node have a controller that attaches and that the node calls for others. The word of a node without the
    /// grant counts for nothing.
    pub async fn keep_controllers(&self, node: &str, report: &Plugins) -> Result<()> {
        let identity = self.identity_of(node);
        for of in &report.plugins {
            let is_granted = self.config.grants.allow_controller(&identity, None, &of.plugin);
            match of.attaches() {
                Attaches::Yes if is_granted && of.controller => {
                    self.keep_controller(node, &of.plugin, true, None).await?;
                }
                Attaches::No if is_granted => self.keep_controller(node, &of.plugin, false, None).await?,
                // The plugin may be away for a while. Without a grant, the row counts for nothing.
                Attaches::Yes | Attaches::No | Attaches::Unknown => {}
            }
        }
        Ok(())
    }

    /// Takes a node that is about to be forgotten out of the rows of its plugins.
    pub async fn drop_controllers(&self, node: &str, row: &Read<NodeRow>) -> Result<()> {
        let plugins = row.value.plugins.keys().chain(row.value.node_ids.keys());
        for plugin in plugins.collect::<BTreeSet<_>>() {
            self.keep_controller(node, plugin, false, Some(row)).await?;
        }
        Ok(())
    }

    /// Writes whether a node has a plugin's controller. `of`: the node's row that must not have changed. `None`: the present one.
    async fn keep_controller(
        &self,
        node: &str,
        plugin: &str,
        is_one: bool,
        of: Option<&Read<NodeRow>>,
    ) -> Result<()> {
        for _ in 0..TRIES {
            let here = self.presence.here()?;
            let present = self.plugin_now(plugin).await?;
            let before = present.as_ref().map(|row| row.value.clone()).unwrap_or_default();
            let mut after = before.clone();
            match is_one {
                true => after.controllers.insert(node.to_owned()),
                false => after.controllers.remove(node),
            };
            if after == before {
                return Ok(());
            }
            if after.controllers.len() > CONTROLLERS {
                let text = format!("plugin {plugin} has controllers on {CONTROLLERS} nodes, the limit");
                return Err(Error::new(Kind::RateLimited, text).into());
            }
            let row = match of {
                Some(row) => row.clone(),
                None => match self.unblocked(node).await? {
                    Some(row) => row,
                    None => return Ok(()),
                },
            };
            let key = RowKey::Plugin(plugin.to_owned());
            let write = Write { value: Some(rows::write(&key, &after)?), key, lease: 0 };
            let guards = [plugin_guard(plugin, present.as_ref()), node_guard(node, &row), here.guard()];
            let written = edges::write(&self.rows, &guards, vec![write]).await?;
            self.forget(&RowKey::Plugin(plugin.to_owned()));
            if let Written::Done { .. } = written {
                return Ok(());
            }
        }
        Err(Error::new(Kind::Busy, format!("the row of plugin {plugin} changed {TRIES} times meanwhile"))
            .into())
    }
}

/// Returns the guard of a plugin's row. A claim is granted without an attachment only while the plugin has no controller.
pub fn plugin_guard(plugin: &str, row: Option<&Read<PluginRow>>) -> Guard {
    let is = row.map_or(Expected::Absent, |row| Expected::Revision(row.revision));
    Guard { key: RowKey::Plugin(plugin.to_owned()), is }
}
