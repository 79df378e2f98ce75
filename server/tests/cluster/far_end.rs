//! A far end with any certificate, that counts the bytes it gets and answers nothing.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::io::AsyncReadExt;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;

use crate::certificates::Pair;

pub struct FarEnd {
    address: SocketAddr,
    bytes: Arc<AtomicUsize>,
    task: JoinHandle<()>,
}

impl FarEnd {
    /// Listens at the address that the certificates of this process' servers name.
    pub fn start(pair: &Pair) -> FarEnd {
        let [_, _, high, low] = std::process::id().to_be_bytes();
        FarEnd::start_at(pair, &Ipv4Addr::new(127, high, low, 251).to_string())
    }

    pub fn start_at(pair: &Pair, host: &str) -> FarEnd {
        let certificate = CertificateDer::from_pem_slice(&fs::read(&pair.certificate).unwrap()).unwrap();
        let key = PrivateKeyDer::from_pem_slice(&fs::read(&pair.key).unwrap()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let mut config =
            config.unwrap().with_no_client_auth().with_single_cert(vec![certificate], key).unwrap();
        config.alpn_protocols = vec![b"h2".to_vec()];
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let listener = std::net::TcpListener::bind((host, 0)).unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let listener = TcpListener::from_std(listener).unwrap();
        let bytes = Arc::new(AtomicUsize::new(0));
        let count = bytes.clone();
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let Ok(mut stream) = acceptor.accept(stream).await else { continue };
                let mut buffer = [0; 1024];
                // The preface of HTTP/2 and the first frames are enough.
                if let Ok(size) = stream.read(&mut buffer).await {
                    count.fetch_add(size, Ordering::Relaxed);
                }
            }
        });
        FarEnd { address, bytes, task }
    }

    pub fn address(&self) -> String {
        self.address.to_string()
    }

    pub fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }
}

impl Drop for FarEnd {
    fn drop(&mut self) {
        self.task.abort();
    }
}
