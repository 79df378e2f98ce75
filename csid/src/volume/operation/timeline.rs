//! The time that an operation has spent in each of its steps.

use std::time::{Duration, Instant};

use crate::busy_poll;
use crate::error::Step;

/// The time from the read of a call until its operation is in a volume's queue: the authorization, the arguments and, of a registered
/// volume, the record.
const BUS: &str = "bus";

/// The current step of an operation, and the durations of those before.
#[derive(Debug)]
pub(in crate::volume) struct Timeline {
    step: Step,
    /// Name of the current part of the step. A step has several where one name would hide what is slow.
    part: &'static str,
    since: Instant,
    ended: Vec<(&'static str, Duration)>,
}

impl Timeline {
    pub(in crate::volume) fn new(step: Step) -> Self {
        Timeline { step, part: step.name(), since: Instant::now(), ended: Vec::new() }
    }

    /// Notes when csid read the call that began the operation. Later calls, which join the operation, change nothing.
    pub(in crate::volume) fn note_arrival(&mut self, arrived: Instant) {
        if self.part == Step::Queued.name() && self.ended.is_empty() {
            self.ended.push((BUS, self.since.saturating_duration_since(arrived)));
        }
    }

    pub(in crate::volume) fn step(&self) -> Step {
        self.step
    }

    pub(in crate::volume) fn set(&mut self, step: Step) {
        self.step = step;
        self.set_part(step.name());
    }

    /// Begins a part of the current step. The next step ends it.
    pub(in crate::volume) fn set_part(&mut self, part: &'static str) {
        if part != self.part {
            let now = Instant::now();
            let took = now.saturating_duration_since(self.since);
            add(&mut self.ended, self.part, took);
            (self.part, self.since) = (part, now);
            busy_poll::note_step(now);
        }
    }

    /// Returns the names of steps and parts with their durations, in the order in which each began first. A repeated one is there once,
    /// with the sum.
    pub(in crate::volume) fn timings(&self) -> Vec<(&'static str, Duration)> {
        let mut timings = self.ended.clone();
        add(&mut timings, self.part, self.since.elapsed());
        timings
    }
}

fn add(timings: &mut Vec<(&'static str, Duration)>, part: &'static str, took: Duration) {
    match timings.iter_mut().find(|(of, _)| *of == part) {
        Some((_, sum)) => *sum += took,
        None => timings.push((part, took)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_call_alone_adds_its_time_on_the_bus() {
        let arrived = Instant::now();
        std::thread::sleep(Duration::from_millis(2));
        let mut timeline = Timeline::new(Step::Queued);
        timeline.note_arrival(arrived);
        timeline.note_arrival(arrived);
        timeline.set(Step::Publish);
        timeline.note_arrival(arrived);
        let timings = timeline.timings();
        let names: Vec<_> = timings.iter().map(|(name, _)| *name).collect();
        assert_eq!(names, [BUS, "queued", "publish"]);
        assert!(timings[0].1 >= Duration::from_millis(2), "{timings:?}");
        let sum: Duration = timings.iter().map(|(_, took)| *took).sum();
        assert!(sum <= arrived.elapsed(), "no time counts twice: {timings:?}");
    }

    #[test]
    fn repeated_step_is_there_once_with_the_sum() {
        let mut timeline = Timeline::new(Step::Queued);
        let begun = timeline.since;
        let pause = || std::thread::sleep(Duration::from_millis(2));
        for _ in 0..3 {
            timeline.set(Step::Publish);
            pause();
            timeline.set_part("deliver");
            assert_eq!(timeline.step(), Step::Publish);
            pause();
        }
        timeline.set(Step::Commit);
        let timings = timeline.timings();
        let names: Vec<_> = timings.iter().map(|(name, _)| *name).collect();
        assert_eq!(names, ["queued", "publish", "deliver", "commit"]);
        let of = |at: usize| timings[at].1;
        assert!(of(1) >= Duration::from_millis(6) && of(2) >= Duration::from_millis(6), "{timings:?}");
        let sum: Duration = timings.iter().map(|(_, took)| *took).sum();
        assert!(sum <= begun.elapsed(), "no time counts twice: {timings:?}");
    }
}
