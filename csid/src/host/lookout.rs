//! The searches through other mount namespaces. One search answers all questions that were asked before it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;

use crate::host::error::HostError;
use crate::host::helper::{Helper, SearchAnswered, SearchWorker};
use crate::host::namespaces::{MountElsewhere, Question};

/// Searches, and the pause between two: a container's runtime copies all mounts for an instant.
pub(super) const LOOKS: u32 = 3;
pub(super) const PAUSE: Duration = Duration::from_millis(100);

/// The time that one search takes at most. An answer takes twice that at most: the search under way, and the one after it. A search whose
/// worker closes a namespace's last reference may wait for a file system's server.
const SEARCH: Duration = Duration::from_secs(15);

/// Questions that wait for the next search. One search answers all questions asked before it.
pub(super) struct Lookout {
    waiting: Mutex<Waiting>,
    /// The time that one search takes at most.
    limit: Duration,
}

#[derive(Default)]
struct Waiting {
    is_looking: bool,
    questions: Vec<(Question, ProbeReply)>,
    /// The worker of the searches before. `None`: the next search is its worker's first one.
    worker: Option<SearchWorker>,
}

impl Waiting {
    /// Removes the questions whose callers no longer wait.
    fn drop_given_up(&mut self) {
        self.questions.retain(|(_, reply)| !reply.is_closed());
    }
}

type ProbeReply = oneshot::Sender<Result<Vec<MountElsewhere>, HostError>>;
pub(super) type ProbeAnswer = oneshot::Receiver<Result<Vec<MountElsewhere>, HostError>>;

impl Default for Lookout {
    fn default() -> Self {
        Lookout { waiting: Mutex::default(), limit: SEARCH }
    }
}

impl Lookout {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a question, and starts a search unless one is under way. Returns where the answer comes. A sender is dropped
    /// only if csid ends.
    pub(super) fn ask(self: &Arc<Self>, helper: &Helper, question: Question) -> ProbeAnswer {
        let (reply, answer) = oneshot::channel();
        let mut waiting = self.waiting();
        // A caller that asks again and again, and gives up, must not fill the queue.
        waiting.drop_given_up();
        waiting.questions.push((question, reply));
        if !waiting.is_looking {
            waiting.is_looking = true;
            let looking = Looking { at: Arc::clone(self), has_ended: false };
            tokio::spawn(looking.answer_all(helper.clone(), waiting.worker.take()));
        }
        answer
    }
}

/// The searches under way.
struct Looking {
    at: Arc<Lookout>,
    has_ended: bool,
}

impl Drop for Looking {
    fn drop(&mut self) {
        if !self.has_ended {
            // It panicked, or csid ends. The next question starts another one.
            let mut waiting = self.at.waiting();
            waiting.is_looking = false;
            waiting.questions.clear();
        }
    }
}

impl Looking {
    /// Answers questions until none waits.
    async fn answer_all(mut self, helper: Helper, mut worker: Option<SearchWorker>) {
        loop {
            let batch = {
                let mut waiting = self.at.waiting();
                waiting.drop_given_up();
                if waiting.questions.is_empty() {
                    waiting.is_looking = false;
                    waiting.worker = worker;
                    self.has_ended = true;
                    return;
                }
                std::mem::take(&mut waiting.questions)
            };
            let (questions, answers): (Vec<_>, Vec<_>) = batch.into_iter().unzip();
            // A search that is given up leaves no worker for the next one.
            let search = helper.search(&mut worker, questions);
            let answered = match tokio::time::timeout(self.at.limit, search).await {
                Ok(answered) => answered,
                Err(_) => Err(search_failed("the kernel did not answer in time")),
            };
            let failed = match answered {
                Ok(SearchAnswered::Found(found)) => {
                    for (answer, found) in answers.into_iter().zip(found) {
                        let _ = answer.send(Ok(found));
                    }
                    continue;
                }
                Ok(SearchAnswered::TooMany(processes)) => too_many(&processes),
                Err(error) => error,
            };
            let why = match &failed {
                HostError::Search(why) => why.clone(),
                other => other.to_string().into(),
            };
            for answer in answers {
                let _ = answer.send(Err(HostError::Search(why.clone())));
            }
        }
    }
}

pub(super) fn search_failed(why: &'static str) -> HostError {
    HostError::Search(why.into())
}

