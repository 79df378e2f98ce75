//! The places of workers that receive descriptors, so that no sender keeps all workers busy.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Workers at once that sift, or close what they did not pass on. With the other calls' fewer than there can be workers.
const AT_ONCE: usize = 8;
/// The number of places of one uid.
const EACH: usize = 2;
/// The number of places of the senders on the system bus together. The others are for the private socket's senders, whose uids are known.
const ON_BUS: usize = 6;
/// The places of the workers that sift, by the sender's uid; `None`: it is not known, on the system bus.
pub(super) struct SiftPlaces {
    all: Arc<Room>,
    each: Mutex<BTreeMap<Option<u32>, Arc<Room>>>,
}

/// Places, and how many of them have workers that only close what they did not pass on.
struct Room {
    places: Arc<Semaphore>,
    size: usize,
    closing: AtomicUsize,
}

impl Room {
    fn new(size: usize) -> Arc<Room> {
        Arc::new(Room { places: Arc::new(Semaphore::new(size)), size, closing: AtomicUsize::new(0) })
    }

    /// Whether every place may be taken for as long as a file's server does not answer.
    fn is_stuck(&self) -> bool {
        self.closing.load(Ordering::Relaxed) >= self.size
    }
}

impl Default for SiftPlaces {
    fn default() -> Self {
        SiftPlaces { all: Room::new(AT_ONCE), each: Mutex::default() }
    }
}

/// A worker's place among its sender's, and among all.
pub(super) struct SiftPlace {
    rooms: [Arc<Room>; 2],
    _held: [OwnedSemaphorePermit; 2],
}

/// A place whose worker closes.
pub(super) struct Closing([Arc<Room>; 2]);

impl SiftPlace {
    pub(super) fn closes(&self) -> Closing {
        for room in &self.rooms {
            room.closing.fetch_add(1, Ordering::Relaxed);
        }
        Closing(self.rooms.clone())
    }
}

impl Drop for Closing {
    fn drop(&mut self) {
        for room in &self.0 {
            room.closing.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl SiftPlaces {
    /// Waits for a place, `patience` at most. It waits for none while every place has a worker that only closes.
    pub(super) async fn enter(&self, uid: Option<u32>, patience: Duration) -> Option<SiftPlace> {
        let each = {
            let mut each = self.each.lock().unwrap_or_else(PoisonError::into_inner);
            let size = if uid.is_some() { EACH } else { ON_BUS };
            Arc::clone(each.entry(uid).or_insert_with(|| Room::new(size)))
        };
        let rooms = [each, Arc::clone(&self.all)];
        let patience = if rooms.iter().any(|room| room.is_stuck()) { Duration::ZERO } else { patience };
        let [each, all] = rooms.each_ref().map(|room| Arc::clone(&room.places).acquire_owned());
        let held = async { Some([each.await.ok()?, all.await.ok()?]) };
        let held = tokio::time::timeout(patience, held).await.ok().flatten()?;
        Some(SiftPlace { rooms, _held: held })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_millis(500);

    #[tokio::test]
    async fn one_sender_has_few_workers_at_once() {
        let places = SiftPlaces::default();
        let enter = async |uid| places.enter(Some(uid), Duration::ZERO).await;
        let mut held = Vec::new();
        for uid in 0..4 {
            for _ in 0..EACH {
                held.push(enter(uid).await.expect("a place"));
            }
            assert!(enter(uid).await.is_none(), "it has its share");
        }
        assert_eq!(held.len(), AT_ONCE);
        assert!(enter(4).await.is_none(), "all are taken");
        held.pop();
        assert!(enter(4).await.is_some());
    }

    /// Senders on the system bus share their places: one of them does not refuse all others with two descriptors that hang.
    #[tokio::test]
    async fn bus_has_six_places_and_leaves_two() {
        let places = SiftPlaces::default();
        let enter = async |uid| places.enter(uid, Duration::ZERO).await;
        let mut held = Vec::new();
        for _ in 0..6 {
            held.push(enter(None).await.expect("a place on the bus"));
        }
        assert!(enter(None).await.is_none(), "the bus has its share");
        for uid in [7, 8] {
            held.push(enter(Some(uid)).await.expect("a place on the private socket"));
        }
        assert!(enter(Some(9)).await.is_none(), "all are taken");
    }

    #[tokio::test]
    async fn places_of_closing_workers_are_not_waited_for() {
        let places = SiftPlaces::default();
        let enter = async |patience| places.enter(Some(7), patience).await;
        let held = [enter(PATIENCE).await.expect("a place"), enter(PATIENCE).await.expect("a place")];
        let closing = held.each_ref().map(SiftPlace::closes);
        let refused = enter(Duration::from_secs(3600));
        let refused = tokio::time::timeout(Duration::from_secs(60), refused).await.expect("at once");
        assert!(refused.is_none());
        drop((closing, held));
        assert!(enter(PATIENCE).await.is_some());
    }
}
