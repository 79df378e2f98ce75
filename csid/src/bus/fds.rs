//! The file descriptor of the `secrets` option. csid reads a memfd that is sealed against changes, or a pipe, with a size limit and a
//! timeout.
//!
//! The descriptor may belong to a file system whose server is the caller's own and hangs. So no call here reaches a file system: the
//! kernel itself answers for seals and a pipe's size, and only a descriptor that has one of the two is used further.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

use rustix::fs::{Mode, OFlags, SealFlags, fcntl_get_seals, fcntl_getfl, fstat, open};
use rustix::pipe::fcntl_getpipe_size;
use tokio::io::Interest;
use tokio::net::unix::pipe::Receiver;
use zeroize::Zeroizing;

use crate::error::{Error, Kind, Result};
use crate::secret::{MAX_BYTES, Secrets};

const TIMEOUT: Duration = Duration::from_secs(5);

/// Reads the secrets of one call. The descriptor may be of any kind; the error says which ones csid accepts.
pub(super) async fn read_secrets(fd: OwnedFd) -> Result<Secrets> {
    let document = read(fd, TIMEOUT).await?;
    Secrets::from_json(&document)
}

fn refused() -> Error {
    Error::invalid(
        "secrets is neither a memfd sealed with F_SEAL_WRITE, F_SEAL_GROW and F_SEAL_SHRINK nor the read end of an \
         unnamed pipe",
    )
}

fn too_large() -> Error {
    Error::invalid(format!("the secrets are larger than {MAX_BYTES} bytes"))
}

async fn read(fd: OwnedFd, timeout: Duration) -> Result<Zeroizing<Vec<u8>>> {
    if let Ok(seals) = fcntl_get_seals(&fd) {
        let sealed = SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK;
        if !seals.contains(sealed) {
            return Err(refused());
        }
        // Only memory files have seals, so neither fstat nor the read can hang.
        if fstat(&fd).map_err(|_| refused())?.st_size > MAX_BYTES as i64 {
            return Err(too_large());
        }
        return read_all(Source::Memory(fd)).await;
    }
    let read = read_all(Source::Pipe { pipe: own_pipe(&fd)?, ended: false });
    tokio::time::timeout(timeout, read).await.unwrap_or_else(|_| {
        Err(Error::new(
            Kind::InvalidArgument,
            "the pipe of the secrets was not written and closed within 5 s",
        ))
    })
}

enum Source {
    Memory(OwnedFd),
    /// `ended`: all writers had closed it at some time.
    Pipe {
        pipe: Receiver,
        ended: bool,
    },
}

impl Source {
    async fn read(&mut self, buffer: &mut [u8], at: usize) -> io::Result<usize> {
        let (pipe, ended) = match self {
            Source::Memory(fd) => return Ok(rustix::io::pread(&*fd, buffer, at as u64)?),
            Source::Pipe { pipe, ended } => (pipe, ended),
        };
        loop {
            match pipe.try_read(buffer) {
                // A later writer does not reopen the document. Without this check tokio would report the pipe as ready forever.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && *ended => return Ok(0),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    *ended = pipe.ready(Interest::READABLE).await?.is_read_closed();
                }
                done => return done,
            }
        }
    }
}

/// Opens the pipe with a file description of csid's own. The caller shares the one it passed and may clear its flags at any time.
/// Without O_NONBLOCK a read would block forever if another reader took the bytes first.
fn own_pipe(fd: &OwnedFd) -> Result<Receiver> {
    fcntl_getpipe_size(fd).map_err(|_| refused())?;
    let flags = fcntl_getfl(fd).map_err(|_| refused())?;
    if flags.contains(OFlags::PATH) || flags & OFlags::RWMODE == OFlags::WRONLY || !is_nameless(fd) {
        return Err(refused());
    }
    let own = open(of_process(fd), OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty());
    let unopened =
        |error: io::Error| Error::invalid(format!("the pipe of the secrets cannot be opened: {error}"));
    Receiver::from_owned_fd(own.map_err(|errno| unopened(errno.into()))?).map_err(unopened)
}

/// Returns whether opening it again reaches no file system. A FIFO's link is its path, and begins with `/` or `(unreachable)`.
fn is_nameless(fd: &OwnedFd) -> bool {
    rustix::fs::readlink(of_process(fd), Vec::new()).is_ok_and(|link| link.to_bytes().starts_with(b"pipe:["))
}

fn of_process(fd: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", fd.as_raw_fd())
}

