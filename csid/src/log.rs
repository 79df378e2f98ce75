//! Sends csid's log to systemd's journal with its fields, or to stderr.

use std::io::IsTerminal;

pub(crate) fn begin() {
    use tracing_subscriber::prelude::*;
    let filter = tracing_subscriber::EnvFilter::try_from_env("CSID_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info"));
    let registry = tracing_subscriber::registry().with(filter);
    // systemd sets JOURNAL_STREAM for a service whose output the journal takes: then fields are kept as fields.
    match std::env::var_os("JOURNAL_STREAM").and_then(|_| tracing_journald::layer().ok()) {
        Some(journal) => registry
            .with(journal.with_syslog_identifier("csid".into()).with_field_prefix(Some("CSI".into())))
            .init(),
        None => {
            let plain = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
            // A standard error that cannot be written to is no reason to panic.
            let plain = plain.log_internal_errors(false);
            registry.with(plain.with_ansi(std::io::stderr().is_terminal())).init();
        }
    }
}
