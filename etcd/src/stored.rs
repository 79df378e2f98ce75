//! A volume as etcd has it: its record, its past claims, and what of its values this version does not know.

use std::collections::BTreeMap;

use csid::store::registry::{Attachment, Claim, Driver, EndedAttaches, Queued, Record, VolumeName};
use csid::store::rows::VolumeKey;
use csid::store::volume_handle::VolumeHandle;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::error::EtcdError;
use crate::keys::{Keys, PAST, Part};
use crate::rest::{self, Rest};
use crate::wire::KeyValue;

/// The value of the key `head`, which each change of the volume writes.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Head {
    /// The plugin, and its id of the volume. `None`: the plugin has not answered with an id.
    pub volume: (String, Option<String>),
    /// The number of the newest past claim; 0: there is none.
    #[serde(default)]
    pub past_number: u64,
    /// The server that calls a controller for the volume. `None`: none does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver: Option<Driver>,
    /// The greatest place that the queue has had; 0: nothing has waited.
    #[serde(default, skip_serializing_if = "is_none")]
    pub serial: u64,
    /// What has ended of AttachVolume.
    #[serde(default, skip_serializing_if = "EndedAttaches::is_none")]
    pub ended_attaches: EndedAttaches,
    /// The random name of the change that wrote this.
    #[serde(default)]
    pub change: String,
}

fn is_none(serial: &u64) -> bool {
    *serial == 0
}

/// It has nothing twice: the lists have one of each volume.
#[derive(Clone)]
pub(crate) struct Stored {
    pub record: Record,
    /// The number of the newest past claim; 0: there is none. `None`: there is no head. The volume is not there, or its keys are not whole.
    pub past_number: Option<u64>,
    past: BTreeMap<u64, Claim>,
    rests: BTreeMap<Part, Rest>,
    /// Values that cannot be read, and why.
    unreadable: BTreeMap<Part, String>,
}

impl Stored {
    pub fn none(name: VolumeName) -> Self {
        Stored {
            record: Record::none(name),
            past_number: None,
            past: BTreeMap::new(),
            rests: BTreeMap::new(),
            unreadable: BTreeMap::new(),
        }
    }

    /// Reads the keys of one volume.
    pub fn read(keys: &Keys, name: &VolumeName, kvs: &[KeyValue]) -> Self {
        let mut stored = Stored::none(name.clone());
        for kv in kvs {
            if let Some((_, part)) = keys.read(&kv.key) {
                stored.put(part, kv);
            }
        }
        stored.finish();
        stored
    }

    /// Takes over the value of a key. [`Stored::finish`] has to follow the last one of a revision.
    pub fn put(&mut self, part: Part, kv: &KeyValue) {
        self.unreadable.remove(&part);
        self.rests.remove(&part);
        if let Err(why) = self.try_put(&part, kv) {
            self.unreadable.insert(part, why);
        }
    }

    fn try_put(&mut self, part: &Part, kv: &KeyValue) -> Result<(), String> {
        let revision = u64::try_from(kv.mod_revision).unwrap_or(0);
        match part {
            Part::Head => {
                let Head {
                    volume: (plugin, external_id),
                    past_number,
                    driver,
                    serial,
                    ended_attaches,
                    change: _,
                } = self.value(part, kv)?;
                self.record.volume = match external_id {
                    Some(text) => VolumeKey { plugin, handle: VolumeHandle::of(text) },
                    None => VolumeKey::creating(&plugin, ""),
                };
                self.record.driver = driver;
                self.record.serial = serial;
                self.record.ended_attaches = ended_attaches;
                self.record.revision = revision;
                self.past_number = Some(past_number);
            }
            Part::Registration => self.record.registration = Some(self.value(part, kv)?),
            Part::Claim(node, consumer) => {
                let claim: Claim = self.value(part, kv)?;
                if (&claim.node, &claim.consumer) != (node, consumer) {
                    return Err("the claim is of another node or consumer".into());
                }
                self.record.claims.insert(Claim { modify_index: revision, ..claim });
            }
            Part::Attachment(_) => {
                let attachment: Attachment = self.value(part, kv)?;
                if Part::attachment(&attachment) != *part {
                    return Err("the attachment is of another node".into());
                }
                let place = self.place(part);
                match place {
                    Ok(at) => self.record.attachments[at] = attachment,
                    Err(at) => self.record.attachments.insert(at, attachment),
                }
            }
            Part::Past(slot) => {
                let claim = Claim { modify_index: revision, ..self.value(part, kv)? };
                self.past.insert(*slot, claim);
            }
            Part::Queue(serial) => {
                let claim: Claim = self.value(part, kv)?;
                let queued = Queued { serial: *serial, claim: claim.into() };
                match self.queued(*serial) {
                    Ok(at) => self.record.queue[at] = queued,
                    Err(at) => self.record.queue.insert(at, queued),
                }
            }
            Part::Other(_) => {}
        }
        Ok(())
    }

