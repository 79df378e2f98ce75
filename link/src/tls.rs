//! TLS to a server: the node's certificate for this end, and the check that the far end is a server of the cluster.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use csi_proto::identity::{Identity, Role};
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};

use crate::config::bytes;

/// A client of the cluster: how it connects to servers, and who it is by its certificate.
pub struct TlsClient {
    pub config: ClientConfig,
    pub identity: Identity,
}

/// Reads ca.pem, node.pem and node.key of a directory. node.pem has to be a node's of the cluster.
pub fn node(directory: &Path, cluster: &str) -> Result<ClientConfig> {
    let path = |name: &str| directory.join(name);
    let key = path("node.key");
    let key = (key.as_path(), bytes(&key)?);
    let client = client(&path("ca.pem"), &path("node.pem"), (key.0, &key.1), Role::Node, Some(cluster))?;
    Ok(client.config)
}

/// Makes a client of an authority, a certificate and its key, the path and bytes of which are PEM. The certificate has to be of this role.
/// The client accepts servers of its own cluster alone. `cluster`: the cluster that the certificate has to name, or `None` for any.
pub fn client(
    ca: &Path,
    certificate: &Path,
    key: (&Path, &[u8]),
    role: Role,
    cluster: Option<&str>,
) -> Result<TlsClient> {
    let named = |path: &Path| path.display().to_string();
    let chain = certificates(certificate)?;
    let own = chain.first().with_context(|| format!("{} has no certificate", named(certificate)))?;
    let identity = match identity(own) {
        Some(of) if of.role == role && cluster.is_none_or(|cluster| of.cluster == cluster) => of,
        _ => {
            let cluster = cluster.unwrap_or("CLUSTER");
            bail!("{} has not exactly one URI name csid://{cluster}/{role}/NAME", named(certificate))
        }
    };
    let (path, pem) = key;
    let key = PrivateKeyDer::from_pem_slice(pem).with_context(|| named(path))?;
    let mut roots = RootCertStore::empty();
    for authority in certificates(ca)? {
        roots.add(authority).with_context(|| named(ca))?;
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let by_name = WebPkiServerVerifier::builder_with_provider(roots.into(), provider.clone()).build();
    let by_name = by_name.with_context(|| named(ca))?;
    let verifier = ServersOf { cluster: identity.cluster.clone(), by_name };
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier))
        .with_client_auth_cert(chain, key)
        .with_context(|| format!("{} does not fit {}", named(path), named(certificate)))?;
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(TlsClient { config, identity })
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let bytes = bytes(path)?;
    let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&bytes).collect();
    read.with_context(|| path.display().to_string())
}

fn identity(certificate: &CertificateDer<'_>) -> Option<Identity> {
    Identity::of(webpki::EndEntityCert::try_from(certificate).ok()?.valid_uri_names())
}

/// Accepts the servers of one cluster: by the authority, the DNS name and the URI name. Without the URI name a node's key could pass
/// for a server.
#[derive(Debug)]
struct ServersOf {
    cluster: String,
    by_name: Arc<WebPkiServerVerifier>,
}

impl ServerCertVerifier for ServersOf {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let verified =
            self.by_name.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now)?;
        match identity(end_entity) {
            Some(Identity { cluster, role: Role::Server, .. }) if cluster == self.cluster => Ok(verified),
            _ => Err(CertificateError::ApplicationVerificationFailure.into()),
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.by_name.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.by_name.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.by_name.supported_verify_schemes()
    }
}
