//! Messages that exceed csid's limits, or have descriptors that csid does not accept. csid reads such a message in pieces and discards
//! it, with no allocation, check or copy of its content. It keeps only the sender's name, for the answer. A small call takes the
//! message's place, the stand-in. It has no position among the received messages, by which [`refusal`] recognises it.

use std::io;
use std::num::NonZeroU32;
use std::os::fd::AsFd;
use std::sync::{Arc, OnceLock};

use tokio::runtime::Handle;
use tokio::task::JoinSet;
use zbus::Message;
use zbus::message::{Flags, Sequence, Type};

use super::stream::Stream;
use crate::error::{Error, Kind};
use crate::quiet_stream::QuietStream;

/// The size of the primary header, which has the length of the rest.
pub(super) const PRIMARY: usize = 16;
/// The limit of a whole message. The dispatcher refuses arguments above 64 KiB itself.
const MAX_MESSAGE: usize = 1024 * 1024;
/// The limit of a header's fields: path, interface, member, destination, sender, signature. csid's paths have less than 1 KiB.
const MAX_FIELDS: usize = 16 * 1024;
/// The limit of a bus. A peer of the private socket that announces more is disconnected.
const ABSURD: usize = 32 * 1024 * 1024;
/// The limit of a bus name.
const MAX_SENDER: usize = 255;
const SENDER: u8 = 7;
const CALL: u8 = 1;
const PIECE: usize = 64 * 1024;

/// The fields of the primary header that are used here.
#[derive(Clone, Copy, Debug)]
pub(super) struct Primary {
    big_endian: bool,
    kind: u8,
    flags: u8,
    serial: u32,
    fields: usize,
    whole: usize,
}

impl Primary {
    pub fn read(bytes: &[u8; PRIMARY]) -> Self {
        let big_endian = bytes[0] == b'B';
        let number = |at: usize| number([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]], big_endian);
        let fields = number(12) as usize;
        let whole = (PRIMARY + fields).next_multiple_of(8) + number(4) as usize;
        Primary { big_endian, kind: bytes[1], flags: bytes[2], serial: number(8), fields, whole }
    }

    pub fn too_large(&self) -> Option<Discard> {
        let is = self.whole > MAX_MESSAGE || self.fields > MAX_FIELDS;
        is.then_some(Discard::TooLarge { bytes: self.whole as u64 })
    }

    pub fn is_absurd(&self) -> bool {
        self.whole > ABSURD
    }
}

/// The reason to discard a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Discard {
    TooLarge {
        bytes: u64,
    },
    /// The message has several descriptors, or one that csid does not accept from this caller.
    Descriptor,
    /// The helper can receive no more descriptors at present.
    Busy,
}

impl Discard {
    /// Returns the body of a stand-in.
    fn body(self) -> (u8, u64) {
        match self {
            Discard::TooLarge { bytes } => (0, bytes),
            Discard::Descriptor => (1, 0),
            Discard::Busy => (2, 0),
        }
    }

    fn of_body(body: (u8, u64)) -> Self {
        match body {
            (1, _) => Discard::Descriptor,
            (2, _) => Discard::Busy,
            (_, bytes) => Discard::TooLarge { bytes },
        }
    }
}

fn number(bytes: [u8; 4], big_endian: bool) -> u32 {
    match big_endian {
        true => u32::from_be_bytes(bytes),
        false => u32::from_le_bytes(bytes),
    }
}

/// Reads the message to its end, from behind the primary header. Returns the sender that the header names.
///
/// A thread of its own reads it, see [`thread`]. csid's other thread reads it only if the system lacks threads or descriptors.
pub(super) async fn discard(from: &mut Stream, primary: &Primary) -> io::Result<Option<String>> {
    let (Ok(thread), Ok(stream)) = (thread(), from.stream.as_fd().try_clone_to_owned()) else {
        return read_to_end(from, primary).await;
    };
    let (primary, receives) = (*primary, from.receives);
    let (ahead, ahead_fds) = (std::mem::take(&mut from.ahead), std::mem::take(&mut from.ahead_fds));
    // The task ends with this future: its descriptor would keep a connection open that csid has closed.
    let mut reading = JoinSet::new();
    let read = async move {
        let stream = Arc::new(QuietStream::new(stream)?);
        let mut from = Stream { stream, receives, ahead, ahead_fds, fds: 0 };
        let sender = read_to_end(&mut from, &primary).await?;
        Ok::<_, io::Error>((sender, from.ahead))
    };
    reading.spawn_on(read, thread);
    let (sender, ahead) = match reading.join_next().await {
        Some(Ok(read)) => read?,
        Some(Err(error)) => return Err(io::Error::other(error)),
        None => return Err(io::ErrorKind::UnexpectedEof.into()),
    };
    from.ahead = ahead;
    Ok(sender)
}