    /// Takes over the deletion of a key.
    pub fn delete(&mut self, part: &Part) {
        self.unreadable.remove(part);
        self.rests.remove(part);
        match part {
            Part::Head => {
                self.past_number = None;
                self.record.volume = Record::none(self.record.name.clone()).volume;
                self.record.driver = None;
                self.record.serial = 0;
                self.record.ended_attaches = EndedAttaches::default();
                self.record.revision = 0;
            }
            Part::Registration => self.record.registration = None,
            Part::Claim(node, consumer) => {
                self.record.claims.remove_at(consumer, node);
            }
            Part::Attachment(_) => {
                if let Ok(at) = self.place(part) {
                    self.record.attachments.remove(at);
                }
            }
            Part::Past(slot) => drop(self.past.remove(slot)),
            Part::Queue(serial) => {
                if let Ok(at) = self.queued(*serial) {
                    self.record.queue.remove(at);
                }
            }
            Part::Other(_) => {}
        }
    }

    /// Gives a volume in creation the name that its registration has.
    pub fn finish(&mut self) {
        if let VolumeHandle::Creating { name } = &mut self.record.volume.handle
            && self.past_number.is_some()
        {
            let registration = self.record.registration.as_ref();
            *name = registration.map_or_else(String::new, |registration| registration.spec.name.clone());
        }
    }

    /// Returns whether etcd has no key of the volume that this version knows.
    pub fn is_none(&self) -> bool {
        self.past_number.is_none()
            && self.record.is_empty()
            && self.past.is_empty()
            && self.unreadable.is_empty()
    }

    /// Returns the first key that cannot be believed.
    pub fn unreadable(&self, keys: &Keys) -> Option<EtcdError> {
        let error = |part: &Part, why: String| EtcdError::Unreadable {
            key: String::from_utf8_lossy(&keys.part(&self.record.name, part)).into_owned(),
            why,
        };
        if let Some((part, why)) = self.unreadable.first_key_value() {
            return Some(error(part, why.clone()));
        }
        (self.past_number.is_none() && !self.is_none())
            .then(|| error(&Part::Head, "the volume has other keys, but not this one".into()))
    }

    /// Returns the parts whose values cannot be read.
    pub fn unreadable_parts(&self) -> impl Iterator<Item = &Part> {
        self.unreadable.keys()
    }

    /// Returns the past claims with their numbers, the oldest first.
    pub fn past(&self) -> Vec<(u64, &Claim)> {
        let newest = self.past_number.unwrap_or(0);
        let number = |slot: u64| newest.checked_sub((newest % PAST + PAST - slot) % PAST);
        let mut past: Vec<_> =
            self.past.iter().filter_map(|(slot, claim)| Some((number(*slot)?, claim))).collect();
        past.sort_by_key(|(number, _)| *number);
        past
    }

    /// Returns what is unknown of a value.
    pub fn rest(&self, part: &Part) -> Option<&Rest> {
        self.rests.get(part)
    }

    /// The attachments are in the order of their keys.
    fn place(&self, part: &Part) -> Result<usize, usize> {
        self.record.attachments.binary_search_by(|at| Part::attachment(at).cmp(part))
    }

    /// The queue is in the order of its places.
    fn queued(&self, serial: u64) -> Result<usize, usize> {
        self.record.queue.binary_search_by_key(&serial, |queued| queued.serial)
    }

    fn value<T: Serialize + DeserializeOwned>(&mut self, part: &Part, kv: &KeyValue) -> Result<T, String> {
        let (value, rest) = rest::read(&kv.value).map_err(|error| error.to_string())?;
        if !rest.is_empty() {
            self.rests.insert(part.clone(), rest);
        }
        Ok(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A server has all volumes of the cluster in memory.
    #[test]
    fn volume_in_the_lists_stays_small() {
        let sizes = [size_of::<Stored>(), size_of::<Claim>()];
        assert!(sizes[0] <= 1056 && sizes[1] <= 352, "{sizes:?}");
    }

    #[test]
    fn volume_in_creation_has_the_name_of_its_registration() {
        let (keys, name) = (Keys::new("/csid/"), csid::store::testing::samples::name("data"));
        let mut registration = csid::store::testing::samples::record("data", &[]).registration.unwrap();
        let mut stored = Stored::none(name.clone());
        let put = |stored: &mut Stored, part: Part, value: serde_json::Value| {
            let (key, value) = (keys.part(&name, &part), value.to_string().into_bytes());
            stored.put(part, &KeyValue { key, value, mod_revision: 7, ..KeyValue::default() });
            stored.finish();
        };
        put(&mut stored, Part::Head, serde_json::json!({"volume": ["local", null]}));
        assert_eq!(stored.record.volume, VolumeKey::creating("local", ""));
        for name in ["a name", "another"] {
            registration.spec.name = name.into();
            put(&mut stored, Part::Registration, serde_json::to_value(&registration).unwrap());
            assert_eq!(stored.record.volume, VolumeKey::creating("local", name));
        }
        put(&mut stored, Part::Head, serde_json::json!({"volume": ["local", "v1"]}));
        assert_eq!(stored.record.volume, VolumeKey::new("local", "v1".to_owned()));
        stored.delete(&Part::Head);
        stored.finish();
        assert_eq!(stored.record.volume, Record::none(name.clone()).volume);
        assert!(stored.unreadable(&keys).is_some(), "a volume without its head");
    }
}
