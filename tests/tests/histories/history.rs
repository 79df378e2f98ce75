//! The history of a run: one line of JSON for each call of a client, each read and each fault.

use std::fmt::{self, Display, Formatter};
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
    /// How long the call may wait in the queue. 0: not at all.
    pub wait: i64,
    /// Whether csid has refused the claim at its time, and the servers may not know it.
    pub waiting: bool,
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

    pub fn is_grant(&self) -> bool {
        self.call == "take" && self.outcome == Some(Outcome::Ok)
    }

    /// Whether a server has answered a claim: it was granted, or refused for the claim of a named host.
    pub fn is_answer_of_server(&self) -> bool {
        let holder = self.error.rsplit(" by ").next().unwrap_or_default();
        self.is_grant() || self.outcome == Some(Outcome::Refused) && holder.contains('/')
    }

    /// Whether it is a fault, or another time of the whole cluster.
    fn is_of_cluster(&self) -> bool {
        self.volume.is_empty() && self.who.is_empty()
    }

    /// Whether a caller of this host has made the call.
    pub fn is_of(&self, host: &str) -> bool {
        self.who.split('/').next() == Some(host)
    }
}

/// How many calls had which end.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    pub calls: usize,
    /// Claims that were granted, and that were refused.
    pub granted: usize,
    pub refused: usize,
    pub unknown: usize,
    /// Those granted and refused claims that might wait in the queue.
    pub waits_granted: usize,
    pub waits_refused: usize,
}

impl Display for Counts {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Counts { calls, granted, refused, unknown, waits_granted, waits_refused } = self;
        write!(
            f,
            "{granted} claims granted, {refused} refused, {unknown} outcomes of {calls} calls unknown; of claims that may wait \
             {waits_granted} granted, {waits_refused} refused"
        )
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

    pub fn counts(&self) -> Counts {
        let lines = self.lines.lock().expect("the lines");
        let mut counts = Counts::default();
        for line in lines.iter().filter(|line| !line.who.is_empty()) {
            let Some(outcome) = line.outcome else { continue };
            let is_wait = usize::from(line.wait > 0);
            counts.calls += 1;
            match outcome {
                Outcome::Ok if line.call == "take" => {
                    counts.granted += 1;
                    counts.waits_granted += is_wait;
                }
                Outcome::Ok => {}
                Outcome::Refused => {
                    counts.refused += 1;
                    counts.waits_refused += is_wait;
                }
                Outcome::Unknown => counts.unknown += 1,
            }
        }
        counts
    }

    /// Returns how many claims of a host's callers were granted.
    pub fn granted(&self, host: &str) -> usize {
        let lines = self.lines.lock().expect("the lines");
        lines.iter().filter(|line| line.is_grant() && line.is_of(host)).count()
    }

    /// Returns the lines of the calls that have begun from a time on, and have ended.
    pub fn since(&self, start: i64) -> Vec<Line> {
        let lines = self.lines.lock().expect("the lines");
        lines.iter().filter(|line| line.start >= start).cloned().collect()
    }

    /// Returns the longest pause of some claims after a fault of this kind, up to the next fault, in microseconds. `None`: there was no such fault.
    ///
    /// A pause ends when a claim is granted. It begins when a caller begins to wait, but not before the fault and the grant before. A caller
    /// whose claim is refused does not wait, for others have the volume. One without an answer waits.
    pub fn longest_pause(&self, fault: &str, is_one: impl Fn(&Line) -> bool) -> Option<i64> {
        self.longest_pause_until(fault, &is_one, |line| line.is_grant() && is_one(line))
    }

