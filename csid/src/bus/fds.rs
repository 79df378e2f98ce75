//! The file descriptor of the `secrets` option. What it is decides whether it is read at all: a memfd sealed against change,
//! or a pipe, which is read with a bound and a time-out, on a thread of its own.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, Mode, OFlags, SealFlags, fcntl_get_seals, fcntl_getfl, fstat, open};
use zeroize::Zeroizing;

use crate::error::{Error, Kind, Result};
use crate::secret::{MAX_BYTES, Secrets};

const PATIENCE: Duration = Duration::from_secs(5);

/// Read the secrets of one call. The descriptor may be anything: its owner is told what csid takes.
pub(super) async fn read_secrets(fd: OwnedFd) -> Result<Secrets> {
    let read = tokio::task::spawn_blocking(move || read(fd, PATIENCE));
    let document = read.await.map_err(|_| Error::internal("the reader of the secrets failed"))??;
    Secrets::from_json(&document)
}

fn refused() -> Error {
    Error::invalid(
        "secrets is neither a memfd sealed with F_SEAL_WRITE, F_SEAL_GROW and F_SEAL_SHRINK nor the reading end of a pipe",
    )
}

fn too_large() -> Error {
    Error::invalid(format!("the secrets are larger than {MAX_BYTES} bytes"))
}

fn read(fd: OwnedFd, patience: Duration) -> Result<Zeroizing<Vec<u8>>> {
    let stat = fstat(&fd).map_err(|_| refused())?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => {
            // Seals exist on memory alone: no file, whose reading may hang, has them.
            let sealed = SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK;
            if !fcntl_get_seals(&fd).map_err(|_| refused())?.contains(sealed) {
                return Err(refused());
            }
            if stat.st_size > MAX_BYTES as i64 {
                return Err(too_large());
            }
            read_all(|buffer, at| rustix::io::pread(&fd, buffer, at as u64))
        }
        FileType::Fifo => {
            let flags = fcntl_getfl(&fd).map_err(|_| refused())?;
            if flags.contains(OFlags::PATH) || flags & OFlags::RWMODE == OFlags::WRONLY {
                return Err(refused());
            }
            // Another reader may take what poll saw, and without O_NONBLOCK the read would then wait for ever. The caller has the
            // description that he passed and may clear its flags at any time, so this one is csid's own.
            let own = format!("/proc/self/fd/{}", fd.as_raw_fd());
            let own = open(own, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty());
            let fd = own.map_err(|_| refused())?;
            let deadline = Instant::now() + patience;
            let mut all_left = false;
            read_all(|buffer, at| {
                loop {
                    match rustix::io::read(&fd, &mut *buffer) {
                        Err(rustix::io::Errno::AGAIN) => {}
                        // A FIFO reads as ended until somebody opens it for writing; poll knows the difference.
                        Ok(0) if at == 0 && !all_left => {}
                        done => return done,
                    }
                    let left = deadline.saturating_duration_since(Instant::now());
                    let left =
                        Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
                    let mut polled = [PollFd::new(&fd, PollFlags::IN)];
                    match poll(&mut polled, Some(&left)) {
                        Ok(0) => return Err(rustix::io::Errno::TIMEDOUT),
                        Ok(_) => all_left = polled[0].revents().contains(PollFlags::HUP),
                        Err(rustix::io::Errno::INTR) => {}
                        Err(error) => return Err(error),
                    }
                }
            })
        }
        _ => Err(refused()),
    }
}

