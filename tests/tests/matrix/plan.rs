//! The matrix: which operation is killed, with how many volumes of which kind in flight, while the plugin does what.

use std::fmt;

use csid_tests::dice::Dice;
use csid_tests::script::{Act, Lie, Rule};

use crate::registered;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    FileSystem,
    Block,
    /// A file system of a plugin that does not stage.
    Unstaged,
}

impl Kind {
    pub const ALL: [Kind; 3] = [Kind::FileSystem, Kind::Block, Kind::Unstaged];

    pub fn plugin(self) -> &'static str {
        match self {
            Kind::FileSystem | Kind::Block => "p",
            Kind::Unstaged => "q",
        }
    }

    fn stages(self) -> bool {
        self != Kind::Unstaged
    }
}

/// The victim of a kill at an edge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    Mount,
    Unmount,
    /// The start after a reboot.
    Restore,
    /// Mount, after somebody took the mount away.
    Repair,
    /// The start after csid was killed while the plugin was staging or publishing.
    Undo,
    /// The start after csid was killed while the plugin was unpublishing or unstaging.
    Finish,
}

/// The behaviour of the plugin at one of its calls, or at all of that name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plugin {
    Answers,
    Fails,
    Hangs,
    Dies,
    /// The plugin does the call once, answers later than the RPC's deadline, and at once when it is asked again.
    Late,
    /// The plugin serves one call at a time.
    Serial,
    /// The plugin answers that a mount is gone, and leaves it.
    Leaves,
    /// The plugin counts the publishes of a volume, and refuses NodeUnstageVolume above 0.
    Counts,
}

impl Plugin {
    /// Behaviours at one call.
    pub const ALL: [Plugin; 4] = [Plugin::Answers, Plugin::Fails, Plugin::Hangs, Plugin::Dies];
    /// Behaviours of drivers that are slow, or that lie.
    pub const ODD: [Plugin; 4] = [Plugin::Late, Plugin::Serial, Plugin::Leaves, Plugin::Counts];
}

impl Operation {
    pub const ALL: [Operation; 6] = [
        Operation::Mount,
        Operation::Unmount,
        Operation::Restore,
        Operation::Repair,
        Operation::Undo,
        Operation::Finish,
    ];

    /// Whether it goes on with what an earlier csid left under way.
    pub fn begins_cut_off(self) -> bool {
        matches!(self, Operation::Undo | Operation::Finish)
    }

    /// The calls it makes while all goes well.
    pub fn rpcs(self, kind: Kind) -> Vec<&'static str> {
        let making = ["NodeStageVolume", "NodePublishVolume"];
        let removing = ["NodeUnpublishVolume", "NodeUnstageVolume"];
        let rpcs = match self {
            Operation::Mount | Operation::Restore => making.to_vec(),
            Operation::Unmount | Operation::Undo | Operation::Finish => removing.to_vec(),
            Operation::Repair => [removing, making].concat(),
        };
        rpcs.into_iter().filter(|rpc| kind.stages() || rpc.contains("ublish")).collect()
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Cell {
    pub operation: Operation,
    pub flight: usize,
    pub kind: Kind,
    pub plugin: Plugin,
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Cell { operation, flight, kind, plugin } = self;
        write!(f, "{operation:?} of {flight} {kind:?}, the plugin {plugin:?}")
    }
}

/// A life of a world.
pub enum Life {
    /// The life of volumes that mounts give inline.
    Inline(Chapter),
    Registered(registered::Chapter),
    /// A number of volumes that another mount namespace writes to.
    Elsewhere(usize),
    /// A number of mounts and unmounts while other volumes' file systems hang.
    Hung(usize),
}

pub enum Chapter {
    /// One volume in flight. csid is killed at each edge in turn. The plugin has its behaviour at one of its calls, or at each.
    EveryEdge(Vec<Cell>, Calls),
    /// csid is killed this number of times at a random edge.
    RandomEdge(Vec<Cell>, usize),
    /// Clients and fate, so many times (`sequences`).
    Sequences(usize),
}