/// Returns the thread that discards messages, and starts it at its first use.
///
/// Any user can send csid large messages. The thread that serves calls must not spend its time slice on them: the scheduler would then
/// let it wait, and root's calls with it.
fn thread() -> io::Result<&'static Handle> {
    static THREAD: OnceLock<Handle> = OnceLock::new();
    if let Some(thread) = THREAD.get() {
        return Ok(thread);
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    let handle = runtime.handle().clone();
    std::thread::Builder::new()
        .name("csid-discard".into())
        .spawn(move || runtime.block_on(std::future::pending::<()>()))?;
    Ok(THREAD.get_or_init(|| handle))
}

async fn read_to_end(from: &mut Stream, primary: &Primary) -> io::Result<Option<String>> {
    let mut pieces =
        Pieces { from, piece: vec![0; PIECE], place: 0, end: 0, at: PRIMARY, whole: primary.whole };
    let sender = sender(&mut pieces, primary).await?;
    let rest = pieces.whole - pieces.at;
    pieces.skip(rest).await?;
    Ok(sender)
}

/// Returns the sender from the header's fields. `None`: there is none, or a field has a type that no header has.
async fn sender(pieces: &mut Pieces<'_>, primary: &Primary) -> io::Result<Option<String>> {
    let end = PRIMARY + primary.fields;
    let mut sender = None;
    loop {
        pieces.align(8).await?;
        if pieces.at + 4 > end {
            return Ok(sender);
        }
        let [code, length, kind, nul] = pieces.take().await?;
        if (length, nul) != (1, 0) {
            return Ok(sender);
        }
        let bytes = match kind {
            b's' | b'o' => {
                pieces.align(4).await?;
                let length = number(pieces.take().await?, primary.big_endian) as usize;
                if code == SENDER && length <= MAX_SENDER && pieces.at + length < end {
                    let mut name = vec![0; length];
                    pieces.fill(&mut name).await?;
                    sender = String::from_utf8(name).ok();
                    1
                } else {
                    length.saturating_add(1)
                }
            }
            b'g' => usize::from(pieces.take::<1>().await?[0]) + 1,
            b'u' | b'i' | b'b' | b'h' => {
                pieces.align(4).await?;
                4
            }
            b'y' => 1,
            _ => return Ok(sender),
        };
        if bytes > end.saturating_sub(pieces.at) {
            return Ok(sender);
        }
        pieces.skip(bytes).await?;
    }
}

/// A message that passes through one small buffer. Its descriptors are closed as they come.
struct Pieces<'p> {
    from: &'p mut Stream,
    piece: Vec<u8>,
    /// The unused bytes of the piece are from `place` to `end`.
    place: usize,
    end: usize,
    /// The position of the next byte in the message, and the message's length.
    at: usize,
    whole: usize,
}

impl Pieces<'_> {
    /// Returns at least one and at most `wanted` bytes.
    async fn some(&mut self, wanted: usize) -> io::Result<&[u8]> {
        if self.place == self.end {
            // Never beyond this message: the next bytes belong to another one.
            let length = PIECE.min(self.whole - self.at);
            if length == 0 {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    "the header is longer than its message",
                ));
            }
            (self.place, self.end) = (0, self.from.some(&mut self.piece[..length]).await?);
        }
        let from = self.place;
        let count = wanted.min(self.end - from);
        self.place += count;
        self.at += count;
        Ok(&self.piece[from..from + count])
    }

    async fn skip(&mut self, mut bytes: usize) -> io::Result<()> {
        while bytes > 0 {
            bytes -= self.some(bytes).await?.len();
        }
        Ok(())
    }

    async fn align(&mut self, to: usize) -> io::Result<()> {
        let padding = self.at.next_multiple_of(to).min(self.whole) - self.at;
        self.skip(padding).await
    }

    async fn fill(&mut self, buffer: &mut [u8]) -> io::Result<()> {
        let mut place = 0;
        while place < buffer.len() {
            let some = self.some(buffer.len() - place).await?;
            buffer[place..place + some.len()].copy_from_slice(some);
            place += some.len();
        }
        Ok(())
    }

    async fn take<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.fill(&mut bytes).await?;
        Ok(bytes)
    }
}

