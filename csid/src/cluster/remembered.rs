//! Volumes as the server of this session has answered them. A claim by such an answer has its mark, which the server compares.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::store::registry::{Record, VolumeName};
use crate::volume::servers::RegistrationMark;

/// The most volumes that are remembered. When there are more, all are forgotten.
const MOST: usize = 1024;

/// The answers of a session. An earlier session may have been with a server of another release.
#[derive(Default)]
pub(super) struct RememberedVolumes(Mutex<OfSession>);

#[derive(Default)]
struct OfSession {
    session: u64,
    volumes: HashMap<VolumeName, (Record, Vec<u8>)>,
}

impl RememberedVolumes {
    fn lock(&self) -> MutexGuard<'_, OfSession> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets all volumes: the session has ended, or another one begins.
    pub fn end_session(&self) {
        let mut of = self.lock();
        *of = OfSession { session: of.session + 1, volumes: HashMap::new() };
    }

    /// Returns the number of the session.
    pub fn session(&self) -> u64 {
        self.lock().session
    }

    /// Remembers an answer of a session, without the maps and flags, which the mark leaves out. An empty mark is that of a server that compares none: nothing is remembered.
    pub fn keep(&self, session: u64, record: &Record, mark: Vec<u8>) {
        let mut of = self.lock();
        if of.session != session || mark.is_empty() || record.registration.is_none() {
            of.volumes.remove(&record.name);
            return;
        }
        if of.volumes.len() >= MOST {
            of.volumes.clear();
        }
        let mut kept = record.clone();
        if let Some(registration) = &mut kept.registration {
            // No part of the mark: a grant has them.
            let spec = &mut registration.spec;
            spec.mount_flags.clear();
            spec.context.clear();
            spec.parameters.clear();
        }
        of.volumes.insert(record.name.clone(), (kept, mark));
    }

    pub fn forget(&self, name: &VolumeName) {
        self.lock().volumes.remove(name);
    }

    /// Returns a volume with its mark. `None`: it is not remembered.
    pub fn find(&self, name: &VolumeName) -> Option<(Record, RegistrationMark)> {
        let of = self.lock();
        let (record, digest) = of.volumes.get(name)?;
        let mark = RegistrationMark { digest: digest.clone(), session: of.session };
        Some((record.clone(), mark))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::registry::VolumeSpec;
    use crate::volume::rules;

    fn record(volume: usize) -> Record {
        let name = VolumeName { namespace: "default".into(), volume: format!("v{volume}") };
        let registration = rules::new_registration("operator/a", VolumeSpec::default());
        Record { registration: Some(registration), ..Record::none(name) }
    }

    #[test]
    fn answer_counts_in_its_session_alone() {
        let volumes = RememberedVolumes::default();
        let session = volumes.session();
        volumes.keep(session, &record(1), vec![7]);
        let (_, mark) = volumes.find(&record(1).name).unwrap();
        assert_eq!(mark, RegistrationMark { digest: vec![7], session });
        volumes.end_session();
        assert!(volumes.find(&record(1).name).is_none());
        volumes.keep(session, &record(1), vec![7]);
        assert!(volumes.find(&record(1).name).is_none(), "a late answer of the session before");
    }

    #[test]
    fn answer_without_a_mark_is_not_remembered() {
        let volumes = RememberedVolumes::default();
        volumes.keep(0, &record(1), vec![7]);
        volumes.keep(0, &record(1), Vec::new());
        volumes.keep(0, &Record::none(record(2).name), vec![7]);
        assert!(volumes.find(&record(1).name).is_none() && volumes.find(&record(2).name).is_none());
    }

    #[test]
    fn memory_of_volumes_has_a_limit() {
        let volumes = RememberedVolumes::default();
        for n in 0..=MOST {
            volumes.keep(0, &record(n), vec![7]);
        }
        assert!(volumes.find(&record(MOST).name).is_some() && volumes.lock().volumes.len() <= MOST);
    }
}
