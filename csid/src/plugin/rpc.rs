//! Sends one RPC to a plugin: with its deadline, the class of its failure (CSI rule 36), and the plugin's message without secrets.

use std::collections::BTreeMap;
use std::error::Error as _;
use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tonic::transport::Channel;
use tonic::{Code, Request, Response, Status};
use zeroize::Zeroizing;

use crate::error::{Error, Kind, Obstacle};
use crate::plugin::channel::NotConnected;
use crate::plugin::common::Common;
use crate::plugin::rpc_outcome::{Class, RpcKind, RpcOutcome, is_broken, outcome};
use crate::plugin::wire::{SentStatus, Wire};
use crate::secret::{self, Secrets};

/// The longest message of a plugin that csid passes on.
const MESSAGE_LIMIT: usize = 2048;
/// CSI rule 11.
pub(super) const STRING_BYTES: usize = 128;
pub(super) const MAP_BYTES: usize = 4096;

/// Why an RPC failed. `message` is scrubbed of the call's secrets, context values and mount flags, bounded,
/// and without control characters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RpcError {
    pub plugin: Arc<str>,
    pub rpc: &'static str,
    pub code: Code,
    pub message: String,
    pub class: Class,
    /// False where the time-out ended the call, or its connection broke.
    pub answered: bool,
    /// Whether csid was stopping the plugin; the caller's error says so. `class` has what is known of the call's effect.
    pub stopping: bool,
}

impl fmt::Display for RpcError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}: {}", self.rpc, code_name(self.code), self.message)
    }
}

impl std::error::Error for RpcError {}

impl From<RpcError> for Error {
    fn from(error: RpcError) -> Self {
        let kind = match error.class {
            _ if error.stopping => Kind::PluginShutdown,
            Class::NotSent => Kind::PluginUnavailable,
            Class::Shutdown => Kind::PluginShutdown,
            Class::Forbidden => Kind::NotAuthorized,
            Class::Transient | Class::Refused | Class::Unknown | Class::Unimplemented => Kind::PluginError,
        };
        Error::new(kind, error.to_string()).with(|details| {
            details.rpc = Some(error.rpc);
            details.obstacle = (error.class == Class::Shutdown).then_some(Obstacle::Stopping);
            details.grpc_code = Some(error.code as u32);
            details.plugin = Some(error.plugin.to_string());
            details.retryable = error.class.is_retryable();
            details.plugin_message = Some(error.message);
        })
    }
}

impl RpcError {
    /// Returns whether the plugin refused because of the volume's state.
    pub fn is_failed_precondition(&self) -> bool {
        self.code == Code::FailedPrecondition
    }

    /// Returns what csid does after this error of an RPC of this kind.
    pub fn outcome(&self, kind: RpcKind) -> RpcOutcome {
        outcome(self.class, self.code, kind)
    }

    /// Returns whether the connection broke during the call.
    pub fn is_broken(&self) -> bool {
        is_broken(self.class, self.code)
    }

    pub fn into_error(self) -> Error {
        self.into()
    }

    fn new(peer: &Peer, rpc: &'static str, status: &Status, sent: &SentStatus, hidden: Hidden) -> Self {
        let is_plugins = sent.is(status);
        let class = class(status, is_plugins);
        let cause = first_cause(status);
        let answered = cause.is_none();
        let (code, message) = match (class, cause) {
            (Class::Unknown, Some(cause)) => {
                (status.code(), presentable(&format!("the connection to the plugin broke: {cause}")))
            }
            // tonic's code for that would look like the plugin's.
            (Class::Unknown, None) if !is_plugins => {
                let text = format!("csid cannot read the plugin's answer: {}", status.message());
                (Code::Internal, hidden.clean(&text))
            }
            _ => (status.code(), hidden.clean(status.message())),
        };
        RpcError { answered, ..peer.error(rpc, code, message, class) }
    }
}

