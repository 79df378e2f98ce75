//! `csictl events`.

use std::io;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use csid_client::{Client, Error, Event, Follower, News, Target};

use crate::args::{Events, Since};
use crate::output::{self, print};

/// Events of one call.
const PAGE: u32 = 256;

pub async fn events(target: &Target, args: Events, json: bool) -> anyhow::Result<()> {
    let client = Client::connect(target).await?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let (sequence, ago) = match args.since {
        None => (None, None),
        Some(Since::Sequence(sequence)) => (Some(sequence), None),
        // The events have their times, and csid finds them by their numbers.
        Some(Since::Ago(ago)) => (Some(0), Some(now.saturating_sub(ago))),
    };
    let from_usec = ago.map_or(0, |from| u64::try_from(from.as_micros()).unwrap_or(u64::MAX));
    let printer = Printer { from_usec, volume: args.volume, json };
    if args.follow {
        return follow(target, client, sequence, &printer).await;
    }
    let mut cursor = sequence.unwrap_or(0);
    loop {
        let (events, gap) = client.get_events(cursor, PAGE).await?;
        // Without --since the user did not ask for events that csid no longer has.
        if gap && (cursor > 0 || sequence.is_some() && ago.is_none()) {
            printer.print(&News::Gap)?;
        }
        let Some(last) = events.last() else { return Ok(()) };
        cursor = last.sequence;
        for event in events {
            printer.print(&News::Event(event))?;
        }
    }
}

/// Prints events until Ctrl-C, over restarts of csid.
async fn follow(
    target: &Target,
    client: Client,
    since: Option<u64>,
    printer: &Printer,
) -> anyhow::Result<()> {
    let mut follower = client.follow(since).await?;
    loop {
        match follower.next().await {
            Ok(news) => printer.print(&news)?,
            Err(Error::Disconnected(_) | Error::NotRunning { .. }) => {
                eprintln!("csictl: connection to csid lost; reconnecting");
                follower = again(target, &follower).await?;
                eprintln!("csictl: reconnected to csid");
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// Returns a follower on a new connection, which goes on where the last one was.
async fn again(target: &Target, last: &Follower) -> anyhow::Result<Follower> {
    loop {
        tokio::time::sleep(Duration::from_millis(500)).await;
        let attempt = async {
            let client = Client::connect(target).await?;
            client.follow_journal(last.journal(), last.cursor()).await
        };
        match attempt.await {
            Ok(follower) => return Ok(follower),
            Err(Error::Connect(_) | Error::Disconnected(_) | Error::NotRunning { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// What is printed of the events.
struct Printer {
    /// Events before this time are left out, in microseconds since 1970.
    from_usec: u64,
    /// Events of other volumes, and of none, are left out. `None`: all are printed.
    volume: Option<String>,
    json: bool,
}

impl Printer {
    fn print(&self, news: &News) -> io::Result<()> {
        match (news, self.json) {
            (News::Event(event), _) if !self.prints(event) => Ok(()),
            (News::Event(event), false) => print(&output::event(event)),
            (News::Event(event), true) => print(&output::event_json(event)),
            (News::Gap, true) => print(r#"{"gap":true}"#),
            (News::Gap, false) => {
                eprintln!("csictl: a gap: csid no longer has the events in between");
                Ok(())
            }
        }
    }

    fn prints(&self, event: &Event) -> bool {
        event.realtime_usec >= self.from_usec
            && self.volume.as_ref().is_none_or(|volume| event.subject == *volume)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_before_the_time_and_of_others_are_left_out() {
        let event = |realtime_usec, subject: &str| Event {
            sequence: 1,
            realtime_usec,
            kind: "mount".to_owned(),
            subject: subject.to_owned(),
            details: Default::default(),
        };
        let all = Printer { from_usec: 0, volume: None, json: false };
        assert!(all.prints(&event(1, "prod/pg")) && all.prints(&event(1, "local")));
        let some = Printer { from_usec: 5, volume: Some("prod/pg".to_owned()), json: false };
        assert!(some.prints(&event(5, "prod/pg")));
        assert!(!some.prints(&event(4, "prod/pg")) && !some.prints(&event(9, "prod/pg-2")));
    }

    #[test]
    fn since_is_a_sequence_or_a_time() {
        assert_eq!("20".parse(), Ok(Since::Sequence(20)));
        assert_eq!("2h".parse(), Ok(Since::Ago(Duration::from_secs(7200))));
        assert!("-1".parse::<Since>().is_err() && "yesterday".parse::<Since>().is_err());
    }
}
