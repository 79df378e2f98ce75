//! The history of a run: one line of JSON for each call of a client, each read and each fault.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Instant;

use serde::Serialize;

/// The end of a call. Unknown: the call may have done its work, or may do it later.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    Ok,
    Refused,
    Unknown,
}

/// A line, as the checker reads it. Times are microseconds since the start.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Line {
    pub call: String,
    pub who: String,
    pub client: u32,
    pub volume: String,
    pub single: bool,
    pub attaches: bool,
    pub start: i64,
    pub end: i64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub outcome: Option<Outcome>,
    /// What csid has answered in place of a success. For people.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub error: String,
    pub holders: Vec<String>,
}

impl Line {
    /// Returns a line about no volume.
    pub fn event(call: &str, start: i64) -> Line {
        Line { call: call.into(), start, end: start, ..Line::default() }
    }
}

pub struct History {
    pub path: PathBuf,
    begun: Instant,
    file: Mutex<File>,
    lines: Mutex<Vec<Line>>,
}

impl History {
    pub fn create(path: &Path) -> History {
        let file = Mutex::new(File::create(path).expect("the history"));
        History { path: path.to_owned(), begun: Instant::now(), file, lines: Mutex::default() }
    }

    /// Returns the time since the start.
    pub fn now(&self) -> i64 {
        i64::try_from(self.begun.elapsed().as_micros()).expect("a short run")
    }

    pub fn write(&self, line: &Line) {
        write(&mut self.file.lock().expect("the history"), line);
        self.lines.lock().expect("the lines").push(line.clone());
    }

    /// Returns how many claims were granted, refused, and how many calls have an unknown outcome.
    pub fn counts(&self) -> (usize, usize, usize) {
        let lines = self.lines.lock().expect("the lines");
        let count = |is: &dyn Fn(&&Line) -> bool| lines.iter().filter(is).count();
        let take = |outcome| count(&|line| line.call == "take" && line.outcome == Some(outcome));
        (take(Outcome::Ok), take(Outcome::Refused), count(&|line| line.outcome == Some(Outcome::Unknown)))
    }

    /// Returns the longest time without a granted claim that began at most `within` after a fault of this kind. In microseconds, 0
    /// without such a fault.
    pub fn longest_gap(&self, fault: &str, within: i64) -> i64 {
        let lines = self.lines.lock().expect("the lines");
        let mut grants: Vec<i64> = lines
            .iter()
            .filter(|line| line.call == "take" && line.outcome == Some(Outcome::Ok))
            .map(|line| line.end)
            .collect();
        grants.sort_unstable();
        let gap = |at: i64| {
            grants
                .windows(2)
                .filter(|pair| pair[1] >= at && pair[0] <= at + within)
                .map(|pair| pair[1] - pair[0].max(at))
                .max()
                .unwrap_or(0)
        };
        lines.iter().filter(|line| line.call == fault).map(|line| gap(line.start)).max().unwrap_or(0)
    }
}

fn write(file: &mut File, line: &Line) {
    let text = serde_json::to_string(line).expect("a line");
    writeln!(file, "{text}").expect("the history");
}
