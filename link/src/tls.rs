//! TLS to a server: the node's certificate for this end, and the check that the far end is a server of the cluster.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, bail};
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
    let [ca, certificate, key] = ["ca.pem", "node.pem", "node.key"].map(|name| directory.join(name));
    Ok(client(&ca, &certificate, &key, bytes, Role::Node, Some(cluster))?.config)
}

/// Makes a client of an authority, a certificate and its key, which `read_key` reads. All are PEM. The certificate has to be of this role.
/// The client accepts servers of its own cluster alone. `cluster`: the cluster that the certificate has to name, or `None` for any.
pub fn client<K: AsRef<[u8]>>(
    ca: &Path,
    certificate: &Path,
    key: &Path,
    read_key: impl FnOnce(&Path) -> Result<K>,
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
    let path = key;
    let key = private_key(path, read_key(path)?.as_ref())?;
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

/// Reads a key. The parser's error has the text that it cannot read, which is the key, so no error has it as its source.
fn private_key(path: &Path, pem: &[u8]) -> Result<PrivateKeyDer<'static>> {
    PrivateKeyDer::from_pem_slice(pem).map_err(|_| anyhow!("{}: not a private key as PEM", path.display()))
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let bytes = bytes(path)?;
    // The parser's error has the text that it cannot read, and a key may be in the same file.
    let Ok(read) = CertificateDer::pem_slice_iter(&bytes).collect() else {
        bail!("{}: not certificates as PEM", path.display())
    };
    Ok(read)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_shows_nothing_of_a_key() {
        let texts = [
            "-----BEGIN PRIVATE KEY----- MIGHAgEAMBMG -----END PRIVATE KEY-----",
            "-----BEGIN PRIVATE KEY-----MIGHAgEAMBMG\nMIGHAgEAMBMG",
            "-----BEGIN PRIVATE KEY-----\nMIGHAgEAMBMG!\n-----END PRIVATE KEY-----\n",
            "MIGHAgEAMBMG",
        ];
        for text in texts {
            let error = private_key(Path::new("/key"), text.as_bytes()).expect_err("no key is in it");
            assert_eq!(format!("{error:?}").lines().next(), Some("/key: not a private key as PEM"));
            assert!(error.source().is_none(), "{error:?}");
        }
    }
}
