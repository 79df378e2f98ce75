//! The file system behind a connection: FUSE's requests and answers as bytes (protocol 7.31), and a root directory of
//! files in memory. It remembers nothing beyond its process.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use super::{FILE, Op, TEXT};

const INIT: u32 = 26;
const ROOT: u64 = 1;
const ENOENT: i32 = 2;
const ENOSYS: i32 = 38;
const EINVAL: i32 = 22;
const EIO: i32 = 5;
const HEADER: usize = 40;
/// The most that a request writes.
const MAX_WRITE: u32 = 65536;
/// A request's length at the most.
pub const LONGEST: usize = MAX_WRITE as usize + 4096;

/// A request as it was read.
pub struct Request {
    opcode: u32,
    unique: u64,
    node: u64,
    body: Vec<u8>,
}

impl Request {
    /// `None`: no request.
    pub fn read(bytes: &[u8]) -> Option<Self> {
        Some(Request {
            opcode: u32_at(bytes, 4)?,
            unique: u64_at(bytes, 8)?,
            node: u64_at(bytes, 16)?,
            body: bytes.get(HEADER..)?.to_vec(),
        })
    }

    /// `None`: it is never held.
    pub fn op(&self) -> Option<Op> {
        Some(match self.opcode {
            1 => Op::Lookup,
            3 => Op::GetAttr,
            4 => Op::SetAttr,
            10 => Op::Unlink,
            14 => Op::Open,
            15 => Op::Read,
            16 => Op::Write,
            17 => Op::StatFs,
            20 | 30 => Op::Fsync,
            25 => Op::Flush,
            27 => Op::OpenDir,
            28 => Op::ReadDir,
            35 => Op::Create,
            38 => Op::Destroy,
            _ => return None,
        })
    }
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

/// A name that ends with NUL.
fn name_at(bytes: &[u8], at: usize) -> Option<String> {
    let name = bytes.get(at..)?.split(|byte| *byte == 0).next()?;
    String::from_utf8(name.to_vec()).ok()
}

#[derive(Default)]
struct Bytes(Vec<u8>);

impl Bytes {
    fn u16(mut self, number: u16) -> Self {
        self.0.extend_from_slice(&number.to_ne_bytes());
        self
    }

    fn u32s<const N: usize>(mut self, numbers: [u32; N]) -> Self {
        numbers.iter().for_each(|number| self.0.extend_from_slice(&number.to_ne_bytes()));
        self
    }

    fn u64s<const N: usize>(mut self, numbers: [u64; N]) -> Self {
        numbers.iter().for_each(|number| self.0.extend_from_slice(&number.to_ne_bytes()));
        self
    }

    fn bytes(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self
    }

    fn padded_to(mut self, length: usize) -> Self {
        self.0.resize(length, 0);
        self
    }
}

struct Node {
    /// Empty: it was unlinked.
    name: String,
    mode: u32,
    data: Vec<u8>,
}

pub struct FileSystem {
    /// By their numbers, the root excepted.
    files: BTreeMap<u64, Node>,
    /// The requests that are answered with EIO.
    pub fails: Vec<Op>,
}

impl FileSystem {
    pub fn new() -> Self {
        let file = Node { name: FILE.to_owned(), mode: 0o644, data: TEXT.into() };
        FileSystem { files: [(ROOT + 1, file)].into(), fails: Vec::new() }
    }

    /// Writes the files to a directory, which is made.
    pub fn keep(&self, directory: &Path) -> io::Result<()> {
        std::fs::create_dir_all(directory)?;
        for file in self.files.values().filter(|file| !file.name.is_empty()) {
            std::fs::write(directory.join(&file.name), &file.data)?;
        }
        Ok(())
    }

    /// The answer to `request`; `None` where none is due.
    pub fn answer(&mut self, request: &Request) -> Option<Vec<u8>> {
        // FORGET, INTERRUPT, BATCH_FORGET.
        if [2, 36, 42].contains(&request.opcode) {
            return None;
        }
        let (error, body) = match self.done(request) {
            Ok(body) => (0, body.0),
            Err(error) => (-error, Vec::new()),
        };
        let length = u32::try_from(16 + body.len()).ok()?;
        let header = Bytes::default().u32s([length, error.cast_unsigned()]).u64s([request.unique]);
        Some(header.bytes(&body).0)
    }

