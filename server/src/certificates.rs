//! Certificates of callers. TLS verifies a chain when a connection begins. A connection that is resumed has the chain of the earlier one,
//! unverified. So the chain is verified with the calls, too.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustls::RootCertStore;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use sha2::{Digest, Sha256};

/// How long a verified chain is not verified again.
const VERIFIED: Duration = Duration::from_secs(60);
/// The limit of chains that are remembered.
const MOST: usize = 10_000;

/// What verifies callers.
pub struct Certificates {
    verifier: Arc<dyn ClientCertVerifier>,
    /// When chains were verified, by their digests.
    verified: Mutex<HashMap<[u8; 32], Instant>>,
}

impl Certificates {
    /// Reads the cluster's authority.
    pub fn new(ca: &[u8]) -> Result<Self> {
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(ca) {
            roots.add(certificate.context("ca.pem")?).context("ca.pem")?;
        }
        ensure!(!roots.is_empty(), "ca.pem has no certificate");
        let provider = Arc::new(ring::default_provider());
        let verifier = WebPkiClientVerifier::builder_with_provider(roots.into(), provider).build();
        Ok(Certificates { verifier: verifier.context("ca.pem")?, verified: Mutex::default() })
    }

    /// Verifies a caller's chain, whose first certificate is the caller's. A verdict is remembered for a minute at most.
    pub fn verify(
        &self,
        chain: &[CertificateDer<'_>],
        now: UnixTime,
        at: Instant,
    ) -> Result<(), rustls::Error> {
        let (own, others) = chain.split_first().ok_or(rustls::Error::NoCertificatesPresented)?;
        let mut digest = Sha256::new();
        for certificate in chain {
            // The length keeps two chains apart that are the same bytes in a row.
            digest.update(certificate.len().to_be_bytes());
            digest.update(certificate);
        }
        let digest = digest.finalize().into();
        let is_fresh = |since: &Instant| at.saturating_duration_since(*since) < VERIFIED;
        let verified = || self.verified.lock().unwrap_or_else(PoisonError::into_inner);
        if verified().get(&digest).is_some_and(is_fresh) {
            return Ok(());
        }
        self.verifier.verify_client_cert(own, others, now)?;
        let mut verified = verified();
        if verified.len() >= MOST {
            verified.retain(|_, since| is_fresh(since));
        }
        if verified.len() < MOST {
            verified.insert(digest, at);
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "../tests/cluster/certificates.rs"]
#[allow(dead_code, reason = "the tests of the cluster use more of it")]
pub(crate) mod authority;

#[cfg(test)]
mod tests {
    use super::authority::{Authority, Purpose};
    use super::*;

    #[test]
    fn verdict_of_a_certificate_is_kept_for_a_minute() {
        let authority = Authority::new();
        let pair = authority.issue("n1", "URI:csid://prod/node/n1", Purpose::Client, 1);
        let certificates = Certificates::new(&std::fs::read(authority.certificate()).unwrap()).unwrap();
        let chain = [CertificateDer::from_pem_file(pair.certificate).unwrap()];
        let (now, at) = (UnixTime::now(), Instant::now());
        let later = UnixTime::since_unix_epoch(Duration::from_secs(now.as_secs() + 2 * 24 * 60 * 60));
        certificates.verify(&chain, later, at).expect_err("it has expired");
        certificates.verify(&chain, now, at).unwrap();
        certificates.verify(&chain, later, at + Duration::from_secs(59)).unwrap();
        certificates.verify(&chain, later, at + Duration::from_secs(60)).expect_err("it has expired");
        certificates.verify(&[], now, at).expect_err("there is none");
        let another = Authority::new();
        let other = another.issue("n1", "URI:csid://prod/node/n1", Purpose::Client, 1);
        let other = [CertificateDer::from_pem_file(other.certificate).unwrap()];
        certificates.verify(&other, now, at).expect_err("it is of another authority");
    }
}
