//! A systemd credential as it is now. systemd gives a service its own credentials at its start and never again, so each
//! is fetched by a unit of its own, which lives as long as that takes: systemd finds, decrypts and hands it to a `cat` that may
//! do nothing else, and that writes it into csid's pipe.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::pipe::{PipeFlags, pipe_with};
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe::Receiver;
use tokio::sync::oneshot;
use zbus::Variant;
use zeroize::Zeroizing;

use crate::host::units::{Units, UnitsError};

/// A credential that takes longer has failed: it may come from a socket that nobody serves.
const PATIENCE: Duration = Duration::from_secs(10);
/// The credential's name in the unit. The caller's name is never part of a command line.
const ID: &str = "secret";
/// The directories in which systemd 252 looks up the bare name of an encrypted credential.
const ENCRYPTED: [&str; 3] =
    ["/etc/credstore.encrypted", "/run/credstore.encrypted", "/usr/lib/credstore.encrypted"];

#[derive(Debug, thiserror::Error)]
pub enum CredentialError {
    #[error(transparent)]
    Units(#[from] UnitsError),
    #[error("systemd did not hand it over within {PATIENCE:?}")]
    Late,
    #[error("it is larger than {0} bytes")]
    Large(usize),
    /// The path is for root only, so it is in the log.
    #[error("csid.service says where it is, and systemd cannot read it there (csid's log has the path)")]
    NotThere,
    #[error("cannot be read from systemd: {0}")]
    Pipe(#[from] std::io::Error),
}

type Fetched = Result<Zeroizing<Vec<u8>>, CredentialError>;

/// The file that systemd reads it from.
struct Place {
    encrypted: bool,
    /// The credential's name in the unit. An encrypted credential is bound to its own name.
    id: String,
    /// A path, or a bare name.
    path: String,
}

impl Units {
    /// The credential `name`, at most `most` bytes: from where csid's own unit says it is, else one of systemd's own or of its
    /// credential stores. `None`: there is none of that name.
    pub async fn credential(
        &self,
        name: &str,
        most: usize,
    ) -> Result<Option<Zeroizing<Vec<u8>>>, CredentialError> {
        let permit = Arc::clone(&self.fetching).acquire_owned().await;
        let own = self.place_in_own_unit(name).await?;
        let is_own = own.is_some();
        let place = match own {
            Some(place) => place,
            None => {
                let encrypted = ENCRYPTED.iter().any(|store| std::path::Path::new(store).join(name).exists());
                Place::new(encrypted, name, name)
            }
        };
        let path = place.path.clone();
        let (tell, told) = oneshot::channel();
        let (units, name_of) = (self.clone(), name.to_owned());
        // Apart: a unit outlives its caller's deadline, and counts until it is gone.
        tokio::spawn(async move {
            units.fetch(&place, &name_of, most, tell).await;
            drop(permit);
        });
        let document = told.await.unwrap_or(Err(CredentialError::Late))?;
        match document.is_empty() {
            false => Ok(Some(document)),
            true if is_own => {
                tracing::warn!(credential = name, "systemd cannot read it at {path}");
                Err(CredentialError::NotThere)
            }
            true => Ok(None),
        }
    }

    /// Returns the place of a credential by LoadCredential= and LoadCredentialEncrypted= of csid's own unit. The unit may name more
    /// credentials now than at csid's start.
    async fn place_in_own_unit(&self, name: &str) -> Result<Option<Place>, UnitsError> {
        let Some((unit, path)) = self.own_unit().await? else { return Ok(None) };
        for (property, encrypted) in [("LoadCredentialEncrypted", true), ("LoadCredential", false)] {
            let given: Vec<(String, String)> = self.property(&unit, &path, "Service", property).await?;
            if let Some((_, path)) = given.iter().find(|(id, _)| id == name) {
                return Ok(Some(Place::new(encrypted, name, path)));
            }
        }
        Ok(None)
    }

    /// Have a unit of its own fetch it, and stop that when nobody waits any more, or not for the rest.
    async fn fetch(&self, place: &Place, name: &str, most: usize, mut tell: oneshot::Sender<Fetched>) {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let unit = format!("csid-credential-{}-{number}.service", std::process::id());
        let fetched = tokio::select! {
            biased;
            () = tell.closed() => None,
            fetched = tokio::time::timeout(PATIENCE, self.fetched(&unit, place, name, most)) => Some(fetched),
        };
        let fetched = fetched.map(|fetched| fetched.unwrap_or(Err(CredentialError::Late)));
        // The unit closes its end of the pipe when it has ended.
        let has_ended = matches!(&fetched, Some(Ok(_)));
        if let Some(fetched) = fetched {
            let _ = tell.send(fetched);
        }
        if !has_ended && let Err(error) = self.stop(&unit).await {
            tracing::warn!(credential = name, %error, "cannot stop the unit that fetches it");
        }
    }

    async fn fetched(&self, unit: &str, place: &Place, name: &str, most: usize) -> Fetched {
        let (reading, writing) =
            pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).map_err(std::io::Error::from)?;
        // A write of the unit waits, as it expects of a standard output.
        rustix::fs::fcntl_setfl(&writing, rustix::fs::OFlags::empty()).map_err(std::io::Error::from)?;
        let reading = Receiver::from_owned_fd(reading)?;
        self.start_fetching(unit, place, name, writing).await?;
        read(reading, most).await
    }

    async fn start_fetching(
        &self,
        unit: &str,
        place: &Place,
        name: &str,
        writing: OwnedFd,
    ) -> Result<(), UnitsError> {
        let Place { encrypted, id, path } = place;
        let file = format!("${{CREDENTIALS_DIRECTORY}}/{}", id.replace('$', "$$"));
        let argv = vec!["cat".to_owned(), "--".to_owned(), file];
        let allowed = |what: &str| (true, vec![what.to_owned()]);
        let usec = u64::try_from(PATIENCE.as_micros()).unwrap_or(u64::MAX);
        let properties: Vec<(&str, Variant<'_>)> = vec![
            ("Description", format!("Credential {name} for csid").into()),
            ("Type", "oneshot".into()),
            ("ExecStart", vec![("/usr/bin/cat".to_owned(), argv, false)].into()),
            (
                if *encrypted { "LoadCredentialEncrypted" } else { "LoadCredential" },
                vec![(id.clone(), path.clone())].into(),
            ),
            ("StandardInput", "null".into()),
            ("StandardOutputFileDescriptor", Variant::Fd(writing.as_fd().into())),
            ("StandardError", "null".into()),
            ("TimeoutStartUSec", usec.into()),
            ("CollectMode", "inactive-or-failed".into()),
            // csid itself reports a missing credential, with the volume that needs it.
            ("LogLevelMax", 3_i32.into()),
            ("LimitCORE", 0_u64.into()),
            ("DynamicUser", true.into()),
            ("CapabilityBoundingSet", 0_u64.into()),
            ("ProtectHome", "yes".into()),
            ("ProtectProc", "invisible".into()),
            ("PrivateDevices", true.into()),
            ("MemoryDenyWriteExecute", true.into()),
            ("RestrictNamespaces", 0_u64.into()),
            ("RestrictAddressFamilies", allowed("AF_UNIX").into()),
            ("SystemCallFilter", allowed("@system-service").into()),
        ];
        // The pipe ends with the unit: this end is closed with `writing`, when systemd has its own.
        self.start_transient_unit(unit, &properties).await
    }
}

impl Place {
    fn new(encrypted: bool, name: &str, path: &str) -> Self {
        let id = if encrypted { name } else { ID };
        Place { encrypted, id: id.to_owned(), path: path.to_owned() }
    }
}

/// To its end, into one buffer that never grows, so that no copy stays behind.
async fn read(mut pipe: Receiver, most: usize) -> Fetched {
    let mut document = Zeroizing::new(vec![0; most + 1]);
    let mut end = 0;
    loop {
        match pipe.read(&mut document[end..]).await? {
            0 => break,
            count => end += count,
        }
        if end > most {
            return Err(CredentialError::Large(most));
        }
    }
    document.truncate(end);
    Ok(document)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::host::units::FETCHED_AT_ONCE;

    async fn read_what_is_written(parts: &[&[u8]], most: usize) -> Result<Vec<u8>, CredentialError> {
        let (reading, writing) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).unwrap();
        let parts: Vec<Vec<u8>> = parts.iter().map(|part| part.to_vec()).collect();
        let writer = std::thread::spawn(move || {
            let mut writer = std::fs::File::from(writing);
            for part in parts {
                // The reader ends early when it has read too much.
                let _ = writer.write_all(&part);
                std::thread::sleep(Duration::from_millis(10));
            }
        });
        let read = read(Receiver::from_owned_fd(reading).unwrap(), most).await;
        writer.join().unwrap();
        read.map(|document| document.to_vec())
    }

