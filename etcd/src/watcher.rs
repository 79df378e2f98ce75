//! The task that keeps the cache: it lists all volumes at one revision, and watches them from the next one on.

use std::sync::Arc;
use std::time::Duration;

use crate::cache::{Cache, Volumes};
use crate::client::{Client, Watch};
use crate::error::EtcdError;
use crate::wire::RangeRequest;

/// Keys in a page of a list. Each page costs etcd 3.4 a walk over all later keys, so there are few.
const PAGE: i64 = 10_000;
const FEWEST: i64 = 100;
const LARGE: usize = 32 * 1024 * 1024;
const PAUSE: Duration = Duration::from_millis(200);
const LONGEST: Duration = Duration::from_secs(10);

/// Follows etcd until the task is aborted.
pub(crate) async fn run(client: Arc<Client>, cache: Arc<Cache>) {
    let _ends = Ends(cache.clone());
    let mut pause = PAUSE;
    loop {
        match follow(&client, &cache).await {
            Ok(()) => pause = PAUSE,
            Err(error @ EtcdError::Compacted { .. }) => {
                tracing::info!(%error, "the volumes are listed again");
                tokio::time::sleep(PAUSE).await;
            }
            Err(error) => {
                tracing::warn!(%error, "the volumes in etcd cannot be listed");
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(LONGEST);
            }
        }
    }
}

/// Ends the readers of the cache with the task, also if it panics.
struct Ends(Arc<Cache>);

impl Drop for Ends {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// Lists and follows the volumes. Returns when they have to be listed again.
async fn follow(client: &Client, cache: &Cache) -> Result<(), EtcdError> {
    cache.forget();
    let volumes = list(client, cache).await?;
    let mut from = volumes.revision + 1;
    cache.replace(volumes);
    // Lists stay what they are for this time without a watch.
    let limit = client.timing.answer * 2;
    loop {
        let Ok(watch) = tokio::time::timeout(limit, open(client, cache, from)).await else {
            tracing::warn!(
                seconds = limit.as_secs(),
                "etcd takes no watch of the volumes; they are listed again"
            );
            return Ok(());
        };
        let mut watch = watch?;
        tokio::select! {
            biased;
            ended = read(&mut watch, cache, &mut from) => ended?,
            () = cache.is_doubted() => {
                tracing::warn!("a change of the volumes in etcd was not seen; they are listed again");
                client.leave(&watch);
                return Ok(());
            }
        }
        client.leave(&watch);
        tokio::time::sleep(PAUSE / 10).await;
    }
}

/// Watches all volumes, at the first member that takes the watch.
async fn open(client: &Client, cache: &Cache, from: u64) -> Result<Watch, EtcdError> {
    let (key, range_end) = cache.keys.followed();
    loop {
        match client.watch(key.clone(), range_end.clone(), from).await {
            Err(EtcdError::Unreachable { .. }) => {}
            watch => return watch,
        }
    }
}

async fn read(watch: &mut Watch, cache: &Cache, from: &mut u64) -> Result<(), EtcdError> {
    while let Some(events) = watch.next().await? {
        *from = cache.apply(&events) + 1;
    }
    Ok(())
}

async fn list(client: &Client, cache: &Cache) -> Result<Volumes, EtcdError> {
    let (mut key, range_end) = cache.keys.followed();
    let (mut volumes, mut revision, mut limit) = (Volumes::default(), 0, PAGE);
    loop {
        let request = RangeRequest { key: key.clone(), range_end: range_end.clone(), limit, revision };
        let found = match client.page("list the volumes", request).await {
            // No member may have so large a page in time.
            Err(error @ EtcdError::Unreachable { .. }) if limit > FEWEST => {
                tracing::warn!(%error, limit, "a page of the volumes in etcd did not come; a smaller one is read");
                limit = (limit / 2).max(FEWEST);
                continue;
            }
            found => found?,
        };
        if revision == 0 {
            revision = i64::try_from(found.revision).unwrap_or(i64::MAX);
        }
        volumes.add(&cache.keys, &found.kvs);
        let Some(last) = found.kvs.last().filter(|_| found.more) else {
            volumes.listed(&cache.keys, u64::try_from(revision).unwrap_or(0));
            return Ok(volumes);
        };
        key = [last.key.as_slice(), &[0]].concat();
        let size: usize = found.kvs.iter().map(|kv| kv.key.len() + kv.value.len()).sum();
        if size > LARGE {
            limit = (limit / 2).max(FEWEST);
        }
    }
}
