//! Who calls, and what the grants allow. What is not allowed here is refused.

use std::net::SocketAddr;
use std::time::Instant;

use csi_proto::identity::{Identity, Role};
use csid_etcd::{Expected, Guard, RowKey};
use rustls::pki_types::UnixTime;
use tonic::transport::server::TlsConnectInfo;
use tonic::{Extensions, Request};

use crate::cluster::{Cluster, meta_guard, node_guard};
use crate::failure::{Result, ServerError};
use crate::grants::May;

/// What a connection brings, besides its certificate.
#[derive(Clone, Debug)]
pub struct Peer {
    pub address: SocketAddr,
}

impl Cluster {
    /// Returns the identity of a caller, by its certificate.
    pub fn caller<T>(&self, request: &Request<T>) -> Result<Identity> {
        self.caller_by(request.extensions())
    }

    /// Fails if a node may have no session any more: a reload has come since its call began. `extensions`: the call's.
    pub fn may_still_join(&self, node: &Identity, extensions: &Extensions) -> Result<()> {
        if let Some(info) = extensions.get::<TlsConnectInfo<Peer>>() {
            self.identity(Some(info))?;
        }
        match self.config.grants.allow_anywhere(node, May::Join) {
            true => Ok(()),
            false => Err(ServerError::denied(format!("{node} has no grant for join"))),
        }
    }

    /// Returns the identity of a caller: what the gate has found by the certificate, or the same without a gate.
    pub fn caller_by(&self, extensions: &Extensions) -> Result<Identity> {
        // No peer writes these. In the simulation, which has no TLS, its network does.
        if let Some(identity) = extensions.get::<Identity>() {
            return Ok(identity.clone());
        }
        let info = extensions.get::<TlsConnectInfo<Peer>>();
        self.identity(info).inspect_err(|error| {
            let address = info.map(|info| info.get_ref().address);
            tracing::debug!(?address, "a caller was refused: {error}");
        })
    }

    fn identity(&self, info: Option<&TlsConnectInfo<Peer>>) -> Result<Identity> {
        let certificates = info.and_then(TlsConnectInfo::peer_certs);
        let certificate = certificates.as_ref().and_then(|certificates| certificates.first());
        let certificate = certificate.ok_or_else(|| ServerError::denied("the caller has no certificate"))?;
        let chain = certificates.as_deref().map(Vec::as_slice).unwrap_or_default();
        let verified = self.certificates.verify(chain, UnixTime::now(), Instant::now());
        verified.map_err(|error| {
            ServerError::denied(format!("the caller's certificate is not valid now: {error}"))
        })?;
        let read = webpki::EndEntityCert::try_from(certificate);
        let read = read.map_err(|_| ServerError::denied("the caller's certificate cannot be read"))?;
        let identity = Identity::of(read.valid_uri_names());
        let identity = identity.ok_or_else(|| {
            ServerError::denied("the caller's certificate has not exactly one name csid://CLUSTER/ROLE/NAME")
        })?;
        match identity.cluster == self.config.cluster {
            true => Ok(identity),
            false => Err(ServerError::denied(format!(
                "the caller is of the cluster {}, and this is {}",
                identity.cluster, self.config.cluster
            ))),
        }
    }

    /// Refuses what no grant allows.
    pub fn require(&self, caller: &Identity, namespace: &str, may: May) -> Result<()> {
        match self.config.grants.allow(caller, namespace, may) {
            true => Ok(()),
            false => Err(ServerError::denied(format!(
                "{caller} has no grant for {} in namespace {namespace}",
                may.word()
            ))),
        }
    }

    /// Refuses a caller that may not see the names and states of a namespace.
    pub fn require_sight(&self, caller: &Identity, namespace: &str) -> Result<()> {
        match self.sees(caller, namespace) {
            true => Ok(()),
            false => self.require(caller, namespace, May::Read),
        }
    }

    /// Returns whether a caller may see the names and states of a namespace. A node sees those that it may mount.
    pub fn sees(&self, caller: &Identity, namespace: &str) -> bool {
        let allows = |may| self.config.grants.allow(caller, namespace, may);
        allows(May::Read) || allows(May::Mount)
    }

    /// Refuses a node that is blocked. It has its certificate and its grants still.
    pub async fn require_unblocked(&self, caller: &Identity) -> Result<()> {
        if caller.role == Role::Node {
            self.unblocked(&caller.name).await?;
        }
        Ok(())
    }

    /// Refuses a node that is blocked. Returns the guard of its row, for a change that it asks for. `None`: the caller is no node.
    pub async fn unblocked_guard(&self, caller: &Identity) -> Result<Option<Guard>> {
        if caller.role != Role::Node {
            return Ok(None);
        }
        Ok(Some(match self.unblocked(&caller.name).await? {
            Some(row) => node_guard(&caller.name, &row),
            None => Guard { key: RowKey::Node(caller.name.clone()), is: Expected::Absent },
        }))
    }

    /// Returns the guards of a change that a caller asks for: the cluster's row, this server's, and that of a node that calls. Refuses a node that is
    /// blocked, and each caller while the cluster recovers or this server does not follow etcd.
    pub async fn guards_of(&self, caller: &Identity) -> Result<Vec<Guard>> {
        let here = self.presence.here()?;
        let mut guards = vec![meta_guard(&self.normal().await?), here.guard()];
        guards.extend(self.unblocked_guard(caller).await?);
        Ok(guards)
    }

    /// Refuses a caller that is no operator, and an operator without a grant for all namespaces: nodes and servers belong to none.
    pub fn require_operator(&self, caller: &Identity, may: May) -> Result<()> {
        if caller.role != Role::Operator {
            return Err(ServerError::denied(format!("{caller} is not an operator")));
        }
        match self.config.grants.allow_everywhere(caller, may) {
            true => Ok(()),
            false => Err(ServerError::denied(format!(
                "{caller} has no grant for {} in all namespaces",
                may.word()
            ))),
        }
    }

    /// Refuses a caller that is no node.
    pub fn require_node(&self, caller: &Identity) -> Result<()> {
        match caller.role {
            Role::Node => Ok(()),
            Role::Operator | Role::Server => Err(ServerError::denied(format!("{caller} is not a node"))),
        }
    }
}
