//! What doctor has found, and how it is printed.

use std::fmt::Write;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::output::plain;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Severity {
    Error,
    Warning,
    Note,
    Ok,
}

impl Severity {
    fn as_str(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Warning => "warning",
            Self::Note => "note",
            Self::Ok => "ok",
        }
    }
}

#[derive(Debug, Serialize, Deserialize)]
pub struct Finding {
    pub severity: Severity,
    /// The subject: a unit, a plugin, a mount, a file.
    pub subject: String,
    pub found: String,
    /// The next step. Empty: none is needed.
    #[serde(rename = "do")]
    pub remedy: String,
}

#[derive(Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Report {
    findings: Vec<Finding>,
}

impl Report {
    fn add(&mut self, severity: Severity, subject: &str, found: &str, remedy: &str) {
        let [subject, found, remedy] = [subject, found, remedy].map(str::to_owned);
        self.findings.push(Finding { severity, subject, found, remedy });
    }

    pub fn error(&mut self, subject: &str, found: &str, remedy: &str) {
        self.add(Severity::Error, subject, found, remedy);
    }

    pub fn warning(&mut self, subject: &str, found: &str, remedy: &str) {
        self.add(Severity::Warning, subject, found, remedy);
    }

    pub fn note(&mut self, subject: &str, found: &str, remedy: &str) {
        self.add(Severity::Note, subject, found, remedy);
    }

    pub fn append(&mut self, mut other: Report) {
        self.findings.append(&mut other.findings);
    }

    pub fn ok(&mut self, subject: &str, found: &str) {
        self.add(Severity::Ok, subject, found, "");
    }

    /// Returns how many findings need something to be done.
    pub fn len(&self) -> usize {
        self.findings.iter().filter(|finding| finding.severity != Severity::Ok).count()
    }

    pub fn errors(&self) -> usize {
        self.count(Severity::Error)
    }

    fn count(&self, severity: Severity) -> usize {
        self.findings.iter().filter(|finding| finding.severity == severity).count()
    }

    /// Puts errors first. Findings of a severity stay in their order.
    pub fn sort(&mut self) {
        self.findings.sort_by_key(|finding| finding.severity);
    }

    fn shown(&self, verbose: bool) -> impl Iterator<Item = &Finding> {
        self.findings.iter().filter(move |finding| verbose || finding.severity != Severity::Ok)
    }

    pub fn text(&self, verbose: bool) -> String {
        let mut text = String::new();
        for Finding { severity, subject, found, remedy } in self.shown(verbose) {
            let _ = writeln!(text, "{:<8} {}", severity.as_str(), plain(&format!("{subject}: {found}")));
            if !remedy.is_empty() {
                let _ = writeln!(text, "{:<8} do: {}", "", plain(remedy));
            }
        }
        let counts =
            [(Severity::Error, "errors"), (Severity::Warning, "warnings"), (Severity::Note, "notes")];
        let counts = counts.map(|(severity, word)| format!("{} {word}", self.count(severity)));
        let _ = writeln!(text, "{}, {} checks in order.", counts.join(", "), self.count(Severity::Ok));
        text
    }

    pub fn json(&self, has_csid: bool, verbose: bool) -> Value {
        json!({
            "reachable": has_csid,
            "errors": self.count(Severity::Error),
            "warnings": self.count(Severity::Warning),
            "notes": self.count(Severity::Note),
            "findings": self.shown(verbose).collect::<Vec<_>>(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_come_first_and_ok_is_verbose() {
        let mut report = Report::default();
        report.note("a", "noted", "");
        report.ok("b", "in order");
        report.error("c\u{1b}", "is wrong", "`mend it`");
        report.sort();
        let due = "error    c\u{fffd}: is wrong\n         do: `mend it`\nnote     a: noted\n\
                   1 errors, 0 warnings, 1 notes, 1 checks in order.\n";
        assert_eq!(report.text(false), due);
        assert!(report.text(true).contains("ok       b: in order\n"));
        let value = report.json(false, false);
        assert_eq!((&value["reachable"], &value["errors"]), (&json!(false), &json!(1)));
        assert_eq!(
            value["findings"][0],
            json!({"severity": "error", "subject": "c\u{1b}", "found": "is wrong", "do": "`mend it`"})
        );
        assert_eq!(value["findings"].as_array().map(Vec::len), Some(2));
    }
}