/// Returns the call that takes the discarded one's place. `None`: there is nothing to answer, because it was not a call or its sender
/// on the bus is not known.
pub(super) fn stand_in(
    primary: &Primary,
    sender: Option<&str>,
    on_bus: bool,
    refusal: Discard,
) -> Option<Message> {
    if primary.kind != CALL || (on_bus && sender.is_none()) {
        return None;
    }
    let call = Message::method_call("/", "Refused").serial(NonZeroU32::new(primary.serial)?);
    let call = match primary.flags & Flags::NO_REPLY_EXPECTED.bits() {
        0 => call,
        _ => call.with_flags(Flags::NO_REPLY_EXPECTED),
    };
    let call = match sender {
        Some(sender) => call.sender(sender),
        None => call,
    };
    call.build(&refusal.body()).ok()
}

/// Returns why the message was discarded that this stand-in replaces. `None`: this message is not a stand-in.
fn refusal(message: &Message) -> Option<Discard> {
    let is = message.recv_position() == Sequence::default() && message.message_type() == Type::MethodCall;
    is.then(|| Discard::of_body(message.body().deserialize().unwrap_or_default()))
}

/// Refuses a stand-in.
pub(super) fn refuse(message: &Message) -> Result<(), Error> {
    match refusal(message) {
        None => Ok(()),
        Some(Discard::TooLarge { bytes }) => Err(Error::invalid(format!(
            "the message has {bytes} bytes; the limits are {MAX_MESSAGE} in all and {MAX_FIELDS} for its header"
        ))),
        Some(Discard::Descriptor) => Err(Error::invalid(
            "a message may have one descriptor, of a memfd or an unnamed pipe; others require root and csid's private \
             socket",
        )),
        Some(Discard::Busy) => {
            Err(Error::new(Kind::RateLimited, "csid's helper is still closing earlier descriptors"))
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt;
    use tokio::net::UnixStream;
    use zbus::connection::socket::{ReadHalf, Socket};

    use super::*;
    use crate::bus::socket::{Takes, Transport};

    fn call(path: &str, sender: &str, body: &str) -> Message {
        let call = Message::method_call(path, "M").interface("a.b").destination("org.csid1");
        call.sender(sender).serial(NonZeroU32::new(7).unwrap()).build(&body).unwrap()
    }

    #[tokio::test]
    async fn message_after_large_ones_is_read_whole() {
        let long = "/x".repeat(4 << 20);
        let messages = [
            call("/small", ":1.1", "x"),
            call(&long, ":1.2", "x"),
            call("/p", ":1.3", &"y".repeat(3 << 20)),
            call("/next", ":1.4", "x"),
        ];
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        let bytes: Vec<u8> = messages.iter().flat_map(|message| message.data().to_vec()).collect();
        let writing = tokio::spawn(async move { ours.write_all(&bytes).await.unwrap() });
        let (mut reader, _writer) =
            Transport::bus(QuietStream::of(theirs).unwrap(), Takes::Nothing).split().take();
        for (seq, sender, large) in
            [(1, ":1.1", false), (2, ":1.2", true), (3, ":1.3", true), (4, ":1.4", false)]
        {
            let message = reader.receive_message(seq, &mut Vec::new(), &mut Vec::new()).await.unwrap();
            assert_eq!(message.header().sender().unwrap().as_str(), sender);
            assert_eq!(message.primary_header().serial_num().get(), 7);
            assert_eq!(refuse(&message).is_err(), large, "{sender}");
            let is_that = |refusal| matches!(refusal, Discard::TooLarge { bytes } if bytes > 3 << 20);
            assert_eq!(refusal(&message).is_some_and(is_that), large);
        }
        writing.await.unwrap();
    }

    /// A header with any content is read to its end and not beyond.
    #[tokio::test]
    async fn malformed_header_is_read_to_its_end() {
        let next = Arc::new(call("/next", ":1.4", "x"));
        for fill in [0x00, 0x01, b's', 0x07, 0x40, 0xff] {
            let mut bytes = vec![fill; MAX_FIELDS * 2 + PRIMARY];
            bytes[..4].copy_from_slice(&[b'l', CALL, 0, 1]);
            bytes[4..8].copy_from_slice(&0u32.to_le_bytes());
            bytes[8..12].copy_from_slice(&9u32.to_le_bytes());
            bytes[12..16].copy_from_slice(&(MAX_FIELDS as u32 * 2).to_le_bytes());
            bytes.extend_from_slice(next.data());
            let (mut ours, theirs) = UnixStream::pair().unwrap();
            let writing = tokio::spawn(async move { ours.write_all(&bytes).await.unwrap() });
            let (mut reader, _writer) =
                Transport::bus(QuietStream::of(theirs).unwrap(), Takes::Nothing).split().take();
            let message = reader.receive_message(1, &mut Vec::new(), &mut Vec::new()).await.unwrap();
            assert_eq!(message.header().path().unwrap().as_str(), "/next", "{fill}");
            writing.await.unwrap();
        }
    }
}
