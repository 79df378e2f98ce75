//! A volume goes from one host to another, and stays a host's over its reboot.

use std::path::Path;

use csi_proto::cluster::v1::ReleaseAsk;
use csid_client::{Kind, MountOptions};
use csid_tests::ask::*;
use csid_tests::world::{World, eventually, refusal, world};

use crate::site::Site;
use crate::*;

/// Runs the second host until the first has had its volume back.
async fn second(w: &mut World, link: &Path, mut first: Other) {
    let client = start_node(w, "n2", link).await;
    first.hear("it is mine").await;
    let (kind, error) = refusal(mount_registered(&client, "data", "web").await);
    assert_eq!(
        (kind, error.details.holders),
        (Kind::ClaimConflict, vec!["n1/web".to_owned()]),
        "{}",
        error.message
    );
    assert_eq!(w.leftovers(), Vec::<String>::new(), "a refused mount left something");
    assert!(claims(&client).await.is_empty());
    first.say("refused");
    first.hear("it is free").await;
    mount_registered(&client, "data", "web").await.unwrap();
    first.say("it is mine");
    first.hear("refused").await;
    unmount(&client, "data", "web").await.unwrap();
    first.say("it is free");
    w.nothing_left(&client).await;
}

#[test]
fn volume_is_had_by_one_host_after_the_other() {
    world(async |w| {
        let site = Site::start(2).await;
        site.register("data", "single-node-writer").await;
        let (client, _link) = n1(w, &site).await;
        let (mut other, first) = Other::pair();
        let link = site.node("n2");
        let run = link.run().to_owned();
        let second = std::thread::spawn(move || world(async move |w| Box::pin(second(w, &run, first)).await));
        mount_registered(&client, "data", "web").await.unwrap();
        let staged = w.plugin("p").volume_calls().remove(0).call;
        let shared = ("share".to_owned(), "hunter2".to_owned());
        assert!(staged.context.contains(&shared), "the plugin got another context: {:?}", staged.context);
        other.say("it is mine");
        other.hear("refused").await;
        servers_have(&site, "data", &["n1/web"]).await;
        unmount(&client, "data", "web").await.unwrap();
        other.say("it is free");
        other.hear("it is mine").await;
        let (kind, error) = refusal(claim(&client, "data", "web").await);
        assert_eq!((kind, error.details.holders), (Kind::ClaimConflict, vec!["n2/web".to_owned()]));
        other.say("refused");
        other.hear("it is free").await;
        mount_registered(&client, "data", "web").await.unwrap();
        unmount(&client, "data", "web").await.unwrap();
        w.nothing_left(&client).await;
        servers_have(&site, "data", &[]).await;
        second.join().unwrap();
    });
}

#[test]
fn claim_is_granted_again_after_a_reboot() {
    world(async |w| {
        let site = one_server(&["data"]).await;
        let (client, _link) = n1(w, &site).await;
        let other = site.node("n2");
        let _session = other.join(0).await;
        mount_registered(&client, "data", "web").await.unwrap();
        let before = claims_at_servers(&site, "data").await;
        w.reboot().await;
        let refused = other.claim(0, "data").await.unwrap_err();
        assert_eq!(refused.holders, ["n1/web"], "a host that is off lost its claim");
        // Without a server nothing is mounted.
        site.servers[0].signal(rustix::process::Signal::STOP);
        let client = w.start().await;
        healthy(&client, "p").await;
        tokio::time::sleep(std::time::Duration::from_secs(2)).await;
        assert_eq!(row(&client, "data", "web").await.unwrap().state, "waiting");
        site.servers[0].signal(rustix::process::Signal::CONT);
        eventually("the mount is there again", async || {
            row(&client, "data", "web").await.is_some_and(|row| row.state == "mounted")
        })
        .await;
        assert_eq!(claims_at_servers(&site, "data").await, before, "the claim is another one");
        unmount(&client, "data", "web").await.unwrap();
        servers_have(&site, "data", &[]).await;
        w.nothing_left(&client).await;
    });
}

#[test]
fn wait_ends_when_another_host_lets_go() {
    world(async |w| {
        let site = one_server(&["data"]).await;
        let (client, _link) = n1(w, &site).await;
        let other = site.node("n2");
        let _session = other.join(0).await;
        let claim = other.claim(0, "data").await.unwrap();
        let options = MountOptions { wait_usec: Some(60_000_000), ..MountOptions::default() };
        let waits = client.mount(NAMESPACE, "data", "web", options);
        let lets_go = async {
            eventually("the mount waits", async || {
                let operations = client.list_operations().await.unwrap();
                operations.iter().any(|operation| operation.step == "waiting for claims")
            })
            .await;
            other.detached(0, "data", &claim).await.unwrap();
        };
        let (mounted, ()) = tokio::join!(waits, lets_go);
        mounted.unwrap();
        servers_have(&site, "data", &["n1/web"]).await;
        unmount(&client, "data", "web").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn release_by_an_operator_unmounts_the_volume() {
    world(async |w| {
        let site = one_server(&["data"]).await;
        let (client, _link) = n1(w, &site).await;
        let path = mount_registered(&client, "data", "web").await.unwrap().source;
        let open = std::fs::File::create(Path::new(&path).join("open")).unwrap();
        let release = |deadline_ms| ReleaseAsk { deadline_ms, ..release_ask("data", "n1") };
        let mut operator = site.operator(0, "all");
        let late = operator.release(release(2_000)).await.unwrap_err();
        assert_eq!(late.code(), tonic::Code::DeadlineExceeded, "a volume in use was released: {late:?}");
        assert!(row(&client, "data", "web").await.is_some());
        drop(open);
        operator.release(release(30_000)).await.unwrap();
        w.nothing_left(&client).await;
        assert!(claims(&client).await.is_empty());
    });
}
