//! Which functions execute the instructions that are counted: the call stacks of all threads, as a tree.

use std::collections::{BTreeMap, HashMap};
use std::fs;

use anyhow::{Context, Result};
use object::{Object, ObjectSegment, ObjectSymbol, SymbolKind};

/// The root of the tree: what a thread was in when it was attached to.
const ROOT: u32 = 0;

/// A part of a way without a branch that is not always the same.
#[derive(Clone, Copy)]
pub enum Part {
    /// So many instructions from this address.
    Run(u64, u64),
    /// A call of the function at this address.
    Call(u64),
}

struct Node {
    parent: u32,
    /// The function's number. The root has none.
    function: Option<usize>,
    instructions: u64,
}

/// The tree of the call stacks, with the instructions of each.
pub struct Stacks {
    functions: Functions,
    nodes: Vec<Node>,
    children: HashMap<(u32, usize), u32>,
}

impl Stacks {
    pub fn new(pid: u32) -> Result<Self> {
        let root = Node { parent: ROOT, function: None, instructions: 0 };
        Ok(Stacks { functions: Functions::of(pid)?, nodes: vec![root], children: HashMap::new() })
    }

    /// Adds the parts of a way that a thread has gone from `at`, and returns where the thread is now.
    pub fn gone(&mut self, mut at: u32, parts: &[Part]) -> u32 {
        for part in parts {
            match *part {
                Part::Call(to) => at = self.called(at, to),
                Part::Run(from, instructions) => {
                    // A jump into another function takes the place of the one it comes from.
                    let function = self.functions.at(from);
                    if self.nodes[at as usize].function != Some(function) {
                        at = self.child(self.nodes[at as usize].parent, function);
                    }
                    self.nodes[at as usize].instructions += instructions;
                }
            }
        }
        at
    }

    /// Returns where a thread at `at` is when it has called the function at the address `to`.
    pub fn called(&mut self, at: u32, to: u64) -> u32 {
        let function = self.functions.at(to);
        self.child(at, function)
    }

    /// Returns where a thread at `at` is when it has returned.
    pub fn returned(&self, at: u32) -> u32 {
        self.nodes[at as usize].parent
    }

    fn child(&mut self, parent: u32, function: usize) -> u32 {
        *self.children.entry((parent, function)).or_insert_with(|| {
            self.nodes.push(Node { parent, function: Some(function), instructions: 0 });
            u32::try_from(self.nodes.len() - 1).expect("fewer stacks")
        })
    }

    /// Returns the instructions of each stack since the last call, its functions joined by semicolons.
    pub fn take(&mut self) -> BTreeMap<String, u64> {
        let mut taken = BTreeMap::new();
        for at in 0..self.nodes.len() {
            let instructions = std::mem::take(&mut self.nodes[at].instructions);
            if instructions > 0 {
                *taken.entry(self.stack(at)).or_default() += instructions;
            }
        }
        taken
    }

    fn stack(&self, mut at: usize) -> String {
        let mut names = Vec::new();
        while let Some(function) = self.nodes[at].function {
            names.push(self.functions.0[function].1.as_str());
            at = self.nodes[at].parent as usize;
        }
        names.reverse();
        names.join(";")
    }
}

/// The functions of a process by their first addresses, in order. What has no name, as most of a stripped library, has the name of its
/// file.
struct Functions(Vec<(u64, String)>);

impl Functions {
    fn of(pid: u32) -> Result<Self> {
        let maps = fs::read_to_string(format!("/proc/{pid}/maps"))?;
        let unknown = || "unknown".to_owned();
        let mut functions = vec![(0, unknown())];
        for line in maps.lines() {
            let mut fields = line.splitn(6, ' ');
            let [range, flags, offset, _, _, file] =
                std::array::from_fn(|_| fields.next().unwrap_or("").trim());
            if !flags.contains('x') {
                continue;
            }
            let (start, end) = range.split_once('-').context("a range in maps")?;
            let [start, end, offset] = [start, end, offset].map(|text| u64::from_str_radix(text, 16));
            let (start, end, offset) = (start?, end?, offset?);
            let name_of_file = file.rsplit('/').next().filter(|name| !name.is_empty()).unwrap_or("unknown");
            functions.extend([(start, name_of_file.to_owned()), (end, unknown())]);
            let Ok(bytes) = fs::read(file) else { continue };
            let elf = object::File::parse(&*bytes)?;
            // A mapping begins at a page, a segment need not.
            let page = |address: u64| address & !0xfff;
            let Some(segment) = elf.segments().find(|segment| page(segment.file_range().0) == offset) else {
                continue;
            };
            let base = start.wrapping_sub(page(segment.address()));
            let is_function = |symbol: &object::Symbol<'_, '_>| symbol.kind() == SymbolKind::Text;
            let mut named = BTreeMap::new();
            for symbol in elf.symbols().chain(elf.dynamic_symbols()).filter(is_function) {
                let at = base.wrapping_add(symbol.address());
                if symbol.is_definition() && (start..end).contains(&at) {
                    let name = rustc_demangle::demangle(symbol.name()?);
                    named.insert(at, format!("{name:#}").replace([';', ' '], "_"));
                    named.entry(at + symbol.size()).or_insert_with(|| name_of_file.to_owned());
                }
            }
            functions.extend(named);
        }
        functions.sort_by_key(|(at, _)| *at);
        Ok(Functions(functions))
    }

    /// Returns the number of the function that the address is in.
    fn at(&self, address: u64) -> usize {
        self.0.partition_point(|(at, _)| *at <= address) - 1
    }
}
