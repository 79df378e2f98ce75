//! The far end: a server, and connections to it.

use std::io::{Error, ErrorKind, Result};
use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::ServerName;
use rustls::{CertificateError, ClientConfig};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::config;

/// How long the connection to a server and its handshake may take together.
const CONNECT: Duration = Duration::from_secs(5);

/// A server of the cluster.
pub struct Far {
    server: String,
    host: String,
    port: u16,
    name: ServerName<'static>,
    connector: TlsConnector,
}

impl Far {
    /// Makes the far end of HOST:PORT. It connects with a configuration of [`client`](crate::tls::client).
    pub fn new(server: &str, tls: Arc<ClientConfig>) -> Result<Far> {
        let wrong = || Error::new(ErrorKind::InvalidInput, format!("{server:?} is not HOST:PORT"));
        let (host, port) = config::split(server).ok_or_else(wrong)?;
        let name = ServerName::try_from(host.to_owned()).map_err(|_| wrong())?;
        let connector = TlsConnector::from(tls);
        Ok(Far { server: server.to_owned(), host: host.to_owned(), port, name, connector })
    }

    /// Returns HOST:PORT.
    pub fn server(&self) -> &str {
        &self.server
    }

    /// Connects to the server, and checks that it is one of the cluster. It takes 5 s at most.
    pub async fn connect(&self) -> Result<TlsStream<TcpStream>> {
        let connecting = async {
            let stream = TcpStream::connect((self.host.as_str(), self.port)).await?;
            stream.set_nodelay(true)?;
            self.connector.connect(self.name.clone(), stream).await
        };
        let late = || Error::new(ErrorKind::TimedOut, format!("no answer within {} s", CONNECT.as_secs()));
        tokio::time::timeout(CONNECT, connecting).await.map_err(|_| late())?.map_err(explained)
    }
}

/// Returns the same error for the same failure, in words. Those of certificates name the second of the handshake.
fn explained(error: Error) -> Error {
    let refused = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    let text = match refused {
        Some(rustls::Error::InvalidCertificate(why)) => match why {
            CertificateError::ApplicationVerificationFailure => "the far end is no server of the cluster",
            CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
                "the far end's certificate has expired by this machine's clock"
            }
            CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
                "the far end's certificate is not valid yet by this machine's clock"
            }
            _ => return error,
        },
        _ => return error,
    };
    Error::new(error.kind(), text)
}
