//! Certificates of a cluster, made by openssl.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use tempfile::TempDir;

/// What a key is for.
#[derive(Clone, Copy)]
pub enum Purpose {
    Client,
    Server,
    Both,
}

/// An authority, with a directory for what it issues.
pub struct Authority {
    directory: TempDir,
}

/// A certificate and its key.
#[derive(Clone)]
pub struct Pair {
    pub certificate: PathBuf,
    pub key: PathBuf,
}

impl Authority {
    pub fn new() -> Authority {
        let directory = tempfile::Builder::new().prefix("csid-ca.").tempdir().unwrap();
        let authority = Authority { directory };
        let (key, certificate) = (authority.path("ca.key"), authority.path("ca.pem"));
        openssl(
            "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 30 -subj /CN=authority \
             -addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign,cRLSign",
            &[("-keyout", &key), ("-out", &certificate)],
        );
        authority
    }

    pub fn certificate(&self) -> PathBuf {
        self.path("ca.pem")
    }

    pub fn key(&self) -> PathBuf {
        self.path("ca.key")
    }

    /// Issues a certificate with these subject alternative names, such as `URI:csid://prod/node/n1`. With 0 days it expires at once.
    pub fn issue(&self, file: &str, names: &str, purpose: Purpose, days: u32) -> Pair {
        let (key, request, extensions) =
            (self.path(&format!("{file}.key")), self.path(&format!("{file}.csr")), self.path("extensions"));
        let certificate = self.path(&format!("{file}.pem"));
        openssl(
            "req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=csid-server",
            &[("-keyout", &key), ("-out", &request)],
        );
        let usage = match purpose {
            Purpose::Client => "clientAuth",
            Purpose::Server => "serverAuth",
            Purpose::Both => "serverAuth,clientAuth",
        };
        let names = if names.is_empty() { String::new() } else { format!("subjectAltName={names}\n") };
        let text = format!("basicConstraints=CA:FALSE\nextendedKeyUsage={usage}\n{names}");
        std::fs::write(&extensions, text).unwrap();
        openssl(
            &format!("x509 -req -CAcreateserial -days {days}"),
            &[
                ("-in", &request),
                ("-CA", &self.certificate()),
                ("-CAkey", &self.path("ca.key")),
                ("-extfile", &extensions),
                ("-out", &certificate),
            ],
        );
        Pair { certificate, key }
    }

    /// Returns a list, as PEM, of the certificates that are revoked: these, and those of earlier calls.
    pub fn revoke(&self, pairs: &[&Pair]) -> PathBuf {
        let (config, database, list) = (self.path("ca.cnf"), self.path("index.txt"), self.path("crl.pem"));
        let number = self.path("crlnumber");
        if !number.exists() {
            let text = format!(
                "[ca]\ndefault_ca=own\n[own]\ndatabase={}\ncrlnumber={}\ndefault_md=sha256\ndefault_crl_days=30\n",
                database.display(),
                number.display()
            );
            std::fs::write(&config, text).unwrap();
            std::fs::write(&database, "").unwrap();
            std::fs::write(&number, "01\n").unwrap();
        }
        let (certificate, key) = (self.certificate(), self.key());
        let files = [("-config", &*config), ("-cert", &*certificate), ("-keyfile", &*key)];
        for pair in pairs {
            openssl("ca", &[&files[..], &[("-revoke", &*pair.certificate)]].concat());
        }
        openssl("ca -gencrl", &[&files[..], &[("-out", &*list)]].concat());
        list
    }

    fn path(&self, file: &str) -> PathBuf {
        self.directory.path().join(file)
    }
}

fn openssl(arguments: &str, files: &[(&str, &Path)]) {
    let mut command = Command::new("openssl");
    command.args(arguments.split_whitespace());
    for (option, path) in files {
        command.arg(option).arg(path);
    }
    let output = command.stdin(Stdio::null()).output().expect("openssl is not installed");
    assert!(output.status.success(), "{arguments}: {}", String::from_utf8_lossy(&output.stderr));
}
