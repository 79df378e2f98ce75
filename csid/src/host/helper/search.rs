//! Searches through all mount namespaces: one worker makes them all, for it remembers what each mount shows.

use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use crate::host::error::HostError;
use crate::host::helper::client::{Connection, Helper};
use crate::host::helper::memory;
use crate::host::helper::wire::{HelperRequest, SearchReply};
use crate::host::namespaces::{MountElsewhere, Question};

/// A worker that searches, and remembers what each mount shows. No other call is made by it.
pub(in crate::host) struct SearchWorker(Connection);

/// The end of a search.
#[derive(Debug)]
pub(in crate::host) enum SearchAnswered {
    /// The answers in the order of the questions.
    Found(Vec<Vec<MountElsewhere>>),
    /// No search was made: too many earlier ones, of this csid or an earlier one, have not ended. They are of these processes.
    TooMany(Vec<u32>),
}

impl Helper {
    /// Searches all mount namespaces once. `worker` is that of the searches before; `None`: a new one is asked. Where no answer comes,
    /// also because the caller no longer waits, `worker` is `None` afterwards.
    pub(in crate::host) async fn search(
        &self,
        worker: &mut Option<SearchWorker>,
        questions: Vec<Question>,
    ) -> Result<SearchAnswered, HostError> {
        let unanswered = |source| HostError::Helper { path: PathBuf::from("/proc"), source };
        let request = HelperRequest::Search { questions: Some(questions) };
        let request = memory::packed(request, HelperRequest::take_questions).map_err(unanswered)?;
        let answered = match self.search_by(worker, &request).await {
            // A worker that ended has changed nothing: one more is asked.
            Err(error) => {
                tracing::debug!(%error, "another worker of the helper searches");
                self.search_by(worker, &request).await
            }
            answered => answered,
        };
        let (mut reply, memory) = answered.map_err(unanswered)?;
        let answers = reply.take_answers();
        let memory = match reply {
            SearchReply::Found { learned, unlisted, .. } => {
                if let Some(error) = unlisted {
                    tracing::debug!(%error, "mount namespaces are read from /proc");
                }
                tracing::trace!(learned, "mount namespaces are searched");
                memory
            }
            SearchReply::Failed(error) => return Err(error),
            SearchReply::TooMany(processes) => {
                // An administrator who replaces the helper leaves this worker, which knows nothing of the new one.
                *worker = None;
                return Ok(SearchAnswered::TooMany(processes));
            }
        };
        if let Some(answers) = answers {
            return Ok(SearchAnswered::Found(answers));
        }
        // Another user's namespaces may make it large.
        let memory = memory.ok_or_else(|| unanswered(io::ErrorKind::InvalidData.into()))?;
        memory::read_async(memory).await.map(SearchAnswered::Found).map_err(unanswered)
    }

    async fn search_by(
        &self,
        worker: &mut Option<SearchWorker>,
        (packet, memory): &(Vec<u8>, Option<OwnedFd>),
    ) -> io::Result<(SearchReply, Option<OwnedFd>)> {
        let connection = match worker.take() {
            Some(SearchWorker(connection)) => connection,
            None => self.0.connect().await?,
        };
        connection.send(packet, memory.as_ref()).await?;
        let (packet, found) = connection.receive().await?;
        let reply = serde_json::from_slice(&packet)?;
        *worker = Some(SearchWorker(connection));
        Ok((reply, found))
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use rustix::net::{AddressFamily, SocketFlags, SocketType};

    use super::*;
    use crate::host::helper::slots::{SEARCHES, Slots};
    use crate::host::helper::wire::{self, PACKET};
    use crate::host::helper::worker;
    use crate::host::namespaces::Shown;
    use crate::host::statmount;

    /// A worker with these slots, the last of which is its own.
    fn worker(slots: &Slots) -> OwnedFd {
        let kind = SocketType::SEQPACKET;
        let pair = rustix::net::socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None);
        let (own, other) = pair.unwrap();
        let slots = slots.clone();
        std::thread::spawn(move || worker::serve(other, &slots, SEARCHES));
        own
    }

    fn asked(worker: impl AsFd) -> (SearchReply, Option<OwnedFd>) {
        let packet = serde_json::to_vec(&HelperRequest::Search { questions: Some(Vec::new()) }).unwrap();
        wire::send(&worker, &packet, None).unwrap();
        let mut reply = Vec::new();
        let found = wire::receive(&worker, &mut reply).unwrap().expect("a reply");
        (serde_json::from_slice(&reply).unwrap(), found)
    }

    fn learned(worker: impl AsFd) -> u64 {
        match asked(worker) {
            (SearchReply::Found { learned, answers: Some(_), .. }, None) => learned,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn worker_refuses_a_search_while_four_have_not_ended() {
        let slots = Slots::own();
        let worker = worker(&slots);
        assert!((0..SEARCHES).all(|own| slots.begin_search(own).is_ok()));
        let hung = vec![std::process::id(); SEARCHES];
        assert!(matches!(asked(&worker), (SearchReply::TooMany(processes), None) if processes == hung));
        slots.end(1);
        assert!(matches!(asked(&worker), (SearchReply::Found { answers: Some(_), .. }, None)));
        assert!(slots.begin_search(1).is_ok(), "a search that has ended does not count");
    }

    #[test]
    fn worker_asks_for_each_mount_once() {
        if let Err(error) = statmount::namespaces() {
            eprintln!("skipped: the kernel does not list mount namespaces here: {error}");
            return;
        }
        let worker = worker(&Slots::own());
        let first = learned(&worker);
        assert!(first > 0);
        // Tests that run meanwhile make namespaces, too.
        let again = (0..20).map(|_| learned(&worker)).collect::<Vec<_>>();
        let is_less = again.windows(2).any(|pair| (pair[1] - pair[0]) * 2 < first);
        assert!(is_less, "{first} at first, then {again:?}");
    }

    #[tokio::test]
    async fn question_and_answer_exceed_a_packet() {
        let helper = Helper::of_threads();
        let mut worker = None;
        let long = Shown {
            device: 0,
            fs_type: String::new(),
            root: PathBuf::from(format!("/{}", "x".repeat(4_000))),
            is_node: false,
            source: String::new(),
        };
        let questions: Vec<_> =
            (0..20).map(|_| Question { shown: vec![long.clone()], but_of: vec![] }).collect();
        assert!(serde_json::to_vec(&questions).unwrap().len() > PACKET);
        let found = helper.search(&mut worker, questions).await.unwrap();
        assert!(matches!(found, SearchAnswered::Found(found) if found.len() == 20));

        let questions: Vec<_> = (0..40_000).map(|_| Question { shown: vec![], but_of: vec![] }).collect();
        let found = helper.search(&mut worker, questions).await.unwrap();
        let SearchAnswered::Found(found) = found else { panic!("{found:?}") };
        assert!(found.len() == 40_000 && serde_json::to_vec(&found).unwrap().len() > PACKET);
    }
}
