//! A wall clock that a test moves, for single processes. The clocks that only count are the kernel's.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What the clock's file says of a clock that no process has read since it was moved.
const UNREAD: i64 = i64::MIN;

pub struct Clock {
    library: PathBuf,
    file: PathBuf,
}

impl Clock {
    /// Makes a clock that is right, with its files in `directory`, which it makes.
    pub fn new(directory: &Path) -> Clock {
        fs::create_dir_all(directory).expect("the clock's directory");
        let clock = Clock { library: directory.join("clock.so"), file: directory.join("clock") };
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/clock/clock.c");
        let mut compiler = Command::new("cc");
        compiler.args(["-shared", "-fPIC", "-O2", "-Wall", "-Werror", "-o"]).args([&clock.library, &source]);
        assert!(compiler.status().expect("a C compiler").success());
        clock.move_by(0);
        clock
    }

    /// Returns what a process with this clock has in its environment.
    pub fn environment(&self) -> [(&'static str, PathBuf); 2] {
        [("LD_PRELOAD", self.library.clone()), ("CSID_CLOCK", self.file.clone())]
    }

    /// Puts the clock so many seconds ahead of the right time. A negative number puts it behind.
    pub fn move_by(&self, seconds: i64) {
        // In place: the processes have the file mapped. None has read the clock since.
        let file = fs::OpenOptions::new().create(true).truncate(false).write(true).open(&self.file);
        let file = file.expect("the clock's file");
        let numbers = [seconds, UNREAD].map(i64::to_ne_bytes).concat();
        std::os::unix::fs::FileExt::write_all_at(&file, &numbers, 0).expect("the clock is moved");
    }

    /// Whether a process has read the clock when it was so many seconds ahead, and not read it otherwise since.
    pub fn is_read_at(&self, seconds: i64) -> bool {
        let numbers = fs::read(&self.file).expect("the clock's file");
        numbers[8..] == seconds.to_ne_bytes()
    }
}
