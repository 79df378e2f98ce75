//! The descriptors that callers send: a worker receives them, for csid would have to close each one, and the close may wait for a
//! file system's server.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use tokio::sync::oneshot;

use crate::host::deadline::DEADLINE;
use crate::host::helper::client::Helper;
use crate::host::helper::wire::{HelperRequest, SiftAnswer};

/// How long a place is waited for; nothing more is read of the connection meanwhile. A worker that does not hang takes milliseconds.
const PATIENCE: Duration = Duration::from_millis(500);

/// The descriptors with the next byte of a stream. The worker has taken that byte off.
pub enum Sifted {
    /// No descriptor.
    Nothing,
    /// A descriptor of memory, of a pipe without a name or of a user namespace.
    Passed(OwnedFd),
    /// A descriptor of another kind, or several.
    Refused,
    /// No worker was asked, and the byte is still there: too many are closing what this sender or others sent before.
    Busy,
}

impl Helper {
    /// Has a worker take the next byte off `stream`, with its descriptors. After an error it is not known whether the byte is
    /// taken.
    pub(in crate::host) async fn sift(&self, uid: Option<u32>, stream: OwnedFd) -> io::Result<Sifted> {
        let Some(place) = self.0.sifting.enter(uid, PATIENCE).await else { return Ok(Sifted::Busy) };
        let packet = serde_json::to_vec(&HelperRequest::Sift)?;
        let asked = async {
            let connection = self.0.connect().await?;
            connection.send(&packet, Some(&stream)).await?;
            io::Result::Ok(connection)
        };
        let connection = match tokio::time::timeout(PATIENCE, asked).await {
            Ok(Ok(connection)) => connection,
            // No worker has the stream, so the byte is still there.
            Ok(Err(error)) => {
                tracing::warn!(%error, "csid's helper receives no descriptors");
                return Ok(Sifted::Busy);
            }
            Err(_) => return Ok(Sifted::Busy),
        };
        drop(stream);
        let (answers, answered) = oneshot::channel();
        // The worker has its place until it ends, also where nobody waits for its answer any more.
        tokio::spawn(async move {
            let answer = connection.receive().await;
            let closes = answer.is_ok().then(|| place.closes());
            let _ = answers.send(answer);
            if closes.is_some() {
                let _ = connection.receive().await;
            }
            drop((closes, place));
        });
        let lost = |_| io::Error::from(io::ErrorKind::BrokenPipe);
        let (packet, fd) = tokio::time::timeout(DEADLINE, answered).await?.map_err(lost)??;
        let answer = serde_json::from_slice(&packet)?;
        match (answer, fd) {
            (SiftAnswer::Nothing, None) => Ok(Sifted::Nothing),
            (SiftAnswer::Passed, Some(fd)) => Ok(Sifted::Passed(fd)),
            (SiftAnswer::Refused, None) => Ok(Sifted::Refused),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{IoSlice, Read, Write, pipe};
    use std::mem::MaybeUninit;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use rustix::fs::{MemfdFlags, memfd_create};
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

    use super::*;

    async fn sifted(helper: &Helper, fds: &[&OwnedFd]) -> (io::Result<Sifted>, UnixStream) {
        let (own, mut other) = UnixStream::pair().unwrap();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
        assert!(fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(&fds)));
        sendmsg(&other, &[IoSlice::new(b"ab")], &mut control, SendFlags::empty()).unwrap();
        other.write_all(b"c").unwrap();
        // On a loaded machine the workers of earlier calls have not ended yet. Nothing was taken then.
        for _ in 0..20 {
            match helper.sift(Some(1001), own.try_clone().unwrap().into()).await {
                Ok(Sifted::Busy) => {}
                answer => return (answer, own),
            }
        }
        panic!("the workers have not ended in 10 s");
    }

    #[tokio::test]
    async fn harmless_descriptor_is_passed_on() {
        let helper = Helper::of_threads();
        let memory = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        let (reader, mut writer) = pipe().unwrap();
        writer.write_all(b"x").unwrap();
        let fifo = tempfile::tempdir().unwrap();
        let fifo = fifo.path().join("fifo");
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        let open = |path: &std::path::Path| {
            OwnedFd::from(File::options().read(true).write(true).open(path).unwrap())
        };
        let namespace = |name: &str| OwnedFd::from(File::open(format!("/proc/self/ns/{name}")).unwrap());
        let (userns, netns) = (namespace("user"), namespace("net"));
        let (null, fifo, reader) = (open("/dev/null".as_ref()), open(&fifo), OwnedFd::from(reader));
        for (fds, passes) in [
            (vec![&memory], true),
            (vec![&reader], true),
            (vec![&userns], true),
            (vec![&netns], false),
            (vec![&null], false),
            (vec![&fifo], false),
            (vec![&memory, &memory], false),
            (vec![&memory, &memory, &null], false),
        ] {
            let (answer, mut rest) = sifted(&helper, &fds).await;
            match answer.unwrap() {
                Sifted::Passed(fd) => {
                    let inode = |fd: &OwnedFd| rustix::fs::fstat(fd).unwrap().st_ino;
                    assert!(passes && inode(&fd) == inode(fds[0]), "{fds:?}");
                }
                Sifted::Refused => assert!(!passes, "{fds:?}"),
                _ => panic!("{fds:?}"),
            }
            let mut bytes = [0; 2];
            rest.read_exact(&mut bytes).unwrap();
            assert_eq!(&bytes, b"bc", "one byte is taken");
        }
        assert!(matches!(sifted(&helper, &[]).await.0.unwrap(), Sifted::Nothing));
    }
}
