//! The verdict on the logs of a plugin's hosts with its proofs: each breach with the calls that show it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::PathBuf;

use comfy_table::{Table, presets};
use serde::Serialize;
use serde_json::Value;

use crate::log::{Hosts, LogError};
use crate::record::Event;
use crate::rules::{Breach, Checker, RULES, Verdict};

/// The output of `csi-witness report`: JSON by `serde`, a table by `Display`.
#[derive(Debug, Serialize)]
pub struct Report {
    pub calls: u64,
    pub rules: Vec<Row>,
    pub breaches: Vec<Proof>,
}

#[derive(Debug, Serialize)]
pub struct Row {
    pub rule: u8,
    pub says: &'static str,
    pub checked: u64,
    pub breaches: usize,
}

#[derive(Debug, Serialize)]
pub struct Proof {
    pub rule: u8,
    pub what: String,
    pub calls: Vec<Exchange>,
}

/// A call as the log has it.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Exchange {
    pub call: u64,
    /// Absent where there is one log alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub log: Option<PathBuf>,
    pub rpc: String,
    pub request: Value,
    /// Absent where the CO had no answer.
    pub code: Option<String>,
}

impl Report {
    /// Judges the log of a host, or those of several hosts of one plugin.
    pub fn read(logs: &[PathBuf]) -> Result<Self, LogError> {
        let mut checker = Checker::default();
        for event in Hosts::open(logs)? {
            let (host, event) = event?;
            checker.feed(host, &event);
        }
        let verdict = checker.verdict();
        let wanted: BTreeSet<u64> =
            verdict.breaches.iter().flat_map(|breach| &breach.calls).copied().collect();

        let (mut calls, mut shown) = (0, BTreeMap::<u64, Exchange>::new());
        for event in Hosts::open(logs)? {
            let (host, event) = event?;
            match event {
                Event::Called { call, rpc, request, .. } => {
                    calls += 1;
                    if wanted.contains(&call) {
                        let log = Some(&logs[host]).filter(|_| logs.len() > 1).cloned();
                        let number = call / logs.len() as u64;
                        shown.insert(call, Exchange { call: number, log, rpc, request, code: None });
                    }
                }
                Event::Ended { call, code, .. } => {
                    if let Some(exchange) = shown.get_mut(&call) {
                        exchange.code = code;
                    }
                }
                _ => {}
            }
        }
        Ok(Report::new(calls, verdict, &shown))
    }

    fn new(calls: u64, verdict: &Verdict, shown: &BTreeMap<u64, Exchange>) -> Self {
        let row = |(rule, says): &(u8, &'static str)| Row {
            rule: *rule,
            says,
            checked: verdict.checked.get(rule).copied().unwrap_or_default(),
            breaches: verdict.breaches.iter().filter(|breach| breach.rule == *rule).count(),
        };
        let rules = RULES.iter().map(row).collect();
        let proof = |breach: &Breach| Proof {
            rule: breach.rule,
            what: breach.what.clone(),
            calls: breach.calls.iter().filter_map(|call| shown.get(call).cloned()).collect(),
        };
        Report { calls, rules, breaches: verdict.breaches.iter().map(proof).collect() }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::new();
        table.load_style(presets::NOTHING).set_header(["rule", "checked", "breaches", "what it says"]);
        for row in &self.rules {
            table.add_row([
                row.rule.to_string(),
                row.checked.to_string(),
                row.breaches.to_string(),
                row.says.to_owned(),
            ]);
        }
        writeln!(f, "{}", table.trim_fmt())?;
        for breach in &self.breaches {
            writeln!(f, "\nrule {}: {}", breach.rule, breach.what)?;
            for call in &breach.calls {
                let code = call.code.as_deref().unwrap_or("no answer");
                let log = call.log.iter().map(|log| format!(" of {}", log.display())).collect::<String>();
                writeln!(f, "  #{}{log} {} {} -> {code}", call.call, call.rpc, call.request)?;
            }
        }
        write!(f, "\n{} calls, {} breaches", self.calls, self.breaches.len())
    }
}
