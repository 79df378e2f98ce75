//! A call outlives its connection. CancelOperation ends it.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::time::Duration;

use zbus::{Connection, Message, OwnedVariant};

use super::harness::{
    Bus, MANAGER, MEMBER, NOBODY, Options, ROOT, World, connect, connect_as, is_root, manager, raw,
};
use super::on_bus::{QUICK, Script, polkit};

async fn operations(client: &Connection) -> Vec<BTreeMap<String, OwnedVariant>> {
    manager(client, "ListOperations", &()).await.unwrap().body().deserialize().unwrap()
}

pub async fn until<F: AsyncFn() -> bool>(what: &str, holds: F) {
    for _ in 0..500 {
        if holds().await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("{what}");
}

#[tokio::test(flavor = "multi_thread")]
async fn cancel_ends_an_operation_and_disconnect_does_not() {
    if !is_root() {
        return;
    }
    let world = World::new();
    let (socket, _serving) = world.listen();
    let other = connect(&socket).await;
    let spec =
        Options::from([("supervision", "external".into()), ("socket", "/run/nothing/csi.sock".into())]);
    manager(&other, "RegisterPlugin", &("absent", spec)).await.unwrap();
    let options = Options::from([
        ("plugin", "absent".into()),
        ("external-id", "v".into()),
        ("operation-id", "first".into()),
    ]);
    let call = Message::method_call("/org/csid1", "Mount").interface(MANAGER);
    let call = call.build(&("ns", "vol", "job", options)).unwrap();
    let path = socket.clone();
    let sent = tokio::task::spawn_blocking(move || {
        let mut stream = raw(&path);
        stream.write_all(call.data()).unwrap();
        stream
    });
    let mut stream = sent.await.unwrap();
    until("the mount is under way", async || operations(&other).await.len() == 1).await;
    // csid hangs up when it no longer serves the connection.
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    let lost = tokio::task::spawn_blocking(move || stream.read_to_end(&mut Vec::new()));
    let _answered = lost.await.unwrap().unwrap();
    let rows = operations(&other).await;
    assert_eq!(<&str>::try_from(&rows[0]["id"]).unwrap(), "first");
    assert_eq!(<&str>::try_from(&rows[0]["subject"]).unwrap(), "ns/vol");

    let member = connect_as(&socket, MEMBER).await;
    let (name, text) = manager(&member, "CancelOperation", &"first").await.unwrap_err();
    assert_eq!(name, "org.csid1.Error.NotAuthorized", "{text}");
    assert!(text.contains("org.csid1.manage"), "another's operation: {text}");

    manager(&other, "CancelOperation", &"first").await.unwrap();
    until("the operation has ended", async || operations(&other).await.is_empty()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn shared_operation_id_is_not_cancelled_for_others() {
    let Some(bus) = is_root().then(|| Bus::start(false)).flatten() else { return };
    let world = World::new();
    let _serving = bus.serve(&world, QUICK).await;
    let _authority = polkit(&bus, Script::Yes).await;
    let root = bus.connect_as(ROOT).await;
    let spec =
        Options::from([("supervision", "external".into()), ("socket", "/run/nothing/csi.sock".into())]);
    manager(&root, "RegisterPlugin", &("absent", spec)).await.unwrap();
    let (member, nobody) = (bus.connect_as(MEMBER).await, bus.connect_as(NOBODY).await);
    for (client, volume) in [(member.clone(), "a"), (nobody.clone(), "b")] {
        let options = Options::from([
            ("plugin", "absent".into()),
            ("external-id", volume.into()),
            ("operation-id", "same".into()),
        ]);
        tokio::spawn(async move { manager(&client, "Mount", &("ns", volume, "job", options)).await });
    }
    until("both are under way", async || operations(&root).await.len() == 2).await;
    let (name, text) = manager(&root, "CancelOperation", &"same").await.unwrap_err();
    assert_eq!(name, "org.csid1.Error.InvalidArgument");
    assert!(text.contains("1, 65534"), "{text}");
    manager(&nobody, "CancelOperation", &"same").await.unwrap();
    until("one's own has ended", async || operations(&root).await.len() == 1).await;
    assert_eq!(u32::try_from(&operations(&root).await[0]["uid"]).unwrap(), MEMBER.uid);
    manager(&root, "CancelOperation", &"same").await.unwrap();
    until("the other has ended", async || operations(&root).await.is_empty()).await;
}
