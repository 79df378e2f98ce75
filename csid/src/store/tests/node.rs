use super::*;

fn named(directory: &Path, node: Option<&str>) -> Store {
    opened_as(directory, node).unwrap().0
}

fn called(directory: &Path, name: &str) {
    let db = Connection::open(database(directory)).unwrap();
    checksum::add(&db).unwrap();
    db.execute("UPDATE meta SET value = ?1, sum = checksum('node', ?1) WHERE key = 'node'", [name]).unwrap();
}

/// What is in the file; the first commit of any kind has it.
fn kept(directory: &Path) -> Option<String> {
    let db = Connection::open(database(directory)).unwrap();
    let mut statement = db.prepare("SELECT value FROM meta WHERE key = 'node'").unwrap();
    statement.query_map([], |row| row.get(0)).unwrap().next().transpose().unwrap()
}

#[tokio::test]
async fn renamed_host_keeps_its_name_in_claims() {
    let (_root, directory) = temporary();
    let store = named(&directory, None);
    let host = rustix::system::uname().nodename().to_str().unwrap().to_owned();
    assert_eq!(store.node(), host);
    store.close().await.unwrap();
    assert_eq!(kept(&directory), None);
    let store = named(&directory, None);
    samples::swap_in(&store, samples::new(samples::record("data", &[]))).await.unwrap();
    store.close().await.unwrap();
    assert_eq!(kept(&directory), Some(host.clone()));

    // As if the host had had another name then.
    called(&directory, "earlier");
    let store = named(&directory, None);
    assert_eq!(store.node(), "earlier");
    store.close().await.unwrap();

    // What is configured is kept, too.
    let store = named(&directory, Some("configured"));
    assert_eq!(store.node(), "configured");
    store.commit(vec![event("x")], Durability::Disk).await.unwrap();
    store.close().await.unwrap();
    let store = named(&directory, None);
    assert_eq!(store.node(), "configured");
    store.close().await.unwrap();

    // A new journal has it from the damaged one.
    let db = Connection::open(database(&directory)).unwrap();
    db.execute("UPDATE meta SET sum = sum + 1 WHERE key = 'boot' OR key = 'modify_index'", []).unwrap();
    drop(db);
    let store = named(&directory, None);
    assert!(store.writable().is_err());
    assert_eq!(store.node(), "configured");
    store.replace(Vec::new()).await.unwrap();
    store.close().await.unwrap();
    assert_eq!(kept(&directory).as_deref(), Some("configured"));
    assert_eq!(named(&directory, None).node(), "configured");
}

#[tokio::test]
async fn node_ids_are_kept_in_a_new_journal() {
    let (_root, directory) = temporary();
    let open = || opened(&directory).unwrap();
    let put = |plugin: &str, node_id: &str| Change::PutNodeId(plugin.into(), node_id.into());
    let (store, loaded) = open();
    assert!(loaded.node_ids.is_empty());
    let gone = Change::DeleteNodeId("b".into());
    let changes = vec![put("a", "node-1"), put("b", "x"), put("a", "node-2"), gone];
    store.commit(changes, Durability::Disk).await.unwrap();
    store.close().await.unwrap();
    let expected = BTreeMap::from([("a".to_owned(), "node-2".to_owned())]);
    let (store, loaded) = open();
    assert_eq!(loaded.node_ids, expected);
    store.close().await.unwrap();

    let db = Connection::open(database(&directory)).unwrap();
    db.execute("UPDATE meta SET sum = sum + 1 WHERE key = 'modify_index'", []).unwrap();
    drop(db);
    let (store, loaded) = open();
    assert!(store.writable().is_err());
    assert_eq!(loaded.node_ids, expected, "as far as it can be read");
    store.replace(Vec::new()).await.unwrap();
    store.close().await.unwrap();
    assert_eq!(open().1.node_ids, expected);
}

#[tokio::test]
async fn fence_is_kept_until_it_is_deleted() {
    let (_root, directory) = temporary();
    let open = || opened(&directory).unwrap();
    let fence = |number| JournaledFence { number, boot: "boot marker".into() };
    let (store, loaded) = open();
    assert_eq!(loaded.fence, None);
    for number in [1, 2] {
        store.commit(vec![Change::PutFence(fence(number))], Durability::Disk).await.unwrap();
    }
    store.close().await.unwrap();
    let (store, loaded) = open();
    assert_eq!(loaded.fence, Some(fence(2)), "the later one");
    store.close().await.unwrap();

    let db = Connection::open(database(&directory)).unwrap();
    db.execute("UPDATE meta SET sum = sum + 1 WHERE key = 'modify_index'", []).unwrap();
    drop(db);
    let (store, loaded) = open();
    assert!(store.writable().is_err());
    assert_eq!(loaded.fence, Some(fence(2)), "as far as it can be read");
    store.replace(Vec::new()).await.unwrap();
    store.close().await.unwrap();
    let (store, loaded) = open();
    assert_eq!(loaded.fence, Some(fence(2)), "a new journal is of the same boot");
    store.commit(vec![Change::DeleteFence], Durability::Disk).await.unwrap();
    store.close().await.unwrap();
    assert_eq!(open().1.fence, None);
}

/// A value that is not a fence is damage, and does not stand for no fence.
#[tokio::test]
async fn fence_that_is_not_one_is_damage() {
    let (_root, directory) = temporary();
    let open = || opened(&directory).unwrap();
    let (store, _) = open();
    let fence = JournaledFence { number: 1, boot: "boot marker".into() };
    store.commit(vec![Change::PutFence(fence)], Durability::Disk).await.unwrap();
    store.close().await.unwrap();
    let db = Connection::open(database(&directory)).unwrap();
    checksum::add(&db).unwrap();
    db.execute("UPDATE meta SET value = '{}', sum = checksum('fence', '{}') WHERE key = 'fence'", [])
        .unwrap();
    drop(db);
    assert!(open().0.writable().is_err());
}