/// The gRPC name of a code, e.g. `FAILED_PRECONDITION`.
pub fn code_name(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "CANCELLED",
        Code::Unknown => "UNKNOWN",
        Code::InvalidArgument => "INVALID_ARGUMENT",
        Code::DeadlineExceeded => "DEADLINE_EXCEEDED",
        Code::NotFound => "NOT_FOUND",
        Code::AlreadyExists => "ALREADY_EXISTS",
        Code::PermissionDenied => "PERMISSION_DENIED",
        Code::ResourceExhausted => "RESOURCE_EXHAUSTED",
        Code::FailedPrecondition => "FAILED_PRECONDITION",
        Code::Aborted => "ABORTED",
        Code::OutOfRange => "OUT_OF_RANGE",
        Code::Unimplemented => "UNIMPLEMENTED",
        Code::Internal => "INTERNAL",
        Code::Unavailable => "UNAVAILABLE",
        Code::DataLoss => "DATA_LOSS",
        Code::Unauthenticated => "UNAUTHENTICATED",
    }
}

/// Returns the causes of a status that was made on this side. A status that came over the wire has none, nor has one for an answer that
/// cannot be read.
fn causes(status: &Status) -> impl Iterator<Item = &(dyn std::error::Error + 'static)> {
    std::iter::successors(status.source(), |error| {
        let error = *error;
        error.source()
    })
}

/// Returns the first cause of a status that was made on this side. `None`: an answer came over the wire.
pub(super) fn first_cause(status: &Status) -> Option<String> {
    causes(status).last().map(ToString::to_string)
}

/// Returns what is known of the effect of an RPC that failed so. `is_plugins`: the plugin sent this status. Only then its code is an answer.
fn class(status: &Status, is_plugins: bool) -> Class {
    if causes(status).any(|error| error.is::<NotConnected>()) {
        return Class::NotSent;
    }
    if status.source().is_some() || !is_plugins {
        return Class::Unknown;
    }
    Class::of_answer(status.code())
}

/// The values that are withheld from a plugin's message, which may quote this request or an earlier one.
#[derive(Default)]
pub(super) struct Hidden {
    values: Vec<Zeroizing<String>>,
    all: bool,
}

/// The text in place of a plugin's message that may contain a secret.
const WITHHELD: &str =
    "[the plugin's words may repeat secrets that csid does not have here: see the plugin's log]";

impl Hidden {
    /// The secrets of a call; `forgotten`: there may be others, which are not at hand, so that everything is hidden.
    pub fn of(secrets: Option<&Secrets>, forgotten: bool) -> Self {
        let mut hidden = Hidden { all: forgotten, ..Hidden::default() };
        secrets.into_iter().flat_map(Secrets::values).for_each(|value| hidden.secret(value));
        hidden
    }

    pub fn and<'a>(mut self, opaque: impl IntoIterator<Item = &'a String>) -> Self {
        opaque.into_iter().for_each(|value| self.opaque(value));
        self
    }

    /// Hide a secret, however short.
    fn secret(&mut self, value: &str) {
        // A file's value may be repeated without its last newline.
        for value in [value, value.trim()].into_iter().filter(|value| !value.is_empty()) {
            self.as_spelled(value);
        }
        // A line of up to three bytes is no secret worth a garbled message.
        value.lines().map(str::trim).filter(|line| line.len() > 3).for_each(|line| self.as_spelled(line));
    }

    /// Hides what may be a secret: a context's value or a mount flag, and what follows a `=` in it, of `a=b,c=d` each.
    fn opaque(&mut self, value: &str) {
        let whole = [value].into_iter().chain(value.lines().map(str::trim));
        whole.filter(|value| secret::may_be_one(value)).for_each(|value| self.as_spelled(value));
        for part in [value].into_iter().chain(value.split(',')) {
            let Some((key, value)) = part.split_once('=') else { continue };
            if secret::may_be_one(value) || (value.len() > 3 && secret::is_named_by(key)) {
                self.as_spelled(value);
            }
        }
    }

    /// As it is, and as JSON and Go spell it; Go's JSON escapes what means something in HTML, too.
    fn as_spelled(&mut self, value: &str) {
        // A byte becomes six at most: neither grows, so that no copy stays behind.
        let most = 6 * value.len() + 2;
        let mut json = Zeroizing::new(Vec::with_capacity(most));
        let is_written = serde_json::to_writer(&mut *json, value).is_ok();
        let json = std::str::from_utf8(&json).ok().filter(|_| is_written).unwrap_or("\"\"");
        let json = &json[1..json.len() - 1];
        let mut html = Zeroizing::new(String::with_capacity(most));
        for character in json.chars() {
            match character {
                '<' => html.push_str("\\u003c"),
                '>' => html.push_str("\\u003e"),
                '&' => html.push_str("\\u0026"),
                plain => html.push(plain),
            }
        }
        self.values.extend([value, json].map(|text| Zeroizing::new(text.to_owned())));
        self.values.push(html);
    }

    /// A plugin's text that may be shown.
    pub fn clean(&self, text: &str) -> String {
        presentable(&self.scrub(text))
    }

    /// All that is hidden is found in the text as it came, so that overlapping values leave no rest of each
    /// other.
    fn scrub(&self, text: &str) -> String {
        if self.all {
            return WITHHELD.to_owned();
        }
        let mut spans: Vec<(usize, usize)> = self
            .values
            .iter()
            .flat_map(|v| text.match_indices(v.as_str()).map(|(at, found)| (at, at + found.len())))
            .collect();
        spans.sort_unstable();
        let mut clean = String::with_capacity(text.len());
        let mut done = 0;
        for (from, to) in spans {
            if from >= done {
                clean.push_str(&text[done..from]);
                clean.push_str("[redacted]");
            }
            done = done.max(to);
        }
        clean.push_str(&text[done..]);
        clean
    }
}