/// Reads all into one buffer that never grows, so that no copies of secrets remain.
async fn read_all(mut source: Source) -> Result<Zeroizing<Vec<u8>>> {
    let mut document = Zeroizing::new(vec![0; MAX_BYTES + 1]);
    let mut end = 0;
    loop {
        match source.read(&mut document[end..], end).await {
            Ok(0) => break,
            Ok(count) => end += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(Error::invalid(format!("the secrets cannot be read: {error}"))),
        }
        if end > MAX_BYTES {
            return Err(too_large());
        }
    }
    document.truncate(end);
    Ok(document)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Write, pipe};
    use std::time::Instant;

    use rustix::fs::{FileType, MemfdFlags, fcntl_add_seals, memfd_create};

    use super::*;

    const SHORT: Duration = Duration::from_millis(100);

    fn memfd(content: &[u8], seals: SealFlags) -> OwnedFd {
        let fd = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        let mut file = File::from(fd);
        file.write_all(content).unwrap();
        fcntl_add_seals(&file, seals).unwrap();
        file.into()
    }

    fn sealed(content: &[u8]) -> OwnedFd {
        memfd(content, SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK)
    }

    async fn refusal(fd: OwnedFd) -> String {
        read(fd, SHORT).await.err().unwrap().message
    }

    #[tokio::test]
    async fn a_sealed_memfd_is_read_from_its_beginning() {
        let secrets = read_secrets(sealed(br#"{"a":"b"}"#)).await.unwrap();
        assert_eq!(secrets.for_rpc()["a"], "b");
    }

    #[tokio::test]
    async fn a_pipe_is_read_to_its_end() {
        let (reader, writer) = pipe().unwrap();
        let writer = std::thread::spawn(move || {
            let mut writer = File::from(OwnedFd::from(writer));
            for part in [&b"{\"a\":"[..], b"\"b\"}"] {
                writer.write_all(part).unwrap();
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        assert_eq!(read(reader.into(), TIMEOUT).await.unwrap().as_slice(), br#"{"a":"b"}"#);
        writer.join().unwrap();
    }

    #[tokio::test]
    async fn other_descriptors_are_refused_unread() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("file");
        std::fs::write(&file, "{}").unwrap();
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let (reader, writer) = pipe().unwrap();
        let of_path = open("/proc/self/fd", OFlags::PATH, Mode::empty()).unwrap();
        drop(reader);
        for fd in [
            open(directory.path(), flags, Mode::empty()).unwrap(),
            open(&file, flags, Mode::empty()).unwrap(),
            open("/dev/zero", flags, Mode::empty()).unwrap(),
            open("/proc/self/mem", flags, Mode::empty()).unwrap(),
            of_path,
            socket.into(),
            writer.into(),
            open(fifo(&directory), OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty())
                .unwrap(),
            memfd(b"{}", SealFlags::WRITE),
            memfd(b"{}", SealFlags::GROW | SealFlags::SHRINK),
        ] {
            assert!(refusal(fd).await.contains("neither a memfd"));
        }
    }

    #[tokio::test]
    async fn size_and_time_are_bounded() {
        let huge = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&huge, 1 << 30).unwrap();
        fcntl_add_seals(&huge, SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK).unwrap();
        assert!(refusal(huge).await.contains("larger than"));

        let (reader, writer) = pipe().unwrap();
        File::from(OwnedFd::from(writer)).write_all(&vec![b'x'; MAX_BYTES + 1]).unwrap();
        assert!(refusal(reader.into()).await.contains("larger than"));

        let (reader, _open) = pipe().unwrap();
        let begun = Instant::now();
        assert!(refusal(reader.into()).await.contains("not written and closed"));
        assert!(begun.elapsed() < Duration::from_secs(20));
    }

    /// The caller may change the flags of the file description that it passed. The read uses another one.
    #[tokio::test]
    async fn callers_file_description_keeps_its_flags() {
        let (reader, writer) = pipe().unwrap();
        let kept = OwnedFd::from(reader.try_clone().unwrap());
        let reading = tokio::spawn(read(reader.into(), TIMEOUT));
        let mut writer = File::from(OwnedFd::from(writer));
        writer.write_all(b"{").unwrap();
        let taken = async {
            while rustix::io::ioctl_fionread(&kept).unwrap() > 0 {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(TIMEOUT, taken).await.expect("the byte is read");
        assert_eq!(fcntl_getfl(&kept).unwrap() & OFlags::NONBLOCK, OFlags::empty());
        writer.write_all(b"}").unwrap();
        drop(writer);
        assert_eq!(reading.await.unwrap().unwrap().as_slice(), b"{}");
    }

    /// Otherwise the reads would wait in turn for the runtime's threads for blocking work.
    #[test]
    fn pipes_without_writes_hold_no_thread() {
        let runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = { runtime }.enable_all().max_blocking_threads(1).build().unwrap();
        runtime.block_on(async {
            let pipes: Vec<_> = (0..64).map(|_| pipe().unwrap()).collect();
            let begun = Instant::now();
            let (readers, _writers): (Vec<_>, Vec<_>) = pipes.into_iter().unzip();
            let waiting: Vec<_> =
                readers.into_iter().map(|reader| tokio::spawn(read_secrets(reader.into()))).collect();
            tokio::task::yield_now().await;
            let secrets = read_secrets(sealed(br#"{"a":"b"}"#)).await.unwrap();
            assert_eq!(secrets.for_rpc()["a"], "b");
            assert!(begun.elapsed() < TIMEOUT, "another's secrets wait for no pipe");
            for refused in waiting {
                assert!(refused.await.unwrap().err().unwrap().message.contains("not written and closed"));
            }
            assert!(begun.elapsed() < TIMEOUT * 10, "they wait at the same time: {:?}", begun.elapsed());
        });
    }

    fn fifo(directory: &tempfile::TempDir) -> std::path::PathBuf {
        let path = directory.path().join("fifo");
        rustix::fs::mknodat(rustix::fs::CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        path
    }

    #[tokio::test]
    async fn pipe_closed_before_the_call_is_read() {
        let (reader, writer) = pipe().unwrap();
        File::from(OwnedFd::from(writer)).write_all(b"{}").unwrap();
        assert_eq!(read(reader.into(), SHORT).await.unwrap().as_slice(), b"{}");
    }

    #[tokio::test]
    async fn empty_pipe_ends_at_once() {
        let (reader, writer) = pipe().unwrap();
        drop(writer);
        assert!(read(reader.into(), TIMEOUT).await.unwrap().is_empty());
    }
}
