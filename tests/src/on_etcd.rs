//! csid with its registry on etcd, for the tests of claims and volumes: the engine is the same.

use std::sync::Arc;

use csid::daemon::OpenRegistry;
use csid::store::{Change, Durability};
use csid_etcd::{EtcdConfig, EtcdRegistry, Timing};
use futures_util::FutureExt;

use crate::world::is_set;

/// The endpoints of the etcd that csid uses in place of its journal, with commas between them.
pub const ENDPOINTS: &str = "CSID_TEST_ETCD";

/// Returns whether csid's registry is on etcd in this run.
pub fn is_used() -> bool {
    std::env::var_os(ENDPOINTS).is_some()
}

/// Returns whether csid's registry is on etcd in this run, for a test of the journal's registry alone. Prints why it is skipped then.
pub fn is_skipped(why: &str) -> bool {
    is_set(ENDPOINTS, "with the registry on etcd", why)
}

/// Returns what opens the registry. Each journal has keys of its own.
pub fn open(endpoints: String) -> Box<OpenRegistry> {
    Box::new(move |store| {
        let config = EtcdConfig {
            endpoints: endpoints.split(',').map(str::to_owned).collect(),
            tls: None,
            prefix: format!("/{}/", store.journal_id()),
            timing: Timing::default(),
        };
        let journal = store.clone();
        let keep = Box::new(move |events: Vec<_>| {
            let journal = journal.clone();
            async move {
                let changes = events.into_iter().map(Change::Event).collect();
                // At csid's end the journal may end first.
                if let Err(error) = journal.commit(changes, Durability::Process).await {
                    eprintln!("the journal did not take events: {error}");
                }
            }
            .boxed()
        });
        Ok(Arc::new(EtcdRegistry::start(&config, keep)?))
    })
}
