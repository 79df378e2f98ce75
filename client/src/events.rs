//! csid's events in order, without holes: from signals, and from GetEvents where one is missing. State: a journal and a cursor.

use std::collections::VecDeque;

use futures_util::{StreamExt, stream::select_all};
use tokio::{sync::broadcast, task::JoinHandle};
use zbus::{MatchRule, Message, MessageStream, message::Type};

use crate::{
    client::{Client, MANAGER, NAME, PATH},
    error::{Error, Result},
    rows::Event,
};

/// Signals that wait for a slow reader. Older ones are dropped and fetched again.
const QUEUE: usize = 256;
const PAGE: u32 = 256;
const BUS: &str = "org.freedesktop.DBus";
/// The bus' signal of a name that has another owner.
const OWNER: &str = "NameOwnerChanged";

/// An item of a [`Follower`].
#[derive(Debug)]
pub enum News {
    /// The next event.
    Event(Event),
    /// Events between the last one and the next are lost: csid keeps only so many, or has another journal.
    Gap,
}

/// What the connection receives without a call.
#[derive(Clone)]
enum Signal {
    Event(Event),
    /// A csid has come to the bus. Its earlier events had no signal there.
    Started,
}

impl Signal {
    /// Returns `None` for a message that is neither.
    fn read(message: &Message) -> Option<Self> {
        let body = message.body();
        if message.header().member().is_some_and(|member| member.as_str() == OWNER) {
            let (_, _, owner): (String, String, String) = body.deserialize().ok()?;
            return (!owner.is_empty()).then_some(Signal::Started);
        }
        body.deserialize().ok().map(Signal::Event)
    }
}

/// A reader of csid's events from a cursor on.
pub struct Follower {
    client: Client,
    signals: broadcast::Receiver<Signal>,
    pump: JoinHandle<()>,
    journal: String,
    /// The sequence of the last event that was returned.
    cursor: u64,
    /// The sequence of the last signal. A smaller one is of another journal.
    signalled: u64,
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
        // Subscribe before the query, so that an event in between arrives twice and is not lost.
        let mut stream = select_all(self.signals().await?);
        let (sender, signals) = broadcast::channel(QUEUE);
        // A stream that is not read blocks its whole connection, so a task reads it even while the follower
        // is idle.
        let pump = tokio::spawn(async move {
            while let Some(Ok(message)) = stream.next().await {
                if let Some(signal) = Signal::read(&message)
                    && sender.send(signal).is_err()
                {
                    break;
                }
            }
        });
        let mut follower = Follower {
            client: self.clone(),
            signals,
            pump,
            journal: String::new(),
            cursor: 0,
            signalled: 0,
            ready: VecDeque::new(),
            caught_up: since.is_none(),
        };
        let now = self.manager().await?;
        follower.journal = now.journal_id;
        follower.cursor = since.unwrap_or(now.event_sequence);
        follower.signalled = follower.cursor;
        Ok(follower)
    }

    /// Opens a reader of the events after sequence number `since` of a journal. If csid has another journal by now,
    /// the reader begins with a gap, and goes on with the first event.
    ///
    /// # Errors
    ///
    /// Those of every call: see the [crate's errors](crate#errors).
    pub async fn follow_journal(&self, journal: &str, since: u64) -> Result<Follower> {
        let mut follower = self.follow(Some(since)).await?;
        if follower.journal != journal {
            follower.begin(follower.journal.clone());
        }
        Ok(follower)
    }

    /// Subscribes to csid's events, and on the bus to its starts.
    async fn signals(&self) -> Result<Vec<MessageStream>> {
        let signal = || MatchRule::builder().msg_type(Type::Signal);
        let events = signal().path(PATH).interface(MANAGER).member("Event");
        let rules = match self.connection.is_bus() {
            true => vec![events.sender(NAME), signal().sender(BUS).interface(BUS).member(OWNER).arg(0, NAME)],
            // The private connection's signals have no sender, and csid is the only peer.
            false => vec![events],
        };
        let mut streams = Vec::new();
        for rule in rules {
            let failed = |source| Error::Bus { member: "Event".to_owned(), source };
            let rule = rule.build().map_err(failed)?;
            streams.push(MessageStream::for_match_rule(rule, &self.connection, None).await.map_err(failed)?);
        }
        Ok(streams)
    }
}

impl Follower {
    /// Returns the sequence number of the last event that was returned: where to continue after a lost
    /// connection. 0 after a gap that another journal made.
    pub fn cursor(&self) -> u64 {
        self.cursor
    }

    /// Returns the ID of the journal that the cursor is of. [`Client::follow_journal`] continues with both.
    pub fn journal(&self) -> &str {
        &self.journal
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
                Ok(Signal::Event(event)) => self.take(event),
                // An event may be missing.
                Ok(Signal::Started) | Err(broadcast::error::RecvError::Lagged(_)) => self.caught_up = false,
                Err(broadcast::error::RecvError::Closed) => {
                    return Err(Error::Disconnected("no more events".to_owned()));
                }
            }
        }
    }

    /// Takes the event of a signal, or asks csid for it.
    fn take(&mut self, event: Event) {
        let goes_back = event.sequence <= std::mem::replace(&mut self.signalled, event.sequence);
        if event.sequence <= self.cursor && !goes_back {
            return;
        }
        // On the bus any client can send this connection a signal, which is therefore only a hint to ask csid.
        if event.sequence == self.cursor + 1 && !self.client.connection.is_bus() {
            self.ready.push_back(News::Event(event));
        } else {
            // An event is missing, the numbers have a gap after csid was killed, or csid has another journal.
            self.caught_up = false;
        }
    }

    /// Reads one page after the cursor. Returns whether it was empty. csid may return fewer events than requested.
    async fn fetch(&mut self) -> Result<bool> {
        let (events, gap) = self.client.get_events(self.cursor, PAGE).await?;
        if (gap || self.client.connection.is_bus()) && self.begins().await? {
            return Ok(false);
        }
        if gap {
            self.ready.push_back(News::Gap);
        }
        let last = events.is_empty();
        self.ready.extend(events.into_iter().map(News::Event));
        Ok(last)
    }

    /// Begins with csid's journal if that is another one, and returns whether it is. Has to be called after a page: on the bus another
    /// csid may have returned the page.
    async fn begins(&mut self) -> Result<bool> {
        let now = self.client.manager().await?;
        // A copy with fewer events than were read is another journal, too.
        let is_another = now.journal_id != self.journal || now.event_sequence < self.cursor;
        if is_another {
            self.begin(now.journal_id);
        }
        Ok(is_another)
    }

    /// Begins with a journal, after a gap.
    fn begin(&mut self, journal: String) {
        self.journal = journal;
        self.cursor = 0;
        self.caught_up = false;
        self.ready.push_back(News::Gap);
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        self.pump.abort();
    }
}
