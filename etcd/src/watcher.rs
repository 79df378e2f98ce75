//! The task that keeps the cache: it lists all volumes at one revision, and watches them from the next one on.

use std::sync::Arc;
use std::time::Duration;

use crate::cache::{Cache, Volumes};
use crate::client::{Client, Watch};
use crate::error::EtcdError;
use crate::wire::RangeRequest;

/// Keys in a page of a list. Each page costs etcd 3.4 a walk over all later keys, so there are few.
const PAGE: i64 = 10_000;
const LARGE: usize = 32 * 1024 * 1024;
const PAUSE: Duration = Duration::from_millis(200);

/// Follows etcd until the task is aborted.
pub(crate) async fn run(client: Arc<Client>, cache: Arc<Cache>) {
    loop {
        match follow(&client, &cache).await {
            Ok(()) => {}
            Err(error @ EtcdError::Compacted { .. }) => {
                tracing::info!(%error, "the volumes are listed again");
            }
            Err(error) => {
                tracing::warn!(%error, "the volumes in etcd cannot be listed");
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

/// Lists and follows the volumes. Returns when they have to be listed again.
async fn follow(client: &Client, cache: &Cache) -> Result<(), EtcdError> {
    cache.forget();
    let volumes = list(client, cache).await?;
    let mut from = volumes.revision + 1;
    cache.replace(volumes);
    let (key, range_end) = cache.keys.volumes();
    loop {
        let mut watch = match client.watch(key.clone(), range_end.clone(), from).await {
            Ok(watch) => watch,
            // Lists stay what they are until etcd can be reached.
            Err(EtcdError::Unreachable { .. }) => continue,
            Err(error) => return Err(error),
        };
        tokio::select! {
            ended = read(&mut watch, cache, &mut from) => ended?,
            () = cache.doubted.notified() => {
                tracing::warn!("a change of the volumes in etcd was not seen; they are listed again");
                client.leave(&watch);
                return Ok(());
            }
        }
        client.leave(&watch);
        tokio::time::sleep(PAUSE / 10).await;
    }
}

async fn read(watch: &mut Watch, cache: &Cache, from: &mut u64) -> Result<(), EtcdError> {
    while let Some(events) = watch.next().await? {
        *from = cache.apply(&events) + 1;
    }
    Ok(())
}

async fn list(client: &Client, cache: &Cache) -> Result<Volumes, EtcdError> {
    let (mut key, range_end) = cache.keys.volumes();
    let (mut volumes, mut revision, mut limit) = (Volumes::default(), 0, PAGE);
    loop {
        let request = RangeRequest { key, range_end: range_end.clone(), limit, revision };
        let found = client.range("list the volumes", request).await?;
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
            limit = (limit / 2).max(100);
        }
    }
}