fn too_many(processes: &[u32]) -> HostError {
    let processes: Vec<String> = processes.iter().map(u32::to_string).collect();
    let text = format!("too many earlier searches have not ended, of the processes {}", processes.join(", "));
    HostError::Search(text.into())
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::path::Path;

    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

    use super::*;
    use crate::host::helper::worker;

    /// A helper with a worker for each of these; the workers after them answer.
    enum Worker {
        /// Never answers, and keeps its connection.
        Hangs,
        /// Ends when it has a question.
        Dies,
    }

    fn helper(socket: &Path, workers: Vec<Worker>) -> Helper {
        let listener =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
        let listener = listener.unwrap();
        rustix::net::bind(&listener, &SocketAddrUnix::new(socket).unwrap()).unwrap();
        rustix::net::listen(&listener, 8).unwrap();
        std::thread::spawn(move || {
            let mut kept: Vec<OwnedFd> = Vec::new();
            let mut workers = workers.into_iter();
            while let Ok(connection) = rustix::net::accept(&listener) {
                match workers.next() {
                    Some(Worker::Hangs) => kept.push(connection),
                    Some(Worker::Dies) => {
                        let _ = rustix::net::recv(&connection, &mut [0; 1], rustix::net::RecvFlags::empty());
                    }
                    None => drop(std::thread::spawn(move || worker::serve_alone(connection))),
                }
            }
        });
        Helper::at(socket.to_owned())
    }

    fn question() -> Question {
        Question { shown: vec![], but_of: vec![] }
    }

    fn lookout(limit: Duration) -> Arc<Lookout> {
        Arc::new(Lookout { waiting: Mutex::default(), limit })
    }

    const LONG: Duration = Duration::from_secs(600);

    #[tokio::test]
    async fn hung_search_fails_and_the_next_worker_answers() {
        let directory = tempfile::tempdir().unwrap();
        let helper = helper(&directory.path().join("socket"), vec![Worker::Hangs, Worker::Hangs]);
        let at = lookout(Duration::from_millis(100));
        for _ in 0..2 {
            let error = at.ask(&helper, question()).await.unwrap().unwrap_err();
            assert!(error.to_string().contains("in time"), "{error}");
        }
        let at = Arc::new(Lookout { waiting: std::mem::take(&mut *at.waiting()).into(), limit: LONG });
        assert_eq!(at.ask(&helper, question()).await.unwrap().unwrap(), []);
    }

    #[tokio::test]
    async fn question_during_a_hung_search_is_answered_after_it() {
        let directory = tempfile::tempdir().unwrap();
        let helper = helper(&directory.path().join("socket"), vec![Worker::Hangs]);
        let at = lookout(Duration::from_secs(4));
        let first = at.ask(&helper, question());
        // The search has begun, so this one waits for the next.
        tokio::task::yield_now().await;
        assert!(at.waiting().questions.is_empty());
        let second = at.ask(&helper, question());
        assert!(first.await.unwrap().is_err());
        assert_eq!(second.await.unwrap().unwrap(), []);
    }

    #[tokio::test]
    async fn questions_that_are_given_up_leave_the_queue() {
        let directory = tempfile::tempdir().unwrap();
        let helper = helper(&directory.path().join("socket"), vec![Worker::Hangs]);
        let at = lookout(LONG);
        let _first = at.ask(&helper, question());
        tokio::task::yield_now().await;
        for _ in 0..10 {
            drop(at.ask(&helper, question()));
        }
        let _kept = at.ask(&helper, question());
        assert_eq!(at.waiting().questions.len(), 1);
    }

    #[tokio::test]
    async fn lost_worker_is_replaced_once_for_a_search() {
        let directory = tempfile::tempdir().unwrap();
        let workers = vec![Worker::Dies, Worker::Dies, Worker::Dies];
        let helper = helper(&directory.path().join("socket"), workers);
        let at = lookout(LONG);
        let error = at.ask(&helper, question()).await.unwrap().unwrap_err();
        assert!(error.to_string().contains("helper did not answer"), "two workers ended: {error}");
        assert_eq!(at.ask(&helper, question()).await.unwrap().unwrap(), [], "one more ended");
    }

    #[tokio::test]
    async fn one_search_answers_all_that_wait() {
        let directory = tempfile::tempdir().unwrap();
        let helper = helper(&directory.path().join("socket"), vec![]);
        let at = lookout(LONG);
        let answers: Vec<_> = (0..20).map(|_| at.ask(&helper, question())).collect();
        assert_eq!(at.waiting().questions.len(), 20, "no search has begun");
        for answer in answers {
            assert_eq!(answer.await.unwrap().unwrap(), []);
        }
        assert!(at.waiting().worker.is_some(), "the worker is kept for the next search");
    }
}