impl fmt::Display for Life {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Life::Inline(Chapter::EveryEdge(cells, _)) => {
                write!(f, "every edge, {} cells from {}", cells.len(), cells[0])
            }
            Life::Inline(Chapter::RandomEdge(cells, rounds)) => {
                write!(f, "{rounds} random edges, {} cells from {}", cells.len(), cells[0])
            }
            Life::Inline(Chapter::Sequences(epochs)) => write!(f, "{epochs} sequences"),
            Life::Registered(chapter) => write!(f, "registered volumes, {chapter:?}"),
            Life::Elsewhere(volumes) => write!(f, "{volumes} volumes with a writer elsewhere"),
            Life::Hung(rounds) => write!(f, "{rounds} rounds next to hung mounts"),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Calls {
    One,
    Each,
}

/// How many volumes are in flight when it is not one.
pub const MANY: usize = 16;

/// Returns the lives of every run: each operation with each kind of volume at every edge, each fault of the plugin at every edge, and all of
/// them with many volumes at random edges.
pub fn matrix() -> Vec<Life> {
    let mut chapters = Vec::new();
    for kind in Kind::ALL {
        for plugin in Plugin::ALL {
            let cell =
                |flight| move |operation: &Operation| Cell { operation: *operation, flight, kind, plugin };
            // A fault of the plugin does not depend on the kind. The other kinds have it in the random lives and in a long run.
            let operations = match (plugin, kind) {
                (Plugin::Answers, _) => &Operation::ALL[..],
                (_, Kind::FileSystem) => &Operation::ALL[..3],
                (_, Kind::Block | Kind::Unstaged) => &[],
            };
            if !operations.is_empty() {
                chapters.push(Chapter::EveryEdge(operations.iter().map(cell(1)).collect(), Calls::One));
            }
            chapters.push(Chapter::RandomEdge(Operation::ALL.iter().map(cell(MANY)).collect(), 10));
        }
    }
    for plugin in Plugin::ODD {
        // Only calls that remove show that these plugins lie.
        if [Plugin::Leaves, Plugin::Counts].contains(&plugin) {
            let removing = [Operation::Unmount, Operation::Repair, Operation::Undo, Operation::Finish];
            chapters.push(odd_at_every_edge(plugin, &removing));
        }
        let cells = Kind::ALL
            .map(|kind| Operation::ALL.map(|operation| Cell { operation, flight: MANY, kind, plugin }));
        chapters.push(Chapter::RandomEdge(cells.concat(), 10));
    }
    chapters.extend((0..3).map(|_| Chapter::Sequences(40)));
    let registered = registered::matrix().into_iter().map(Life::Registered);
    chapters
        .into_iter()
        .map(Life::Inline)
        .chain(registered)
        .chain([Life::Elsewhere(24), Life::Hung(48)])
        .collect()
}

/// Returns a life of a plugin that is slow, or that lies.
fn odd_at_every_edge(plugin: Plugin, operations: &[Operation]) -> Chapter {
    let cell =
        |operation: &Operation| Cell { operation: *operation, flight: 1, kind: Kind::FileSystem, plugin };
    Chapter::EveryEdge(operations.iter().map(cell).collect(), Calls::One)
}

/// Returns the further lives of a long run.
pub fn every_call() -> Vec<Life> {
    let mut chapters = Vec::new();
    for kind in Kind::ALL {
        for plugin in Plugin::ALL {
            for operation in Operation::ALL {
                let cell = Cell { operation, flight: 1, kind, plugin };
                chapters.push(Life::Inline(Chapter::EveryEdge(vec![cell], Calls::Each)));
            }
        }
    }
    // A late call holds up each round, at every edge.
    let odd = [Plugin::Serial, Plugin::Leaves, Plugin::Counts];
    chapters.extend(odd.map(|plugin| Life::Inline(odd_at_every_edge(plugin, &Operation::ALL))));
    chapters
}

/// Returns a random life, for the end of a long run.
pub fn another(dice: &mut Dice) -> Life {
    match dice.below(5) {
        0 => return Life::Registered(registered::another(dice)),
        1 => return Life::Inline(Chapter::Sequences(40)),
        2 => return Life::Elsewhere(48),
        3 => return Life::Hung(96),
        _ => {}
    }
    let cells = (0..12).map(|_| Cell {
        operation: dice.of(&Operation::ALL),
        flight: dice.of(&[1, 2, MANY]),
        kind: dice.of(&Kind::ALL),
        plugin: if dice.once_in(3) { dice.of(&Plugin::ODD) } else { dice.of(&Plugin::ALL) },
    });
    Life::Inline(Chapter::RandomEdge(cells.collect(), 48))
}

impl Cell {
    /// Returns the rules for the plugin's behaviour in its call `rpc`.
    pub fn rules(&self, rpc: &str, dice: &mut Dice) -> Vec<Rule> {
        let before = dice.once_in(2);
        let code = 1 + dice.below(16) as i32;
        let act = match self.plugin {
            Plugin::Answers => return Vec::new(),
            Plugin::Fails if before => Act::Fail(code),
            Plugin::Fails => Act::FailAfter(code),
            Plugin::Hangs => hang(before),
            Plugin::Dies if before => Act::DieBefore,
            Plugin::Dies => Act::DieAfter,
            Plugin::Late => return vec![Rule::always(rpc, Act::Background(LATE))],
            Plugin::Serial => return vec![Rule::always(rpc, Act::Serial(TURN))],
            // A plugin that answers that it has made a mount and has not is one that fails.
            Plugin::Leaves if rpc.contains("Un") => Act::Lie(Lie::Nothing),
            Plugin::Leaves | Plugin::Counts => return Vec::new(),
        };
        vec![Rule { from: 1 + dice.below(self.flight as u64), ..Rule::once(rpc, act) }]
    }
}

/// Milliseconds, more than the plugins' `rpc-deadline`.
pub const LATE: u64 = 1_300;
/// Milliseconds of one call.
pub const TURN: u64 = 40;

/// Longer than any patience.
pub fn hang(before: bool) -> Act {
    const LONG: u64 = 600_000;
    if before { Act::Delay(LONG) } else { Act::DelayAfter(LONG) }
}