    fn done(&mut self, request: &Request) -> Result<Bytes, i32> {
        let Request { opcode, node, body, .. } = request;
        let word = |at| u32_at(body, at).ok_or(EINVAL);
        let long = |at| u64_at(body, at).ok_or(EINVAL);
        let name = |at| name_at(body, at).ok_or(EINVAL);
        let place = |at| usize::try_from(long(at)?).map_err(|_| EINVAL);
        let opened = || Bytes::default().u64s([0]).u32s([0, 0]);
        if request.op().is_some_and(|op| self.fails.contains(&op)) {
            return Err(EIO);
        }
        match *opcode {
            INIT => {
                let front = Bytes::default().u32s([7, 31, MAX_WRITE, 0]).u16(0).u16(0);
                Ok(front.u32s([MAX_WRITE, 1, 0]).padded_to(64))
            }
            1 => self.entry(self.named(&name(0)?)?),
            3 => self.attributes(*node),
            4 => {
                const MODE: u32 = 1;
                const SIZE: u32 = 8;
                if let Some(file) = self.files.get_mut(node) {
                    let valid = word(0)?;
                    if valid & SIZE != 0 {
                        file.data.resize(place(16)?, 0);
                    }
                    if valid & MODE != 0 {
                        file.mode = word(68)? & 0o7777;
                    }
                }
                self.attributes(*node)
            }
            10 => {
                let number = self.named(&name(0)?)?;
                self.file(number)?.name.clear();
                Ok(Bytes::default())
            }
            14 | 27 => Ok(opened()),
            15 => {
                let (from, size) = (place(8)?, word(16)? as usize);
                let data = &self.file(*node)?.data;
                let end = data.len().min(from.saturating_add(size));
                Ok(Bytes::default().bytes(data.get(from..end).unwrap_or_default()))
            }
            16 => {
                let (from, size) = (place(8)?, word(16)?);
                let data = body.get(40..40 + size as usize).ok_or(EINVAL)?;
                let file = &mut self.file(*node)?.data;
                let end = from + data.len();
                if file.len() < end {
                    file.resize(end, 0);
                }
                file[from..end].copy_from_slice(data);
                Ok(Bytes::default().u32s([size, 0]))
            }
            17 => Ok(Bytes::default()
                .u64s([1 << 20, 1 << 19, 1 << 19, 1 << 20, 1 << 19])
                .u32s([4096, 255, 4096])
                .padded_to(80)),
            // FLUSH, RELEASE, FSYNC, RELEASEDIR, FSYNCDIR, DESTROY.
            25 | 18 | 20 | 29 | 30 | 38 => Ok(Bytes::default()),
            28 => {
                let from = place(8)?;
                Ok(self.listed(from, word(16)? as usize))
            }
            35 => {
                let name = name(16)?;
                let number = match self.named(&name) {
                    Ok(number) => number,
                    Err(_) => {
                        let number = self.files.keys().last().map_or(ROOT, |last| *last) + 1;
                        let file = Node { name, mode: word(4)? & 0o7777, data: Vec::new() };
                        self.files.insert(number, file);
                        number
                    }
                };
                Ok(self.entry(number)?.bytes(&opened().0))
            }
            _ => Err(ENOSYS),
        }
    }

    fn file(&mut self, number: u64) -> Result<&mut Node, i32> {
        self.files.get_mut(&number).ok_or(ENOENT)
    }

    fn named(&self, name: &str) -> Result<u64, i32> {
        self.files.iter().find(|(_, node)| node.name == name).map(|(number, _)| *number).ok_or(ENOENT)
    }

    /// Returns the entry of a name. Its times are 0, so the kernel caches nothing and asks each time.
    fn entry(&self, number: u64) -> Result<Bytes, i32> {
        let entry = Bytes::default().u64s([number, 0, 0, 0]).u32s([0, 0]);
        Ok(entry.bytes(&self.attr(number)?.0))
    }

    fn attributes(&self, number: u64) -> Result<Bytes, i32> {
        Ok(Bytes::default().u64s([0]).u32s([0, 0]).bytes(&self.attr(number)?.0))
    }

    fn attr(&self, number: u64) -> Result<Bytes, i32> {
        let (mode, links, size) = match self.files.get(&number) {
            None if number == ROOT => (0o040_755, 2, 0),
            None => return Err(ENOENT),
            Some(node) => (0o100_000 | node.mode, u32::from(!node.name.is_empty()), node.data.len() as u64),
        };
        let front = Bytes::default().u64s([number, size, size.div_ceil(512), 0, 0, 0]).u32s([0, 0, 0]);
        Ok(front.u32s([mode, links, 0, 0, 0, 4096, 0]))
    }

    /// The entries of the root from the `from`th on, as many as have room.
    fn listed(&self, from: usize, room: usize) -> Bytes {
        const DIRECTORY: u32 = 4;
        const FILE: u32 = 8;
        let own = [(ROOT, ".", DIRECTORY), (ROOT, "..", DIRECTORY)];
        let files = self.files.iter().filter(|(_, node)| !node.name.is_empty());
        let files = files.map(|(number, node)| (*number, node.name.as_str(), FILE));
        let mut listed = Bytes::default();
        for (place, (number, name, kind)) in own.into_iter().chain(files).enumerate().skip(from) {
            let length = (24 + name.len()).next_multiple_of(8);
            let end = listed.0.len() + length;
            if end > room {
                break;
            }
            let entry = listed.u64s([number, place as u64 + 1]).u32s([name.len() as u32, kind]);
            listed = entry.bytes(name.as_bytes()).padded_to(end);
        }
        listed
    }
}
