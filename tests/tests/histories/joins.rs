//! When hosts have sessions with servers, by etcd itself. The checker bounds by that how long the servers may not know that a host has let a volume go.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use csid_etcd::api::RangeRequest;
use csid_etcd::api::kv_client::KvClient;
use tokio::task::JoinHandle;
use tonic::transport::{Channel, Endpoint};

use crate::history::{History, Line};

const SESSIONS: &[u8] = b"/csid/v1/session/";
/// The first key that is no session's.
const END: &[u8] = b"/csid/v1/session0";
/// The time between two looks.
const PAUSE: Duration = Duration::from_millis(250);
/// How long etcd may take for an answer. Without one no host is known to have a session.
const ANSWER: Duration = Duration::from_secs(1);

/// The sessions of each host: the server and the revision of the row. A row that was there in two looks was there in between.
type Sessions = BTreeMap<String, BTreeSet<(String, i64)>>;

/// Starts to write into the history when each host begins and ceases to have a session.
pub fn watch(endpoint: String, history: Arc<History>) -> JoinHandle<()> {
    let endpoint = Endpoint::from_shared(endpoint).expect("an endpoint").timeout(ANSWER);
    let mut kv = KvClient::new(endpoint.connect_lazy());
    tokio::spawn(async move {
        let (mut before, mut looked) = (Sessions::new(), history.now());
        loop {
            let begun = history.now();
            let now = sessions(&mut kv).await.unwrap_or_default();
            changes(&before, &now, looked, history.now()).iter().for_each(|line| history.write(line));
            (before, looked) = (now, begun);
            tokio::time::sleep(PAUSE).await;
        }
    })
}

/// Reads the sessions in etcd. `None`: it has not answered.
async fn sessions(kv: &mut KvClient<Channel>) -> Option<Sessions> {
    let ask = RangeRequest { key: SESSIONS.into(), range_end: END.into(), ..RangeRequest::default() };
    let mut sessions = Sessions::new();
    for row in kv.range(ask).await.ok()?.into_inner().kvs {
        let key = String::from_utf8_lossy(&row.key[SESSIONS.len()..]).into_owned();
        let (host, server) = key.split_once('/')?;
        sessions.entry(host.to_owned()).or_default().insert((server.to_owned(), row.create_revision));
    }
    Some(sessions)
}

/// Returns the lines of what has changed between two looks, of which the first began at `looked`. A host has left at the first one, and has joined at the
/// second one: it had a session from then on for certain.
fn changes(before: &Sessions, now: &Sessions, looked: i64, at: i64) -> Vec<Line> {
    let none = BTreeSet::new();
    let of = |sessions: &'_ Sessions, host: &String| sessions.get(host).unwrap_or(&none).clone();
    let hosts: BTreeSet<&String> = before.keys().chain(now.keys()).collect();
    let mut lines = Vec::new();
    for host in hosts {
        let (had, has) = (of(before, host), of(now, host));
        if had.intersection(&has).next().is_some() {
            continue;
        }
        if !had.is_empty() {
            lines.push(Line { who: host.clone(), ..Line::event("left", looked) });
        }
        if !has.is_empty() {
            lines.push(Line { who: host.clone(), ..Line::event("joined", at) });
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn session_that_goes_on_is_no_change() {
        let sessions = |rows: &[(&str, i64)]| {
            let mut sessions = Sessions::new();
            for (server, revision) in rows {
                sessions.entry("n1".to_owned()).or_default().insert(((*server).to_owned(), *revision));
            }
            sessions
        };
        for (before, now, due) in [
            (&[][..], &[][..], &[][..]),
            (&[], &[("s0", 5)], &[("joined", 20)]),
            (&[("s0", 5)], &[("s0", 5)], &[]),
            (&[("s0", 5)], &[], &[("left", 10)]),
            // The next session begins before the row of the last one ends.
            (&[("s0", 5)], &[("s0", 5), ("s1", 7)], &[]),
            (&[("s0", 5), ("s1", 7)], &[("s1", 7)], &[]),
            (&[("s0", 5)], &[("s1", 7)], &[("left", 10), ("joined", 20)]),
            // A row of the same server that was made in between.
            (&[("s0", 5)], &[("s0", 9)], &[("left", 10), ("joined", 20)]),
        ] {
            let lines = changes(&sessions(before), &sessions(now), 10, 20);
            let lines: Vec<_> =
                lines.iter().map(|line| (line.call.as_str(), line.start, line.who.as_str())).collect();
            let due: Vec<_> = due.iter().map(|(call, at)| (*call, *at, "n1")).collect();
            assert_eq!(lines, due, "{before:?} {now:?}");
        }
    }
}
