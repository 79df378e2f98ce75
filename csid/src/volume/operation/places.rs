//! Queues for a plugin's volume limit on this node. A change of the registry wakes only the first of each queue. The next becomes
//! first once that one has its place or no longer waits.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

/// The queue of each plugin: the places by number, and whether each was notified that it is first.
type Queues = BTreeMap<String, BTreeMap<u64, watch::Sender<bool>>>;

#[derive(Default)]
struct Table {
    last: u64,
    queues: Queues,
}

#[derive(Clone, Default)]
pub(in crate::volume) struct Places(Arc<Mutex<Table>>);

/// A volume's turn in the queue of its plugin, until it is dropped.
pub(in crate::volume) struct Place {
    number: u64,
    plugin: String,
    places: Places,
    first: watch::Receiver<bool>,
}

impl Places {
    fn lock(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a place at the end of the queue of this plugin.
    pub(in crate::volume) fn queue(&self, plugin: &str) -> Place {
        let mut table = self.lock();
        table.last += 1;
        let number = table.last;
        let queue = table.queues.entry(plugin.to_owned()).or_default();
        let (is_first, first) = watch::channel(queue.is_empty());
        queue.insert(number, is_first);
        Place { number, plugin: plugin.to_owned(), places: self.clone(), first }
    }
}

impl Place {
    pub(in crate::volume) fn is_first(&self) -> bool {
        *self.first.borrow()
    }

    /// Waits until this place is the first.
    pub(in crate::volume) async fn becomes_first(&self) {
        let mut first = self.first.clone();
        if first.wait_for(|first| *first).await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut table = self.places.lock();
        let Some(queue) = table.queues.get_mut(&self.plugin) else { return };
        queue.remove(&self.number);
        match queue.values().next() {
            Some(next) => drop(next.send_replace(true)),
            None => drop(table.queues.remove(&self.plugin)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_of_each_plugin_is_the_first_in_order() {
        let places = Places::default();
        let mut waiting: Vec<Place> = (0..1_000).map(|_| places.queue("p")).collect();
        let other = places.queue("q");
        let firsts = |of: &[Place]| of.iter().filter(|place| place.is_first()).count();
        assert!(waiting[0].is_first() && other.is_first());
        // A place that is dropped from the middle makes no other place the first.
        drop(waiting.remove(500));
        while !waiting.is_empty() {
            assert_eq!(firsts(&waiting), 1);
            assert!(waiting[0].is_first());
            drop(waiting.remove(0));
        }
        drop(other);
        assert!(places.lock().queues.is_empty());
    }
}