/// Into one buffer that never grows, so that no copy stays behind.
fn read_all(
    mut read: impl FnMut(&mut [u8], usize) -> rustix::io::Result<usize>,
) -> Result<Zeroizing<Vec<u8>>> {
    let mut document = Zeroizing::new(vec![0; MAX_BYTES + 1]);
    let mut end = 0;
    loop {
        match read(&mut document[end..], end) {
            Ok(0) => break,
            Ok(count) => end += count,
            Err(rustix::io::Errno::INTR) => continue,
            Err(rustix::io::Errno::TIMEDOUT) => {
                return Err(Error::new(
                    Kind::InvalidArgument,
                    "the pipe of the secrets was not written and closed within 5 s",
                ));
            }
            Err(error) => {
                let error = io::Error::from(error);
                return Err(Error::invalid(format!("the secrets cannot be read: {error}")));
            }
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

    use rustix::fs::{MemfdFlags, fcntl_add_seals, memfd_create};

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

    fn refusal(fd: OwnedFd) -> String {
        read(fd, SHORT).err().unwrap().message
    }

    #[tokio::test]
    async fn a_sealed_memfd_is_read_from_its_beginning() {
        let secrets = read_secrets(sealed(br#"{"a":"b"}"#)).await.unwrap();
        assert_eq!(secrets.for_rpc()["a"], "b");
    }

    #[test]
    fn a_pipe_is_read_to_its_end() {
        let (reader, writer) = pipe().unwrap();
        let writer = std::thread::spawn(move || {
            let mut writer = File::from(OwnedFd::from(writer));
            for part in [&b"{\"a\":"[..], b"\"b\"}"] {
                writer.write_all(part).unwrap();
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        assert_eq!(read(reader.into(), Duration::from_secs(5)).unwrap().as_slice(), br#"{"a":"b"}"#);
        writer.join().unwrap();
    }

    #[test]
    fn what_is_neither_is_refused_unread() {
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
            memfd(b"{}", SealFlags::WRITE),
            memfd(b"{}", SealFlags::GROW | SealFlags::SHRINK),
        ] {
            assert!(refusal(fd).contains("neither a memfd"));
        }
    }

    #[test]
    fn size_and_time_are_bounded() {
        let huge = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&huge, 1 << 30).unwrap();
        fcntl_add_seals(&huge, SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK).unwrap();
        assert!(refusal(huge).contains("larger than"));

        let (reader, writer) = pipe().unwrap();
        File::from(OwnedFd::from(writer)).write_all(&vec![b'x'; MAX_BYTES + 1]).unwrap();
        assert!(refusal(reader.into()).contains("larger than"));

        let (reader, _open) = pipe().unwrap();
        let begun = Instant::now();
        assert!(refusal(reader.into()).contains("not written and closed"));
        assert!(begun.elapsed() < Duration::from_secs(20));
    }

    /// Its flags are his to change: the read does not go by them.
    #[test]
    fn the_callers_description_is_left_alone() {
        let (reader, writer) = pipe().unwrap();
        let kept = OwnedFd::from(reader.try_clone().unwrap());
        let reading = std::thread::spawn(move || read(reader.into(), Duration::from_secs(5)));
        let mut writer = File::from(OwnedFd::from(writer));
        writer.write_all(b"{").unwrap();
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(fcntl_getfl(&kept).unwrap() & OFlags::NONBLOCK, OFlags::empty());
        writer.write_all(b"}").unwrap();
        drop(writer);
        assert_eq!(reading.join().unwrap().unwrap().as_slice(), b"{}");
    }

    fn fifo(directory: &tempfile::TempDir) -> std::path::PathBuf {
        let path = directory.path().join("fifo");
        rustix::fs::mknodat(rustix::fs::CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        path
    }

    #[test]
    fn a_fifo_without_a_writer_does_not_wait_for_ever() {
        let directory = tempfile::tempdir().unwrap();
        let path = fifo(&directory);
        for flags in [OFlags::RDONLY | OFlags::NONBLOCK, OFlags::RDWR] {
            let fd = open(&path, flags | OFlags::CLOEXEC, Mode::empty()).unwrap();
            assert!(refusal(fd).contains("not written and closed"));
        }
    }

    #[test]
    fn what_was_written_and_closed_before_is_read() {
        let directory = tempfile::tempdir().unwrap();
        let path = fifo(&directory);
        let named = open(&path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty()).unwrap();
        let (anonymous, writer) = pipe().unwrap();
        let of_name = open(&path, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty()).unwrap();
        for (reader, writer) in [(named, of_name), (anonymous.into(), writer.into())] {
            File::from(writer).write_all(b"{}").unwrap();
            assert_eq!(read(reader, SHORT).unwrap().as_slice(), b"{}");
        }
    }

    #[test]
    fn a_fifo_may_be_written_later() {
        let directory = tempfile::tempdir().unwrap();
        let path = fifo(&directory);
        let reader = open(&path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty()).unwrap();
        let reading = std::thread::spawn(move || read(reader, Duration::from_secs(5)));
        std::thread::sleep(Duration::from_millis(50));
        std::fs::write(&path, "{}").unwrap();
        assert_eq!(reading.join().unwrap().unwrap().as_slice(), b"{}");
    }

    #[test]
    fn a_pipe_that_nothing_was_written_to_is_empty_at_once() {
        let (reader, writer) = pipe().unwrap();
        drop(writer);
        assert!(read(reader.into(), Duration::from_secs(5)).unwrap().is_empty());
    }
}
