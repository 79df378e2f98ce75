//! Answers that are sent one after the other. A reader that is too slow loses the stream, and learns that it is not whole.

use std::pin::Pin;
use std::time::Duration;

use csid::{Error, Kind};
use futures_util::{Stream, StreamExt, stream};
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use crate::failure::ServerError;

/// How long an answer waits for its reader, and how long the reader has for all.
const READER: Duration = Duration::from_secs(20);
const LONGEST: Duration = Duration::from_secs(300);

pub type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// Sends the answers of one stream.
pub struct Sender<T> {
    channel: mpsc::Sender<Result<T, Status>>,
    /// Ends the stream with an error after what is in the channel. Its drop ends it without one.
    cut: Option<oneshot::Sender<Status>>,
    until: Instant,
}

/// Opens a stream. `waiting`: the answers that are in memory until the reader takes them.
pub fn open<T: Send + 'static>(waiting: usize) -> (Sender<T>, Answers<T>) {
    let (channel, receiver) = mpsc::channel(waiting);
    let (cut, end) = oneshot::channel();
    let end = stream::once(end).filter_map(|end| std::future::ready(end.ok().map(Err)));
    let answers = Box::pin(ReceiverStream::new(receiver).chain(end));
    (Sender { channel, cut: Some(cut), until: Instant::now() + LONGEST }, answers)
}

impl<T> Sender<T> {
    /// Sends an answer. Returns `false` when the stream is over: its reader is gone, or is too slow.
    pub async fn send(&mut self, answer: Result<T, Status>) -> bool {
        let until = self.until.min(Instant::now() + READER);
        match tokio::time::timeout_at(until, self.channel.send(answer)).await {
            Ok(sent) => sent.is_ok(),
            Err(_) => {
                if let Some(cut) = self.cut.take() {
                    let text = format!(
                        "the answers were read too slowly: {} s for one and {} s for all are the limits",
                        READER.as_secs(),
                        LONGEST.as_secs()
                    );
                    let error = Error::new(Kind::TimedOut, text);
                    // A failure means that the reader is gone.
                    let _ = cut.send(ServerError::from(error).into());
                }
                false
            }
        }
    }

    /// Waits until the reader is gone.
    pub async fn closed(&self) {
        self.channel.closed().await;
    }
}

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn slow_reader_loses_the_stream_and_learns_it() {
        let (mut sender, mut answers) = open(1);
        assert!(sender.send(Ok(1)).await);
        let begun = Instant::now();
        assert!(!sender.send(Ok(2)).await, "nobody reads");
        assert_eq!(begun.elapsed(), READER);
        drop(sender);
        assert_eq!(answers.next().await.unwrap().unwrap(), 1);
        let cut = answers.next().await.unwrap().unwrap_err();
        assert_eq!(cut.code(), Code::DeadlineExceeded, "a part of a list passes for all of it");
        assert!(cut.metadata().contains_key("csid-failure-bin") && answers.next().await.is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn reader_has_a_bounded_time_for_all_answers() {
        let (mut sender, mut answers) = open(1);
        let reads = async {
            let mut last = None;
            while let Some(answer) = answers.next().await {
                last = Some(answer);
                tokio::time::sleep(READER / 2).await;
            }
            last.unwrap().unwrap_err().code()
        };
        let sends = async {
            let begun = Instant::now();
            while sender.send(Ok(0)).await {}
            drop(sender);
            begun.elapsed()
        };
        let (code, took) = tokio::join!(reads, sends);
        assert_eq!((code, took), (Code::DeadlineExceeded, LONGEST));
    }

    #[tokio::test]
    async fn whole_stream_ends_without_an_error() {
        let (mut sender, answers) = open(4);
        assert!(sender.send(Ok(1)).await && sender.send(Ok(2)).await);
        drop(sender);
        let all: Vec<i32> = answers.map(Result::unwrap).collect().await;
        assert_eq!(all, [1, 2]);
        let (mut sender, answers) = open(1);
        drop(answers);
        assert!(!sender.send(Ok(1)).await);
    }
}
