//! The order of controller calls. Servers may send a call late, or after another server has taken over. Each call has an epoch, and calls
//! of one order are made one at a time, by their epochs.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::OwnedMutexGuard;

/// The most orders that are kept apart. Epochs are revisions of etcd, so those of all orders can be compared.
const ORDERS: usize = 10_000;
/// How far an epoch may be after the revision at which the session began. etcd makes no so many revisions in a session.
const AHEAD: u64 = 1 << 40;

/// The calls that this csid has had, of all servers.
#[derive(Default)]
pub(super) struct CallOrders(Mutex<Table>);

#[derive(Default)]
struct Table {
    generation: u64,
    /// The greatest epoch that a server may name.
    most: u64,
    /// Epochs up to this one are stale in an order that is not in the table.
    floor: u64,
    of: HashMap<(String, String), Order>,
}

struct Order {
    /// The greatest epoch that has come.
    seen: u64,
    /// Held while a call is made.
    gate: Arc<tokio::sync::Mutex<()>>,
}

/// A call whose turn it is. The next one of its order waits for the drop.
#[derive(Debug)]
pub(super) struct CallTurn {
    _gate: OwnedMutexGuard<()>,
}

/// Why a call is not made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoTurn {
    /// A call of the order has had this epoch, or a greater one. Or the epoch is greater than any can be.
    Stale,
    /// The call could not begin in time.
    Late,
}

impl CallOrders {
    fn lock(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes over the cluster's generation and revision, as a server says them. The revisions of another generation begin again. Epochs that
    /// are too great were a lie, and are forgotten.
    pub(super) fn begin(&self, generation: u64, revision: u64) {
        let mut table = self.lock();
        let most = revision.saturating_add(AHEAD);
        table.most = most;
        if table.floor > most {
            table.floor = 0;
        }
        table.of.values_mut().filter(|order| order.seen > most).for_each(|order| order.seen = 0);
        if table.generation != generation {
            (table.generation, table.floor) = (generation, 0);
            table.of.values_mut().for_each(|order| order.seen = 0);
        }
    }

    /// Waits until no other call of the order is made, `within` at most.
    pub(super) async fn turn(
        &self,
        plugin: &str,
        order: &str,
        epoch: u64,
        within: Duration,
    ) -> Result<CallTurn, NoTurn> {
        let key = (plugin.to_owned(), order.to_owned());
        let gate = self.lock().come(&key, epoch)?;
        let gate = tokio::time::timeout(within, gate.lock_owned()).await.map_err(|_| NoTurn::Late)?;
        // A greater epoch may have come while this one waited.
        match self.lock().of.get(&key) {
            Some(order) if order.seen > epoch => Err(NoTurn::Stale),
            _ => Ok(CallTurn { _gate: gate }),
        }
    }

    /// Waits for a turn as [`CallOrders::turn`] does, for a call that changes nothing. It has no epoch.
    pub(super) async fn turn_of_question(
        &self,
        plugin: &str,
        order: &str,
        within: Duration,
    ) -> Result<CallTurn, NoTurn> {
        let gate = self.lock().gate(&(plugin.to_owned(), order.to_owned())).gate.clone();
        let gate = tokio::time::timeout(within, gate.lock_owned()).await.map_err(|_| NoTurn::Late)?;
        Ok(CallTurn { _gate: gate })
    }
}

impl Table {
    /// Notes a call, and returns the gate of its order.
    fn come(&mut self, key: &(String, String), epoch: u64) -> Result<Arc<tokio::sync::Mutex<()>>, NoTurn> {
        let seen = self.of.get(key).map_or(self.floor, |order| order.seen);
        if epoch <= seen || epoch > self.most {
            return Err(NoTurn::Stale);
        }
        let order = self.gate(key);
        order.seen = epoch;
        Ok(order.gate.clone())
    }