    #[tokio::test]
    async fn pipe_is_read_to_its_end_or_bound() {
        assert_eq!(read_what_is_written(&[b"{", b"}"], 2).await.unwrap(), b"{}");
        assert_eq!(read_what_is_written(&[], 2).await.unwrap(), b"");
        assert!(matches!(read_what_is_written(&[b"12", b"3"], 2).await, Err(CredentialError::Large(2))));
    }

    #[tokio::test]
    async fn credentials_are_fetched_a_few_at_once() {
        let units = Units::default();
        let others = units.fetching.acquire_many(FETCHED_AT_ONCE as u32).await.unwrap();
        let mut fetch = std::pin::pin!(units.credential("csid.ns.key", 1));
        assert!(tokio::time::timeout(Duration::from_millis(50), &mut fetch).await.is_err(), "it waits");
        drop(others);
        // Whether there is a systemd here or not.
        let _answer = fetch.await;
        assert_eq!(units.fetching.available_permits(), FETCHED_AT_ONCE);
    }

    #[test]
    fn only_encrypted_credentials_keep_their_name() {
        assert_eq!(Place::new(false, "csid.ns.$x", "csid.ns.$x").id, ID);
        assert_eq!(Place::new(true, "csid.ns.key", "/etc/key").id, "csid.ns.key");
    }
}
