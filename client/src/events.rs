//! csid's events in order, without holes: from signals, and from GetEvents where one is missing. State: a cursor.

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

/// An item of a [`Follower`].
#[derive(Debug)]
pub enum News {
    /// The next event.
    Event(Event),
    /// Events between the last one and the next are lost, because csid keeps only so many.
    Gap,
}

/// A reader of csid's events from a cursor on.
pub struct Follower {
    client: Client,
    signals: broadcast::Receiver<Event>,
    pump: JoinHandle<()>,
    /// The sequence of the last event that was returned.
    cursor: u64,
    ready: VecDeque<News>,
    caught_up: bool,
}

impl Client {
    /// Opens a reader of the events after sequence number `since`. `None`: only events from now on.
    ///
    /// ```no_run
    /// use csid_client::{Client, News};
    ///
    /// # async fn example(client: Client) -> csid_client::Result<()> {
    /// let mut events = client.follow(None).await?;
    /// loop {
    ///     match events.next().await? {
    ///         News::Event(event) => println!("{} {}", event.kind, event.subject),
    ///         News::Gap => println!("events were lost: list the objects again"),
    ///     }
    /// }
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// Those of every call: see the [crate's errors](crate#errors).
    pub async fn follow(&self, since: Option<u64>) -> Result<Follower> {
        let failed = |source| Error::Bus { member: "Event".to_owned(), source };
        // The private connection's signals have no sender, and csid is the only peer.
        let mut rule =
            MatchRule::builder().msg_type(Type::Signal).path(PATH).interface(MANAGER).member("Event");
        if self.connection.is_bus() {
            rule = rule.sender(NAME);
        }
        let rule = rule.build().map_err(failed)?;
        let mut stream = MessageStream::for_match_rule(rule, &self.connection, None).await.map_err(failed)?;
        let (sender, signals) = broadcast::channel(QUEUE);
        // A stream that is not read blocks its whole connection, so a task reads it even while the follower
        // is idle.
        let pump = tokio::spawn(async move {
            while let Some(Ok(message)) = stream.next().await {
                if let Ok(event) = message.body().deserialize::<Event>()
                    && sender.send(event).is_err()
                {
                    break;
                }
            }
        });
        // Subscribe before the query, so that an event in between arrives twice and is not lost.
        let (cursor, caught_up) = match since {
            Some(since) => (since, false),
            None => (self.manager().await?.event_sequence, true),
        };
        Ok(Follower { client: self.clone(), signals, pump, cursor, ready: VecDeque::new(), caught_up })
    }
}

impl Follower {
    /// Returns the sequence number of the last event that was returned: where to continue after a lost
    /// connection.
    pub fn cursor(&self) -> u64 {
        self.cursor
    }

    /// Waits for the next event. The future may be dropped and the call repeated.
    ///
    /// # Errors
    ///
    /// [`Error::Disconnected`] if the connection ended, and those of [`Client::get_events`]. An error ends the
    /// follower.
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
                // On the bus any client can send this connection a signal, which is therefore only a hint to ask csid.
                Ok(event) if event.sequence == self.cursor + 1 && !self.client.connection.is_bus() => {
                    self.ready.push_back(News::Event(event));
                }
                // An event is missing, or the numbers have a gap after csid was killed.
                Ok(_) | Err(broadcast::error::RecvError::Lagged(_)) => self.caught_up = false,
                Err(broadcast::error::RecvError::Closed) => {
                    return Err(Error::Disconnected("no more events".to_owned()));
                }
            }
        }
    }

    /// Reads one page after the cursor. Returns whether it was empty. csid may return fewer events than requested.
    async fn fetch(&mut self) -> Result<bool> {
        let (events, gap) = self.client.get_events(self.cursor, PAGE).await?;
        // A cursor above csid's last sequence number belongs to another journal. Read this one from its
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
