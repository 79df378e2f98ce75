//! Makes a volume's file-system once, and grows it. Owns nothing.
//!
//! What always holds: mkfs runs only on a volume that was never mounted. The volume's metadata says `started` before
//! mkfs begins and `done` after its work is on disk, and only `done` is mounted. So `started` is an interrupted mkfs,
//! which is repeated, and `done` is never formatted again, whatever the image looks like. An image that says `none` but
//! holds a byte other than zero was written by another program, and stays as it is.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::fs::{FallocateFlags, SeekFrom, fallocate, seek};

use crate::error::{At, Error, Result};
use crate::store::{Content, Format, Volume};
use crate::{loops, sys};

pub fn ensure(volume: &mut Volume) -> Result<()> {
    let content = volume.meta.content;
    if content == Content::Block || volume.meta.format == Format::Done {
        return Ok(());
    }
    let path = volume.image();
    let image = OpenOptions::new().read(true).write(true).open(&path).at("open", &path)?;
    match volume.meta.format {
        Format::None if holds_data(&image).at("read", &path)? => {
            return Err(Error::Precondition(format!(
                "the image of volume {} holds data that this driver did not write, so it is not formatted; \
                 look at {}",
                volume.id,
                path.display()
            )));
        }
        Format::None => volume.set_format(Format::Started)?,
        // What half an mkfs wrote may look like a whole one's. Where holes cannot be made mkfs writes over it.
        _ => drop(fallocate(
            &image,
            FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
            0,
            volume.capacity()?,
        )),
    }
    tracing::info!(volume = volume.id, filesystem = content.name(), "formatting");
    mkfs(volume, content)?;
    image.sync_all().at("sync", &path)?;
    volume.set_format(Format::Done)
}

fn mkfs(volume: &Volume, content: Content) -> Result<()> {
    let (tool, package, arguments): (_, _, &[&str]) = match content {
        Content::Xfs => ("mkfs.xfs", "xfsprogs", &["-q", "-f", "-K"]),
        // No blocks for root alone: the volume is all its user's. Inode tables are left to the kernel: milliseconds.
        _ => (
            "mkfs.ext4",
            "e2fsprogs",
            &["-q", "-F", "-m", "0", "-E", "nodiscard,lazy_itable_init=1,lazy_journal_init=1"],
        ),
    };
    let mut command = Command::new(tool);
    // As its input mkfs gets the volume's lock: should the driver die, the next one waits until this mkfs has ended.
    command.args(arguments).arg(volume.image()).stdin(Stdio::from(volume.share_lock()?));
    run(command, tool, package)
}

fn run(mut command: Command, tool: &'static str, package: &'static str) -> Result<()> {
    let output = command.output().map_err(|source| Error::NoTool { tool, package, source })?;
    if output.status.success() {
        return Ok(());
    }
    let output_text = String::from_utf8_lossy(&output.stderr).trim().replace('\n', "; ");
    Err(Error::Tool { tool, status: output.status, output: output_text })
}

/// Whether any byte is not zero; holes are skipped.
fn holds_data(image: &File) -> io::Result<bool> {
    let mut buffer = vec![0; 1 << 20];
    let mut position = 0;
    loop {
        position = match seek(image, SeekFrom::Data(position)) {
            Ok(data) => data,
            Err(rustix::io::Errno::NXIO) => return Ok(false),
            Err(e) => return Err(e.into()),
        };
        let n = image.read_at(&mut buffer, position)?;
        if n == 0 {
            return Ok(false);
        }
        if buffer[..n].iter().any(|byte| *byte != 0) {
            return Ok(true);
        }
        position += n as u64;
    }
}

/// Lets the mounted file-system fill its device; one that does already is left as it is.
pub fn grow(volume: &Volume, mounted: &Path, attached: &loops::Loop) -> Result<()> {
    attached.take_new_size()?;
    match volume.meta.content {
        Content::Block => Ok(()),
        Content::Ext4 => {
            let (blocks, block) =
                ext4_size(&attached.device).at("read the superblock of", &attached.node())?;
            let wanted = volume.capacity()? / block;
            if blocks >= wanted {
                return Ok(());
            }
            let root = File::open(mounted).at("open", mounted)?;
            match sys::ext4_resize(&root, wanted) {
                Err(e) if e.raw_os_error() == Some(libc::EPERM) => Err(Error::Precondition(
                    "the kernel lets ext4 grow only with CAP_SYS_RESOURCE; give it to this driver's unit"
                        .into(),
                )),
                resized => resized.at("grow the ext4 on", mounted),
            }
        }
        Content::Xfs => {
            let mut command = Command::new("xfs_growfs");
            command.arg("-d").arg(mounted).stdin(Stdio::null());
            run(command, "xfs_growfs", "xfsprogs")
        }
    }
}

/// How many blocks of which size, by the superblock at byte 1024. Read from the device, which a mounted ext4 keeps up
/// to date.
fn ext4_size(device: &File) -> io::Result<(u64, u64)> {
    let mut superblock = [0; 1024];
    device.read_exact_at(&mut superblock, 1024)?;
    let word = |at: usize| u64::from(u32::from_le_bytes(std::array::from_fn(|i| superblock[at + i])));
    let magic = u16::from_le_bytes([superblock[0x38], superblock[0x39]]);
    if magic != 0xEF53 || word(0x18) > 6 {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "no ext4"));
    }
    // The upper half counts only with the feature 64bit.
    let upper = if word(0x60) & 0x80 != 0 { word(0x150) << 32 } else { 0 };
    Ok((upper | word(0x4), 1024 << word(0x18)))
}
