//! What a registry reports of its work with etcd, for those who count it.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Takes reports. It has to return at once.
pub trait Observe: Send + Sync {
    /// A transaction has a result: `committed`, `compared` (a comparison failed), `full`, or `failed`.
    fn transaction(&self, result: &'static str, took: Duration);

    /// A change of a volume was committed, with so many changes of claims.
    fn claims(&self, count: usize);

    /// A call of a member failed. The code is gRPC's name, or `TIMEOUT` where no answer came in time.
    fn failed(&self, code: &'static str);
}

/// Who takes the reports of a registry.
#[derive(Default)]
pub(crate) struct Observer(OnceLock<Arc<dyn Observe>>);

impl Observer {
    /// Has the reports taken from now on. Only the first call has an effect.
    pub fn set(&self, observe: Arc<dyn Observe>) {
        let _ = self.0.set(observe);
    }

    pub fn report(&self, say: impl FnOnce(&dyn Observe)) {
        if let Some(observe) = self.0.get() {
            say(observe.as_ref());
        }
    }
}
