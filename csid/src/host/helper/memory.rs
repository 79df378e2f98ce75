//! Messages that may exceed a packet: JSON in memory, whose descriptor goes with the packet.

use std::fs::File;
use std::io::{Error, ErrorKind, Result, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::Errno;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Bytes of one message. A larger one is an error.
const LARGEST: u64 = 64 << 20;
/// Bytes of a message that needs no memory, and of one that a thread of the runtime reads itself.
const SHORT: u64 = 16 << 10;

/// Writes a packet. From a long one it takes the `part` that may be long, and returns memory with that.
pub(super) fn packed<P: Serialize, M: Serialize>(
    mut packet: P,
    part: impl FnOnce(&mut P) -> M,
) -> Result<(Vec<u8>, Option<OwnedFd>)> {
    let text = serde_json::to_vec(&packet)?;
    if text.len() as u64 <= SHORT {
        return Ok((text, None));
    }
    let part = write(&part(&mut packet))?;
    Ok((serde_json::to_vec(&packet)?, Some(part)))
}

/// Returns memory with this message.
pub(super) fn write(message: &impl Serialize) -> Result<OwnedFd> {
    let text = serde_json::to_vec(message)?;
    check(text.len() as u64)?;
    let flags = MemfdFlags::CLOEXEC;
    let memory = match memfd_create(c"csid", flags | MemfdFlags::NOEXEC_SEAL) {
        // Linux 6.2 and earlier do not know the flag.
        Err(Errno::INVAL) => memfd_create(c"csid", flags)?,
        created => created?,
    };
    let mut memory = File::from(memory);
    memory.write_all(&text)?;
    Ok(memory.into())
}

/// Returns the message in this memory, as [`read`] does. A long one is read by a thread for blocking calls.
pub(super) async fn read_async<T: DeserializeOwned + Send + 'static>(memory: OwnedFd) -> Result<T> {
    let memory = File::from(memory);
    let length = memory.metadata()?.len();
    if length <= SHORT {
        return read_part(&memory, length);
    }
    let read = tokio::task::spawn_blocking(move || read_part(&memory, length)).await;
    read.unwrap_or_else(|panicked| Err(Error::other(panicked)))
}

/// Returns the message in this memory.
pub(super) fn read<T: DeserializeOwned>(memory: OwnedFd) -> Result<T> {
    let memory = File::from(memory);
    let length = memory.metadata()?.len();
    read_part(&memory, length)
}

fn read_part<T: DeserializeOwned>(memory: &File, length: u64) -> Result<T> {
    check(length)?;
    let mut text = vec![0; usize::try_from(length).map_err(Error::other)?];
    memory.read_exact_at(&mut text, 0)?;
    Ok(serde_json::from_slice(&text)?)
}

fn check(length: u64) -> Result<()> {
    match length {
        0..=LARGEST => Ok(()),
        _ => Err(Error::new(ErrorKind::FileTooLarge, format!("{length} bytes exceed {LARGEST}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn message_is_read_from_memory() {
        let message: Vec<String> = (0..100_000).map(|number| format!("{number}")).collect();
        let memory = write(&message).unwrap();
        assert_eq!(read::<Vec<String>>(memory.try_clone().unwrap()).unwrap(), message);
        assert_eq!(read::<Vec<String>>(memory).unwrap(), message, "it can be read again");
    }

    #[test]
    fn long_part_of_a_packet_is_in_memory() {
        let split = |count: u32| {
            let numbers = Some((0..count).collect::<Vec<_>>());
            let (packet, part) = packed(numbers.clone(), Option::take).unwrap();
            let packet: Option<Vec<u32>> = serde_json::from_slice(&packet).unwrap();
            assert_eq!(packet.or_else(|| read(part.as_ref()?.try_clone().unwrap()).ok()), numbers);
            part.is_some()
        };
        assert!(!split(10) && split(10_000));
    }

    #[test]
    fn too_large_a_message_is_an_error() {
        let memory = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&memory, LARGEST + 1).unwrap();
        assert_eq!(read::<String>(memory).unwrap_err().kind(), ErrorKind::FileTooLarge);
    }
}