/// Secrets as an RPC carries them.
pub(super) fn sent(secrets: Option<&Secrets>) -> BTreeMap<String, String> {
    secrets.map(Secrets::for_rpc).unwrap_or_default()
}

/// A plugin's text on one line, bounded.
pub(super) fn presentable(text: &str) -> String {
    crate::error::presentable(text, MESSAGE_LIMIT)
}

/// The deadline of one RPC: csid.toml's, shared by all plugins and changed by a reload, or the plugin's own.
#[derive(Clone)]
pub(super) struct Limit(Arc<AtomicU64>);

impl Limit {
    pub fn new(limit: Duration) -> Self {
        let new = Limit(Arc::new(AtomicU64::new(0)));
        new.set(limit);
        new
    }

    pub fn set(&self, limit: Duration) {
        self.0.store(u64::try_from(limit.as_millis()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    pub fn get(&self) -> Duration {
        Duration::from_millis(self.0.load(Ordering::Relaxed))
    }
}

/// Whether csid stops the plugin's process: a number that is odd meanwhile, and another one after each stop.
#[derive(Clone, Default)]
pub(super) struct Stops(Arc<AtomicU64>);

impl Stops {
    pub fn begin(&self) {
        self.0.fetch_or(1, Ordering::AcqRel);
    }

    /// Another process is started, or this one goes on.
    pub fn end(&self) {
        if self.0.load(Ordering::Acquire) % 2 == 1 {
            self.0.fetch_add(1, Ordering::AcqRel);
        }
    }

    fn number(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }
}

/// A plugin to call.
#[derive(Clone)]
pub(super) struct Peer {
    pub id: Arc<str>,
    pub channel: Channel,
    pub limit: Limit,
    /// csid is stopping.
    pub closed: Arc<AtomicBool>,
    pub stops: Stops,
    pub common: Arc<Common>,
}

pub(super) fn map_bytes(map: &BTreeMap<String, String>) -> usize {
    map.iter().map(|(key, value)| key.len() + value.len()).sum()
}

impl Peer {
    /// An answer that is too long is taken all the same: CSI rule 11 binds the plugin, not csid.
    pub fn warn_if_long(&self, field: &str, bytes: usize, limit: usize) {
        if bytes > limit {
            let id = &self.id;
            tracing::warn!(plugin = %id, field, bytes, limit, "plugin {id}: its {field} is longer than CSI allows");
        }
    }

    /// Returns what to hide of a call about the plugin itself. It gets no secret, and may repeat one that it had.
    pub fn hidden(&self) -> Hidden {
        Hidden::of(None, self.common.had_secrets.load(Ordering::Acquire))
    }

    pub fn error(&self, rpc: &'static str, code: Code, message: String, class: Class) -> RpcError {
        RpcError { plugin: self.id.clone(), rpc, code, message, class, answered: true, stopping: false }
    }

    /// The same, of a plugin that csid was stopping meanwhile, unless that has had its say.
    fn stopping(error: RpcError) -> RpcError {
        let message = match error.class {
            Class::NotSent => "the plugin is being stopped, so it was not asked",
            Class::Transient | Class::Unknown => "the plugin was stopped before it had answered",
            Class::Refused | Class::Unimplemented | Class::Shutdown | Class::Forbidden => return error,
        };
        RpcError { message: message.to_owned(), stopping: true, ..error }
    }

    /// Send one request; an answer in time, or why not. Dropping the future resets the stream, which cancels
    /// the RPC at the plugin.
    pub async fn call<Q, R, F>(
        &self,
        rpc: &'static str,
        deadline: Instant,
        request: Q,
        hidden: impl FnOnce() -> Hidden,
        send: impl FnOnce(Wire, Request<Q>) -> F,
    ) -> Result<R, RpcError>
    where
        F: Future<Output = Result<Response<R>, Status>>,
    {
        let error = |code, message: String, class| self.error(rpc, code, message, class);
        if self.closed.load(Ordering::Acquire) {
            return Err(error(Code::Cancelled, "csid is stopping".into(), Class::Shutdown));
        }
        let stops = self.stops.number();
        if stops % 2 == 1 {
            return Err(Self::stopping(error(Code::Unavailable, String::new(), Class::NotSent)));
        }
        let start = Instant::now();
        let allowed = deadline.saturating_duration_since(start).min(self.limit.get());
        if allowed.is_zero() {
            return Err(error(
                Code::DeadlineExceeded,
                "the deadline ended before the call".into(),
                Class::NotSent,
            ));
        }
        let mut request = Request::new(request);
        request.set_timeout(allowed);
        let mut counted = self.common.tally.begin(rpc, start);
        // tonic's future is large, and each future that awaits it would be as large.
        let wire = Wire::of(self.channel.clone());
        let sent = wire.sent_status();
        let answering = Box::pin(send(wire, request));
        let answer = tokio::time::timeout(allowed, answering).await;
        let elapsed = start.elapsed();
        let failed = match answer {
            Ok(Ok(response)) => {
                counted.code = Code::Ok;
                tracing::debug!(plugin = %self.id, rpc, ?elapsed, "answered");
                return Ok(response.into_inner());
            }
            // tonic's own clock may be the first to ring.
            Ok(Err(status)) if elapsed < allowed || status.source().is_none() => {
                let failed = RpcError::new(self, rpc, &status, &sent, hidden());
                // The plugin's gRPC library has the same deadline, and its clock may be the first to ring.
                let is_late = failed.code == Code::DeadlineExceeded && elapsed * 10 >= allowed * 9;
                RpcError { answered: failed.answered && !is_late, ..failed }
            }
            Ok(Err(_)) | Err(_) => {
                let message = format!("the plugin did not answer within {allowed:.1?}");
                RpcError { answered: false, ..error(Code::DeadlineExceeded, message, Class::Unknown) }
            }
        };
        counted.code = failed.code;
        let failed = if self.stops.number() == stops { failed } else { Self::stopping(failed) };
        tracing::debug!(plugin = %self.id, rpc, ?elapsed, code = code_name(failed.code), "failed");
        Err(failed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::secret::freed::{self, SECRET};

    #[test]
    fn overlapping_secrets_are_redacted() {
        let mut hidden = Hidden::default();
        hidden.secret("hunter2");
        hidden.secret("s");
        hidden.opaque("login=hunter2");
        hidden.opaque("yes");
        hidden.opaque("password=opensesame");
        let scrub = |text: &str| hidden.scrub(text);
        assert_eq!(scrub("with login=hunter2 no"), "with login=[redacted] no");
        assert_eq!(scrub("hunter2hunter2"), "[redacted][redacted]");
        assert_eq!(scrub("yes: it"), "ye[redacted]: it");
        assert_eq!(scrub("bad opensesame"), "bad [redacted]");
        let mut hidden = Hidden::default();
        hidden.opaque("1a2b3cdef");
        hidden.secret("defghi");
        assert_eq!(hidden.scrub("x1a2b3cdefghix"), "x[redacted]x");
    }

    #[test]
    fn parts_and_quoted_secrets_are_redacted() {
        let mut hidden = Hidden::default();
        hidden.secret("hunter2\n");
        hidden.secret("-----BEGIN KEY-----\nMIIEow\r\nab\n");
        hidden.secret("q\"u<o\te");
        hidden.opaque("vers=3,password=opensesame,sec=krb5");
        hidden.opaque("l1ne-1-a\nl1ne-2-b");
        for (said, clean) in [
            ("login hunter2 failed", "login [redacted] failed"),
            ("bad key: MIIEow", "bad key: [redacted]"),
            ("an ab is too short a line", "an ab is too short a line"),
            (r#"{"key":"q\"u<o\te"}"#, r#"{"key":"[redacted]"}"#),
            (r#"{"key":"q\"u\u003co\te"}"#, r#"{"key":"[redacted]"}"#),
            (r"pem -----BEGIN KEY-----\nMIIEow\r\nab\n end", "pem [redacted] end"),
            ("unknown option opensesame", "unknown option [redacted]"),
            ("after krb5, l1ne-2-b", "after krb5, [redacted]"),
        ] {
            assert_eq!(hidden.scrub(said), clean);
        }
    }

    #[test]
    fn plain_values_are_not_redacted() {
        let values = [
            "true",
            "readOnly",
            "ReadWriteOnce",
            "nfs.example.com",
            "10.0.0.17",
            "fe80::1ff:fe23:4567",
            "nfs-server-02:2049",
            "/srv/exports/data_01",
            "nfs.example.com:/srv/exports",
            "https://vault.example.com:8200/v1",
            "10737418240",
            "20Gi",
            "fast-storage-pool",
            "noatime",
            "vers=4.1,sec=krb5,nolock",
            "/dev/disk/by-id/wwn-0x5000c500a1b2c3d4",
            "us-east-1a",
            "",
        ];
        let mut hidden = Hidden::default();
        values.iter().for_each(|value| hidden.opaque(value));
        for value in values {
            assert_eq!(hidden.scrub(&format!("`{value}` is wrong")), format!("`{value}` is wrong"));
        }
        for secret in [
            "c4n4ry-c0nt3xt-4242",
            "c4n4ry-fl4g-4242",
            "ZGVhZGJlZWY0Mg==",
            "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
            "hvs.CAESIJ1mxq",
            "5f4dcc3b5aa765d61d8327deb882cf99",
            "correct-horse-battery-staple",
            "p@ssw0rd!",
            "/9j/4AAQSkZJRgABAQ",
            "two words 17",
            "c0ffee00-1234-4abc-9def-001122334455",
            "{\"token\":1}",
        ] {
            let mut hidden = Hidden::default();
            hidden.opaque(secret);
            assert_eq!(hidden.scrub(&format!("no {secret}.")), "no [redacted].", "{secret}");
        }
        // Whose name says what it is, whatever its form.
        let mut hidden = Hidden::default();
        hidden.opaque("vers=3,password=opensesame,token=12345678");
        assert_eq!(
            hidden.scrub("vers=3,password=opensesame: 12345678"),
            "vers=3,password=[redacted]: [redacted]"
        );
    }

    #[test]
    fn hidden_values_are_wiped() {
        let document = format!("{{\"a\":\"<{SECRET}>\\n{SECRET}\\n\"}}");
        let secrets = Secrets::from_json(document.as_bytes()).unwrap();
        let found = freed::with_the_secret(|| {
            let hidden = Hidden::of(Some(&secrets), false);
            assert_eq!(hidden.scrub(SECRET), "[redacted]");
        });
        assert_eq!(found, 0);
    }

    #[test]
    fn text_of_a_plugin_is_one_bounded_line() {
        assert_eq!(presentable("a\nb\0c\u{1b}[31m"), "a b c [31m");
        let long = presentable(&"ü".repeat(5000));
        assert!(long.len() < MESSAGE_LIMIT + 8 && long.ends_with('…'));
    }

    #[test]
    fn broken_connection_leaves_the_outcome_unknown() {
        assert_eq!(class(&Status::unavailable(""), true), Class::Transient, "the plugin has answered");
        assert_eq!(class(&Status::from_error(Box::new(io_error())), false), Class::Unknown);
    }

    fn io_error() -> std::io::Error {
        std::io::ErrorKind::BrokenPipe.into()
    }
}
