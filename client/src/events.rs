//! csid's events in order, without holes: signals as they come, GetEvents where one is missing. State: a
//! cursor.

use std::collections::VecDeque;

use futures_util::StreamExt;
use tokio::{sync::broadcast, task::JoinHandle};
use zbus::{MatchRule, MessageStream, message::Type};

use crate::{
    client::{Client, MANAGER, NAME, PATH},
    error::{Error, Result},
    rows::Event,
};

/// Signals that wait for a slow reader. Older ones are dropped and fetched again.
const QUEUE: usize = 256;
const PAGE: u32 = 256;

/// What a follower tells.
#[derive(Debug)]
pub enum News {
    Event(Event),
    /// Events between the last one told and the next are lost: csid keeps only so many.
    Gap,
}

/// Reads csid's events from a cursor on.
pub struct Follower {
    client: Client,
    signals: broadcast::Receiver<Event>,
    pump: JoinHandle<()>,
    /// The last sequence told.
    cursor: u64,
    ready: VecDeque<News>,
    caught_up: bool,
}

impl Client {
    /// Events after `since`; `None`: only those from now on.
    pub async fn follow(&self, since: Option<u64>) -> Result<Follower> {
        let failed = |source| Error::Bus { member: "Event".to_owned(), source };
        // The private connection's signals have no sender, and nobody else is on it.
        let mut rule =
            MatchRule::builder().msg_type(Type::Signal).path(PATH).interface(MANAGER).member("Event");
        if self.connection.is_bus() {
            rule = rule.sender(NAME);
        }
        let rule = rule.build().map_err(failed)?;
        let mut stream = MessageStream::for_match_rule(rule, &self.connection, None).await.map_err(failed)?;
        let (sender, signals) = broadcast::channel(QUEUE);
        // A stream that is not read blocks its whole connection, so a task reads it whatever the follower
        // does.
        let pump = tokio::spawn(async move {
            while let Some(Ok(message)) = stream.next().await {
                if let Ok(event) = message.body().deserialize::<Event>()
                    && sender.send(event).is_err()
                {
                    break;
                }
            }
        });
        // Subscribed first and asked second: what happens in between comes twice, not never.
        let (cursor, caught_up) = match since {
            Some(since) => (since, false),
            None => (self.manager().await?.event_sequence, true),
        };
        Ok(Follower { client: self.clone(), signals, pump, cursor, ready: VecDeque::new(), caught_up })
    }
}

impl Follower {
    /// The last sequence told: where to go on after a lost connection.
    pub fn cursor(&self) -> u64 {
        self.cursor
    }

    /// The next event; waits for one. An error ends the follower. May be dropped and called again.
    pub async fn next(&mut self) -> Result<News> {
        loop {
            if let Some(news) = self.ready.pop_front() {
                if let News::Event(event) = &news {
                    self.cursor = event.sequence;
                }
                return Ok(news);
            }
            if !self.caught_up {
                self.caught_up = self.fetch().await?;
                continue;
            }
            match self.signals.recv().await {
                Ok(event) if event.sequence <= self.cursor => {}
                // On the bus anybody can send this connection a signal: there it is only a hint to ask.
                Ok(event) if event.sequence == self.cursor + 1 && !self.client.connection.is_bus() => {
                    self.ready.push_back(News::Event(event));
                }
                // Something is missing, or the numbers leapt as they do when csid was killed: ask.
                Ok(_) | Err(broadcast::error::RecvError::Lagged(_)) => self.caught_up = false,
                Err(broadcast::error::RecvError::Closed) => {
                    return Err(Error::Disconnected("no more events".to_owned()));
                }
            }
        }
    }

    /// One page after the cursor; whether there was nothing more. csid may give less than was asked for.
    async fn fetch(&mut self) -> Result<bool> {
        let (events, gap) = self.client.get_events(self.cursor, PAGE).await?;
        // A cursor beyond what csid has given out belongs to another journal: this one is told from its
        // beginning.
        let void = gap && events.is_empty() && self.client.manager().await?.event_sequence < self.cursor;
        if gap {
            self.ready.push_back(News::Gap);
        }
        if void {
            self.cursor = 0;
            return Ok(false);
        }
        let last = events.is_empty();
        self.ready.extend(events.into_iter().map(News::Event));
        Ok(last)
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        self.pump.abort();
    }
}