    /// Returns an order, which may be new. No epoch below the floor becomes good by that.
    fn gate(&mut self, key: &(String, String)) -> &mut Order {
        if !self.of.contains_key(key) && self.of.len() >= ORDERS {
            self.forget();
        }
        let seen = self.floor;
        self.of.entry(key.clone()).or_insert_with(|| Order { seen, gate: Arc::default() })
    }

    /// Forgets the older half of the orders in which no call is made.
    fn forget(&mut self) {
        let is_idle = |order: &Order| Arc::strong_count(&order.gate) == 1;
        let mut epochs: Vec<u64> =
            self.of.values().filter(|order| is_idle(order)).map(|order| order.seen).collect();
        epochs.sort_unstable();
        let Some(last) = epochs.get(epochs.len() / 2).copied() else { return };
        self.floor = self.floor.max(last);
        self.of.retain(|_, order| !is_idle(order) || order.seen > last);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_secs(10);

    /// Returns the orders of a session that has begun.
    fn known() -> CallOrders {
        let orders = CallOrders::default();
        orders.begin(1, 1);
        orders
    }

    #[tokio::test]
    async fn epoch_that_is_not_greater_is_stale() {
        let orders = known();
        drop(orders.turn("p", "v", 7, SOON).await.unwrap());
        for epoch in [0, 6, 7] {
            assert_eq!(orders.turn("p", "v", epoch, SOON).await.err(), Some(NoTurn::Stale), "{epoch}");
        }
        drop(orders.turn("p", "other", 6, SOON).await.unwrap());
        drop(orders.turn("q", "v", 6, SOON).await.unwrap());
        orders.begin(2, 0);
        drop(orders.turn("p", "v", 1, SOON).await.unwrap());
    }

    /// A lying server could keep all later calls from being made.
    #[tokio::test]
    async fn epoch_that_no_revision_reaches_is_stale() {
        let orders = known();
        assert_eq!(orders.turn("p", "v", u64::MAX, SOON).await.err(), Some(NoTurn::Stale));
        drop(orders.turn("p", "v", 7, SOON).await.unwrap());
        // The server lies about its revision, too.
        orders.begin(1, u64::MAX);
        drop(orders.turn("p", "v", u64::MAX, SOON).await.unwrap());
        orders.lock().floor = u64::MAX;
        orders.begin(1, 8);
        drop(orders.turn("p", "v", 9, SOON).await.unwrap());
        drop(orders.turn("p", "other", 9, SOON).await.unwrap());
    }

    #[tokio::test]
    async fn later_epoch_waits_and_makes_others_stale() {
        let orders = Arc::new(known());
        let first = orders.turn("p", "v", 1, SOON).await.unwrap();
        let second = tokio::spawn({
            let orders = orders.clone();
            async move { orders.turn("p", "v", 2, SOON).await.map(drop) }
        });
        tokio::task::yield_now().await;
        let late = orders.turn("p", "v", 3, Duration::from_millis(1)).await;
        assert_eq!(late.err(), Some(NoTurn::Late));
        drop(first);
        assert_eq!(second.await.unwrap(), Err(NoTurn::Stale), "a call passed a later one");
        drop(orders.turn("p", "v", 4, SOON).await.unwrap());
    }

    #[tokio::test]
    async fn forgotten_order_takes_no_earlier_epoch() {
        let orders = known();
        let running = orders.turn("p", "runs", 1, SOON).await.unwrap();
        for epoch in 2..ORDERS as u64 + 10 {
            drop(orders.turn("p", &epoch.to_string(), epoch, SOON).await.unwrap());
        }
        assert!(orders.lock().of.len() <= ORDERS);
        assert_eq!(orders.turn("p", "2", 2, SOON).await.err(), Some(NoTurn::Stale));
        assert_eq!(orders.turn("p", "new", 3, SOON).await.err(), Some(NoTurn::Stale));
        let gate = orders.lock().of.get(&("p".to_owned(), "runs".to_owned())).map(|order| order.seen);
        assert_eq!(gate, Some(1), "a call that is made was forgotten");
        drop(running);
    }
}
