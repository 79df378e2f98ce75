//! csid-link as a program: what it says of a configuration that it cannot use. The suite `cluster` of csid-server has its connections.

use std::fs;
use std::process::Command;

/// Runs `csid-link --check-config`. Returns whether it was a success, and what it said.
fn check(text: &str, file: Option<(&str, &str)>) -> (bool, String) {
    let directory = tempfile::tempdir().unwrap();
    let config = directory.path().join("link.toml");
    fs::write(&config, text).unwrap();
    if let Some((name, text)) = file {
        fs::write(directory.path().join(name), text).unwrap();
    }
    let output = Command::new(env!("CARGO_BIN_EXE_csid-link"))
        .arg("--check-config")
        .arg("--config")
        .arg(&config)
        .arg("--credentials")
        .arg(directory.path())
        .args(["--runtime-dir", "/nonexistent"])
        .output()
        .unwrap();
    (output.status.success(), String::from_utf8(output.stderr).unwrap())
}

#[test]
fn configuration_that_cannot_be_used_is_named() {
    let good = "cluster = \"prod\"\nservers = [\"s1.example:7443\"]\n";
    for (text, file, due) in [
        (good, None, "node.pem"),
        (good, Some(("node.pem", "")), "node.pem has no certificate"),
        (
            good,
            Some(("node.pem", "-----BEGIN CERTIFICATE-----\n%%%\n-----END CERTIFICATE-----\n")),
            "node.pem",
        ),
        ("cluster = \"prod\"\nservers = [\"../s1:1\"]\n", None, "this is not HOST:PORT: \"../s1:1\""),
        ("cluster = \"prod\"\n", None, "missing field `servers`"),
    ] {
        let (good, said) = check(text, file);
        assert!(!good && said.contains(due), "{due}: {said}");
    }
}