    /// Returns the same of pauses that other lines end.
    pub fn longest_pause_until(
        &self,
        fault: &str,
        is_one: impl Fn(&Line) -> bool,
        ends: impl Fn(&Line) -> bool,
    ) -> Option<i64> {
        let lines = self.lines.lock().expect("the lines");
        let is_wait = |line: &&Line| line.call == "take" && line.outcome != Some(Outcome::Refused);
        let waits: Vec<&Line> = lines.iter().filter(is_wait).filter(|line| is_one(line)).collect();
        let pause = |(at, of): (usize, &Line)| {
            let next = lines[at + 1..].iter().find(|line| line.is_of_cluster());
            let end = next.map_or(i64::MAX, |next| next.start);
            let mut grants: Vec<i64> = lines.iter().filter(|line| ends(line)).map(|line| line.end).collect();
            grants.retain(|grant| (of.start..end).contains(grant));
            grants.extend([of.start, end]);
            grants.sort_unstable();
            let pauses = grants.windows(2).map(|pair| {
                let in_between = waits.iter().filter(|wait| wait.start < pair[1] && wait.end > pair[0]);
                let begin = in_between.map(|wait| wait.start.max(pair[0])).min();
                begin.map_or(0, |begin| pair[1] - begin)
            });
            pauses.max().unwrap_or(0)
        };
        lines.iter().enumerate().filter(|(_, line)| line.call == fault).map(pause).max()
    }
}

fn write(file: &mut File, line: &Line) {
    let text = serde_json::to_string(line).expect("a line");
    writeln!(file, "{text}").expect("the history");
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the longest pause after the fault, which is at 100, in a history of claims `(host, start, end, outcome)`. `next`: when the next fault
    /// is.
    fn pause(claims: &[(&str, i64, i64, Outcome)], next: i64, host: &str) -> Option<i64> {
        let directory = tempfile::tempdir().unwrap();
        let history = History::create(&directory.path().join("history"));
        let claim = |(host, start, end, outcome): &(&str, i64, i64, Outcome)| Line {
            call: "take".into(),
            who: format!("{host}/c0"),
            volume: "one".into(),
            start: *start,
            end: *end,
            outcome: Some(*outcome),
            ..Line::default()
        };
        // A host that joins is no fault.
        let joined = Line { who: "n1".into(), ..Line::event("joined", 105) };
        let faults = [Line::event("kill", 100), joined, Line::event("cut", next)];
        let mut lines: Vec<_> = claims.iter().map(claim).chain(faults).collect();
        // A line is written at the end of its call.
        lines.sort_by_key(|line| line.end);
        lines.iter().for_each(|line| history.write(line));
        history.longest_pause("kill", |line| host.is_empty() || line.is_of(host))
    }

    #[test]
    fn pause_lasts_from_a_wait_to_a_grant() {
        use Outcome::{Ok, Refused, Unknown};
        for (claims, due) in [
            // The caller waits since the fault, or since it asked.
            (&[("n1", 90, 130, Ok)][..], 30),
            (&[("n1", 110, 130, Ok)], 20),
            (&[("n1", 90, 110, Ok), ("n1", 115, 130, Ok), ("n1", 190, 191, Ok)], 15),
            // Others wait since the grant before.
            (&[("n1", 90, 120, Ok), ("n2", 90, 160, Ok)], 40),
            // A caller that gave up has waited for the next grant. One that was refused has not.
            (&[("n1", 110, 120, Unknown), ("n2", 140, 150, Ok)], 40),
            (&[("n1", 110, 120, Refused), ("n2", 140, 150, Ok)], 10),
            (&[("n1", 90, 110, Ok), ("n1", 150, 155, Unknown)], 50),
            // What ends after the next fault is not this one's.
            (&[("n1", 90, 110, Ok), ("n1", 150, 300, Ok)], 50),
            (&[("n1", 90, 99, Ok), ("n1", 210, 300, Ok)], 0),
        ] {
            assert_eq!(pause(claims, 200, ""), Some(due), "{claims:?}");
        }
    }

    #[test]
    fn answers_of_servers_name_a_host() {
        let refused =
            |error: &str| Line { outcome: Some(Outcome::Refused), error: error.into(), ..Line::default() };
        for (holder, is_of_server) in [("n2/c1", true), ("c1", false)] {
            let text = format!("ClaimConflict: a volume conflicts with the claim of default/one by {holder}");
            assert_eq!(refused(&text).is_answer_of_server(), is_of_server, "{text}");
        }
        assert!(!refused("").is_answer_of_server());
    }

    #[test]
    fn pause_of_one_host_is_its_own() {
        let claims = [("n1", 110, 115, Outcome::Ok), ("n2", 90, 180, Outcome::Ok)];
        let pauses = ["", "n1", "n2", "c1"].map(|host| pause(&claims, 200, host));
        assert_eq!(pauses, [65, 5, 80, 0].map(Some));
    }
}
