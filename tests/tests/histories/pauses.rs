//! The bounds of the pauses of claims after the faults that hit no host.

use std::io::Write;
use std::time::Duration;

use crate::faults::{ALL, Fault};
use crate::history::Line;
use crate::load::VOLUMES;
use crate::{HOSTS, Run, keep};

/// How long no claim may be granted while callers wait. A server's kill has this bound for each host that had a session with the server.
pub const BOUND: Duration = Duration::from_secs(5);
/// The same for claims of each volume that a controller attaches, after a server's kill. Others go on with its calls when its lease of 10 s is over.
pub const BOUND_OF_ATTACHED: Duration = Duration::from_secs(12);
/// The two bounds after the other faults. Two rounds of the soak at once have had pauses of 4.8 s and 12.6 s. What stands still exceeds them.
const BOUNDS_OF_OTHERS: (Duration, Duration) = (Duration::from_secs(6), Duration::from_secs(20));
/// What a fault kills stays away for longer than the bound by this time. So a cluster that waits for its return exceeds the bound.
pub const MORE: Duration = Duration::from_secs(2);

/// The faults that hit no host. Claims go on within [`BOUND`].
pub const BOUNDED: [Fault; 5] =
    [Fault::KillLeader, Fault::KillFollower, Fault::KillServer, Fault::KillMajority, Fault::FillDisk];
/// The line of the history from which on claims go on after a [`Fault::KillMajority`].
pub const MAJORITY_IS_BACK: &str = "majority is back";

/// Judges the pauses of claims in a run of so many faults.
pub fn judge(run: &Run, count: usize) {
    let Run { shared, seed, .. } = run;
    let mut late = Vec::new();
    for fault in BOUNDED {
        let name = if fault == Fault::KillMajority { MAJORITY_IS_BACK } else { fault.name() };
        let pause = |is_one: &dyn Fn(&Line) -> bool| {
            shared.history.longest_pause(name, is_one).map(|pause| pause as f64 / 1e6)
        };
        let Some(of_all) = pause(&|line| !line.attaches) else {
            // A shorter run has some kinds of faults alone.
            assert!(count < ALL.len(), "seed {seed}: {name:?} was not made in {count} faults");
            continue;
        };
        let hosts = (1..=HOSTS[1]).map(|n| format!("n{n}"));
        let pause_of = |host: &str| {
            let is_one = |line: &Line| !line.attaches && line.is_of(host);
            shared
                .history
                .longest_pause_until(name, is_one, |line| line.is_of(host) && line.is_answer_of_server())
        };
        let of_one = hosts.filter_map(|host| pause_of(&host)).max().unwrap_or_default() as f64 / 1e6;
        // Each of them has a call of its own that another server has to go on with.
        let attached = VOLUMES.iter().filter(|volume| volume.attaches());
        let of_attached =
            attached.filter_map(|volume| pause(&|line| line.volume == volume.name)).fold(0.0, f64::max);
        // Past the capture of the test harness.
        let _ = writeln!(
            std::io::stderr(),
            "    longest pause of claims at {name:?}: {of_all:.1} s, on one host {of_one:.1} s, of an attached volume {of_attached:.1} s"
        );
        let (bound_of_one, bound_of_attached) = match fault {
            Fault::KillServer => (BOUND, BOUND_OF_ATTACHED),
            _ => BOUNDS_OF_OTHERS,
        };
        let mut bounds = vec![
            ("all claims", of_all, BOUND),
            ("one host", of_one, bound_of_one),
            ("an attached volume", of_attached, bound_of_attached),
        ];
        bounds.retain(|(_, pause, bound)| *pause > bound.as_secs_f64());
        late.extend(bounds.into_iter().map(|bound| (name, bound)));
    }
    if !late.is_empty() {
        keep(&shared.history.path, seed);
    }
    assert!(late.is_empty(), "seed {seed}: claims did not go on in time: {late:?}");
}
