//! Sends csid's log to systemd's journal with its fields, or to stderr.

use std::io::IsTerminal;

use tracing_subscriber::filter::{LevelFilter, Targets};

pub(crate) fn begin() {
    use tracing_subscriber::prelude::*;
    let filter = std::env::var("CSID_LOG").ok().and_then(|filter| filter.parse().ok());
    let registry = tracing_subscriber::registry()
        .with(filter.unwrap_or_else(|| Targets::new().with_default(LevelFilter::INFO)));
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
