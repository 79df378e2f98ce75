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

/// Reads ca.pem, node.pem and node.key of a directory. node.pem has to be a node's of the cluster.
pub fn client(directory: &Path, cluster: &str) -> Result<ClientConfig> {
    let chain = certificates(&directory.join("node.pem"))?;
    let own = chain.first().context("node.pem has no certificate")?;
    match identity(own) {
        Some(Identity { cluster: of, role: Role::Node, .. }) if of == cluster => {}
        _ => bail!("node.pem has not exactly one URI name csid://{cluster}/node/NAME"),
    }
    let key = PrivateKeyDer::from_pem_slice(&bytes(&directory.join("node.key"))?).context("node.key")?;
    let mut roots = RootCertStore::empty();
    for authority in certificates(&directory.join("ca.pem"))? {
        roots.add(authority).context("ca.pem")?;
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let by_name = WebPkiServerVerifier::builder_with_provider(roots.into(), provider.clone()).build()?;
    let verifier = ServersOf { cluster: cluster.to_owned(), by_name };
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier))
        .with_client_auth_cert(chain, key)
        .context("node.key does not fit node.pem")?;
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(config)
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
