//! Certificates of callers. TLS verifies a chain when a connection begins. A connection that is resumed has the chain of the earlier one,
//! unverified. So the chain is verified with the calls, too.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustls::RootCertStore;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use sha2::{Digest, Sha256};

/// How long a verified chain is not verified again.
const VERIFIED: Duration = Duration::from_secs(60);
/// The limit of chains that are remembered.
const MOST: usize = 10_000;

/// What verifies callers.
pub struct Certificates {
    roots: Arc<RootCertStore>,
    current: Mutex<Verifying>,
}

struct Verifying {
    verifier: Arc<dyn ClientCertVerifier>,
    /// The revocation lists, as PEM. Empty: there are none.
    crl: Vec<u8>,
    /// When chains were verified, by their digests.
    verified: HashMap<[u8; 32], Instant>,
}

impl Certificates {
    /// Reads the cluster's authority and its revocation lists, as PEM. An empty `crl`: there are none.
    pub fn new(ca: &[u8], crl: Vec<u8>) -> Result<Self> {
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(ca) {
            roots.add(certificate.context("ca.pem")?).context("ca.pem")?;
        }
        ensure!(!roots.is_empty(), "ca.pem has no certificate");
        let roots = Arc::new(roots);
        let verifier = verifier(&roots, &crl)?;
        let current = Mutex::new(Verifying { verifier, crl, verified: HashMap::new() });
        Ok(Certificates { roots, current })
    }

    /// Takes other revocation lists. Returns whether they differ from the earlier ones. Lists that cannot be read change nothing.
    pub fn set_revoked(&self, crl: Vec<u8>) -> Result<bool> {
        let verifier = verifier(&self.roots, &crl)?;
        let mut current = self.lock();
        let differs = current.crl != crl;
        if differs {
            *current = Verifying { verifier, crl, verified: HashMap::new() };
        }
        Ok(differs)
    }

    fn lock(&self) -> MutexGuard<'_, Verifying> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
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
        let verifier = {
            let current = self.lock();
            if current.verified.get(&digest).is_some_and(is_fresh) {
                return Ok(());
            }
            Arc::clone(&current.verifier)
        };
        verifier.verify_client_cert(own, others, now)?;
        let mut current = self.lock();
        // The verdict may be of earlier revocation lists.
        if !Arc::ptr_eq(&current.verifier, &verifier) {
            return Ok(());
        }
        if current.verified.len() >= MOST {
            current.verified.retain(|_, since| is_fresh(since));
        }
        if current.verified.len() < MOST {
            current.verified.insert(digest, at);
        }
        Ok(())
    }
}

/// Reads revocation lists as PEM. Fails if there is none, or one is no list.
pub fn read_crl(crl: &[u8]) -> Result<Vec<CertificateRevocationListDer<'static>>> {
    let mut lists = Vec::new();
    for list in CertificateRevocationListDer::pem_slice_iter(crl) {
        let list = list.context("crl")?;
        webpki::BorrowedCertRevocationList::from_der(&list).context("crl")?;
        lists.push(list);
    }
    ensure!(!lists.is_empty(), "crl has no revocation list");
    Ok(lists)
}

/// Makes what verifies chains. With revocation lists it refuses a certificate that is on one, and one whose issuer has none.
fn verifier(roots: &Arc<RootCertStore>, crl: &[u8]) -> Result<Arc<dyn ClientCertVerifier>> {
    let provider = Arc::new(ring::default_provider());
    let builder = WebPkiClientVerifier::builder_with_provider(Arc::clone(roots), provider);
    let builder = match crl.is_empty() {
        true => builder,
        false => builder.with_crls(read_crl(crl)?).only_check_end_entity_revocation(),
    };
    builder.build().context("ca.pem or crl")
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
    fn revoked_certificate_is_refused_at_once() {
        let authority = Authority::new();
        let issue = |name: &str| authority.issue(name, "URI:csid://prod/node/n1", Purpose::Client, 1);
        let pairs = [issue("n1"), issue("n2")];
        let ca = std::fs::read(authority.certificate()).unwrap();
        let certificates = Certificates::new(&ca, Vec::new()).unwrap();
        let (now, at) = (UnixTime::now(), Instant::now());
        let verify = |n: usize| {
            let chain = [CertificateDer::from_pem_file(&pairs[n].certificate).unwrap()];
            certificates.verify(&chain, now, at)
        };
        verify(0).unwrap();
        let crl = |pairs: &[&_]| std::fs::read(authority.revoke(pairs)).unwrap();
        let (none, first) = (crl(&[]), crl(&[&pairs[0]]));
        assert!(certificates.set_revoked(none.clone()).unwrap());
        verify(0).unwrap();
        assert!(!certificates.set_revoked(none).unwrap(), "nothing differs");
        for wrong in [&b"no list"[..], &ca] {
            certificates.set_revoked(wrong.to_vec()).unwrap_err();
            verify(0).unwrap();
        }
        assert!(certificates.set_revoked(first).unwrap());
        verify(0).expect_err("it is revoked");
        verify(1).unwrap();
        // A list of another authority says nothing of this one's certificates.
        let other = std::fs::read(Authority::new().revoke(&[])).unwrap();
        assert!(certificates.set_revoked(other).unwrap());
        verify(1).expect_err("no list is its issuer's");
        assert!(certificates.set_revoked(Vec::new()).unwrap());
        verify(0).unwrap();
    }

    #[test]
    fn verdict_of_a_certificate_is_kept_for_a_minute() {
        let authority = Authority::new();
        let pair = authority.issue("n1", "URI:csid://prod/node/n1", Purpose::Client, 1);
        let certificates =
            Certificates::new(&std::fs::read(authority.certificate()).unwrap(), Vec::new()).unwrap();
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
