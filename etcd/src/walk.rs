//! A walk over all rows of a cluster, as they were at one revision. What does not fit is for its caller to find.

use std::collections::VecDeque;
use std::sync::Arc;

use csid::store::registry::{Attachment, Claim, Record, VolumeName};

use crate::change::Named;
use crate::client::Client;
use crate::error::EtcdError;
use crate::keys::{Keys, Part, RowKey};
use crate::rows::{Row, row};
use crate::stored::Stored;
use crate::wire::{KeyValue, RangeRequest};

/// Keys that are read together.
const PAGE: i64 = 500;

/// What a walk meets, in the order of etcd's keys: rows that are no volume's come before volumes.
pub enum Walked {
    /// A row, with its key in etcd.
    Row {
        key: RowKey,
        name: String,
        row: Row,
    },
    /// The row that keeps a plugin's volume to one name.
    External {
        name: String,
        /// `None`: the value cannot be read.
        of: Option<VolumeName>,
    },
    /// The row that counts the volumes of a plugin on a node.
    Used {
        name: String,
        node: String,
        plugin: String,
        row: Row,
    },
    Volume(Box<WalkedVolume>),
}

/// All keys of one volume.
pub struct WalkedVolume {
    /// What can be read of the volume.
    pub record: Record,
    /// Whether the volume has its key `head`.
    pub has_head: bool,
    /// The keys whose values cannot be read.
    pub unreadable: Vec<String>,
    keys: Keys,
}

impl WalkedVolume {
    /// Returns the key of the row that keeps the plugin's volume to this name.
    pub fn external(&self) -> String {
        text(&self.keys.external(&self.record.volume))
    }

    pub fn head(&self) -> String {
        self.key(&Part::Head)
    }

    pub fn registration(&self) -> String {
        self.key(&Part::Registration)
    }

    pub fn claim(&self, claim: &Claim) -> String {
        self.key(&Part::Claim(claim.node.clone(), claim.consumer.clone()))
    }

    pub fn attachment(&self, attachment: &Attachment) -> String {
        self.key(&Part::attachment(attachment))
    }

    fn key(&self, part: &Part) -> String {
        text(&self.keys.part(&self.record.name, part))
    }
}

/// The place of a walk.
pub struct Walk {
    keys: Keys,
    client: Arc<Client>,
    /// The first key that was not read. `None`: all were.
    next: Option<Vec<u8>>,
    end: Vec<u8>,
    /// The revision of all pages. 0: none was read.
    revision: i64,
    page: VecDeque<KeyValue>,
    /// The volume that is being read.
    volume: Option<(VolumeName, Vec<KeyValue>)>,
}

impl Walk {
    pub(crate) fn new(keys: Keys, client: Arc<Client>) -> Self {
        let (begin, end) = keys.all();
        Walk { keys, client, next: Some(begin), end, revision: 0, page: VecDeque::new(), volume: None }
    }

    /// Returns what comes next. `None`: the walk has come to its end. The first page has every change that was answered before.
    pub async fn next(&mut self) -> Result<Option<Walked>, EtcdError> {
        loop {
            while let Some(kv) = self.page.pop_front() {
                if let Some(walked) = self.take(kv) {
                    return Ok(Some(walked));
                }
            }
            let Some(key) = self.next.take() else { return Ok(self.finish_volume()) };
            let request =
                RangeRequest { key, range_end: self.end.clone(), limit: PAGE, revision: self.revision };
            let found = self.client.page("walk over all rows", request).await?;
            if self.revision == 0 {
                self.revision = i64::try_from(found.revision).unwrap_or(0);
            }
            if let Some(last) = found.kvs.last().filter(|_| found.more) {
                self.next = Some([&last.key[..], &[0]].concat());
            }
            self.page = found.kvs.into();
        }
    }

    /// Takes the next key. Returns what it ends, or what it is.
    fn take(&mut self, kv: KeyValue) -> Option<Walked> {
        if let Some((name, _)) = self.keys.read(&kv.key) {
            if let Some((of, kvs)) = &mut self.volume
                && *of == name
            {
                kvs.push(kv);
                return None;
            }
            let ended = self.finish_volume();
            self.volume = Some((name, vec![kv]));
            return ended;
        }
        let name = text(&kv.key);
        match self.keys.read_row(&kv.key) {
            Some(RowKey::Used { node, plugin }) => {
                return Some(Walked::Used { name, node, plugin, row: row(kv) });
            }
            Some(key) => return Some(Walked::Row { key, name, row: row(kv) }),
            None => {}
        }
        if self.keys.is_external(&kv.key) {
            let of: Option<Named> = serde_json::from_slice(&kv.value).ok();
            return Some(Walked::External { name, of: of.map(VolumeName::from) });
        }
        None
    }

    fn finish_volume(&mut self) -> Option<Walked> {
        let (name, kvs) = self.volume.take()?;
        let stored = Stored::read(&self.keys, &name, &kvs);
        let unreadable = stored.unreadable_parts().map(|part| text(&self.keys.part(&name, part))).collect();
        let has_head = stored.past_number.is_some();
        let record = Record { name, ..stored.record };
        Some(Walked::Volume(Box::new(WalkedVolume { record, has_head, unreadable, keys: self.keys.clone() })))
    }
}

fn text(key: &[u8]) -> String {
    String::from_utf8_lossy(key).into_owned()
}
