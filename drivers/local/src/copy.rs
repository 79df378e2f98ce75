//! Copies of images: with shared blocks where the file-system can, else of the data, holes left out. Owns nothing.

use std::fs::File;
use std::io::{self, Read};

use rustix::fs::{SeekFrom, ioctl_ficlone, seek};
use rustix::io::Errno;

/// Gives `to` the blocks of `from`, all at one moment even while `from` is written to; false where that cannot be had.
pub fn reflink(from: &File, to: &File) -> io::Result<bool> {
    match ioctl_ficlone(to, from) {
        Ok(()) => Ok(true),
        // No such call, not between these two, not in steps of this file-system's blocks.
        Err(Errno::OPNOTSUPP | Errno::NOTTY | Errno::XDEV | Errno::INVAL) => Ok(false),
        Err(e) => Err(e.into()),
    }
}

/// Copies what is not a hole; `to` has none but holes.
pub fn data(from: &File, mut to: &File) -> io::Result<()> {
    let mut end = 0;
    loop {
        let start = match seek(from, SeekFrom::Data(end)) {
            Ok(start) => start,
            Err(Errno::NXIO) => return Ok(()),
            Err(e) => return Err(e.into()),
        };
        end = seek(from, SeekFrom::Hole(start))?;
        seek(from, SeekFrom::Start(start))?;
        seek(to, SeekFrom::Start(start))?;
        if io::copy(&mut from.take(end - start), &mut to)? != end - start {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{FileExt, MetadataExt};

    use super::*;

    #[test]
    fn data_is_copied_and_holes_stay_holes() {
        let [from, to] = [tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap()];
        let length = 64 << 20;
        from.set_len(length).unwrap();
        to.set_len(length).unwrap();
        data(&from, &to).unwrap();
        assert_eq!(to.metadata().unwrap().blocks(), 0);
        for (at, bytes) in [(0, "first"), (20 << 20, "middle"), (length - 4, "last")] {
            from.write_all_at(bytes.as_bytes(), at).unwrap();
        }
        data(&from, &to).unwrap();
        let mut copied = Vec::new();
        let mut original = Vec::new();
        for (mut file, bytes) in [(&from, &mut original), (&to, &mut copied)] {
            seek(file, SeekFrom::Start(0)).unwrap();
            file.read_to_end(bytes).unwrap();
        }
        assert!(original == copied);
        assert!(to.metadata().unwrap().blocks() * 512 < 1 << 20);
    }
}
