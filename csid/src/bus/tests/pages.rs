//! Lists in pages, while rows come and go between the pages.

use std::collections::BTreeSet;

use zbus::{Connection, OwnedVariant};

use super::harness::{MEMBER, NOBODY, Options, World, connect_as, is_root, manager};
use crate::store::registry::{Record, Registry, Swap};
use crate::store::rows::Phase;
use crate::store::tests::{mount, samples};
use crate::store::{Change, Durability};

type Row = std::collections::HashMap<String, OwnedVariant>;

const ROWS: usize = 2_500;
const PAGE: usize = 1_000;

fn text(row: &Row, key: &str) -> String {
    <&str>::try_from(&row[key]).unwrap().to_owned()
}

/// Rows with their identifying keys.
async fn list(client: &Connection, member: &str, options: &Options) -> Vec<Row> {
    let options: Options = options.iter().map(|(key, value)| (*key, value.try_clone().unwrap())).collect();
    let answer = manager(client, member, &(options,)).await.unwrap();
    answer.body().deserialize::<(Vec<Row>,)>().unwrap().0
}

fn keys(rows: &[Row], key: &[&str]) -> Vec<Vec<String>> {
    rows.iter().map(|row| key.iter().map(|key| text(row, key)).collect()).collect()
}

/// Fills a csid with so many volumes, each with a claim, one that is past, and a mount. The first are of namespaces and names
/// with characters that a cursor escapes.
async fn filled(world: &World) {
    let store = &world.rooms.store;
    let swaps = (0..ROWS).map(|n| samples::swap_in(store, of(n)));
    futures_util::future::try_join_all(swaps).await.unwrap();
    let mounts = (0..ROWS).map(put).collect();
    store.commit(mounts, Durability::Process).await.unwrap();
}

fn name(n: usize) -> String {
    if n.is_multiple_of(2) { format!("a/{n:05}%2F") } else { format!("a{n:05}") }
}

fn of(n: usize) -> Swap {
    let record = samples::record(&name(n), &["job/1"]);
    let past = vec![samples::claim("job/0", "n1")];
    Swap { past, durability: Durability::Process, ..samples::new(record) }
}

fn put(n: usize) -> Change {
    let mut row = mount(&name(n), "job/1");
    row.phase = Phase::Lost;
    row.source = format!("/nonexistent/{n}");
    row.spec.target = None;
    Change::PutMount(row.into())
}

const LISTS: [(&str, &[&str]); 4] = [
    ("ListVolumes", &["namespace", "id"]),
    ("ListClaims", &["namespace", "volume", "consumer"]),
    ("ListClaims", &["namespace", "volume", "consumer", "state"]),
    ("ListMounts", &["namespace", "volume", "consumer", "tag"]),
];

#[tokio::test(flavor = "multi_thread")]
async fn pages_have_each_row_once() {
    for (at, (member, key)) in LISTS.into_iter().enumerate() {
        let world = World::new();
        let (path, _serving) = world.listen();
        filled(&world).await;
        let client = super::harness::connect(&path).await;
        let past = at == 2;
        let mut options = Options::from([("max", (PAGE as u32).into())]);
        if past {
            options.insert("past", true.into());
        }
        let mut found: Vec<Vec<String>> = Vec::new();
        let (mut gone, mut come) = (BTreeSet::new(), BTreeSet::new());
        for page in 0.. {
            let rows = list(&client, member, &options).await;
            assert!(rows.len() <= PAGE);
            let Some(last) = rows.last() else { break };
            options.insert("after", text(last, "cursor").into());
            found.extend(keys(&rows, key));
            // Remove the cursor's row, a later one and an earlier one. Add new ones before and behind.
            let here = (0..ROWS + 9)
                .find(|n| name(*n) == text(last, if at == 0 { "id" } else { "volume" }))
                .unwrap();
            for n in [here, here.saturating_sub(10), here + 10, ROWS - 1 - page] {
                if n < ROWS && gone.insert(n) {
                    remove(&world, n).await;
                }
            }
            if page < 4 {
                let n = ROWS + page;
                come.insert(name(n));
                samples::swap_in(&world.rooms.store, of(n)).await.unwrap();
                world.rooms.store.commit(vec![put(n)], Durability::Process).await.unwrap();
            }
        }
        let once: BTreeSet<&Vec<String>> = found.iter().collect();
        assert_eq!(once.len(), found.len(), "{member}: doubled");
        assert!(found.is_sorted_by(|one, next| one[..2] < next[..2]), "{member}: by name");
        let stayed: BTreeSet<String> = (0..ROWS).filter(|n| !gone.contains(n)).map(name).collect();
        let listed: BTreeSet<String> = found.iter().map(|row| row[1].clone()).collect();
        let missing: Vec<_> = stayed.difference(&listed).collect();
        assert!(missing.is_empty(), "{member}: missed {missing:?}");
        assert!(gone.len() > 6 && come.len() > 2);
    }
}

async fn remove(world: &World, n: usize) {
    let store = &world.rooms.store;
    let before = store.record(samples::name(&name(n))).await.unwrap();
    samples::swap_in(store, samples::swap(&before, Record::none(before.name.clone()))).await.unwrap();
    let key = mount(&name(n), "job/1").key;
    store.commit(vec![Change::DeleteMount(key)], Durability::Process).await.unwrap();
}

/// Pages need the same rights as the whole list.
#[tokio::test(flavor = "multi_thread")]
async fn pages_need_the_rights_of_the_list() {
    if !is_root() {
        return;
    }
    let world = World::new();
    let (path, _serving) = world.listen();
    for n in 0..7 {
        samples::swap_in(&world.rooms.store, of(n)).await.unwrap();
        world.rooms.store.commit(vec![put(n)], Durability::Process).await.unwrap();
    }
    let (member, stranger) = (connect_as(&path, MEMBER).await, connect_as(&path, NOBODY).await);
    for (list_of, key) in LISTS {
        for namespace in [None, Some("default"), Some("other")] {
            let mut options = Options::new();
            options.extend(namespace.map(|namespace| ("namespace", namespace.into())));
            let whole = keys(&list(&member, list_of, &options).await, key);
            assert_eq!(whole.len(), if namespace == Some("other") { 0 } else { 7 });
            options.insert("max", 2u32.into());
            let mut parts = Vec::new();
            loop {
                let rows = list(&member, list_of, &options).await;
                let Some(last) = rows.last() else { break };
                options.insert("after", text(last, "cursor").into());
                parts.extend(keys(&rows, key));
            }
            assert_eq!(parts, whole, "{list_of} of {namespace:?}");
            let (error, _) = manager(&stranger, list_of, &(options,)).await.unwrap_err();
            assert_eq!(error, "org.csid1.Error.NotAuthorized");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_after_is_refused() {
    let world = World::new();
    let (path, _serving) = world.listen();
    let client = super::harness::connect(&path).await;
    for (member, past, after) in [
        ("ListVolumes", false, "a"),
        ("ListVolumes", false, "a/b/c"),
        ("ListVolumes", false, "a/%zz"),
        ("ListClaims", false, "a/b"),
        ("ListClaims", true, "a/b/job"),
        ("ListClaims", true, "a/b/-1"),
        ("ListMounts", false, "a/b/c"),
        ("ListMounts", false, "a/b/c/d/e"),
    ] {
        let mut options = Options::from([("after", after.into())]);
        if past {
            options.insert("past", true.into());
        }
        let (error, message) = manager(&client, member, &(options,)).await.unwrap_err();
        assert_eq!(error, "org.csid1.Error.InvalidArgument", "{member} {after}: {message}");
    }
}
