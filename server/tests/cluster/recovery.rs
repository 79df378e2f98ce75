//! What tests of a recovery from a backup of etcd share: an operator's steps, and what a node says to hold.

use std::time::{Duration, Instant};

use csi_proto::cluster::v1::resume_ask::Step;
use csi_proto::cluster::v1::{
    Granted, HeldClaim, HeldClaims, NodeAsk, RefusedClaim, RestoredAsk, ResumeAsk, ServerRows, ServersAsk,
    Use, Welcome,
};

use crate::site::{First, Node, Refusal, Session, Site};

pub async fn servers(site: &Site, server: usize) -> ServerRows {
    site.admin(server, "all").servers(ServersAsk {}).await.unwrap().into_inner()
}

pub async fn phase(site: &Site) -> (u64, String, Vec<String>) {
    let rows = servers(site, 0).await;
    (rows.generation, rows.mode, rows.awaited)
}

pub fn is(generation: u64, mode: &str, awaited: &[&str]) -> (u64, String, Vec<String>) {
    (generation, mode.into(), awaited.iter().map(|&node| node.into()).collect())
}

pub async fn restored(site: &Site, server: usize, generation: u64) -> Result<ServerRows, Refusal> {
    let ask = RestoredAsk { generation, past: 0 };
    let done = site.admin(server, "all").restored(ask).await;
    done.map(tonic::Response::into_inner).map_err(|status| Refusal::of(&status))
}

pub async fn step(site: &Site, server: usize, ask: ResumeAsk) -> Result<ServerRows, Refusal> {
    let generation = servers(site, 0).await.generation;
    let done = site.admin(server, "all").resume(ResumeAsk { generation, ..ask }).await;
    done.map(tonic::Response::into_inner).map_err(|status| Refusal::of(&status))
}

/// Ends a recovery.
pub async fn resume(site: &Site) -> Result<ServerRows, Refusal> {
    step(site, 0, ResumeAsk { step: Step::End.into(), ..ResumeAsk::default() }).await
}

/// Fences a node that is awaited.
pub async fn leave_out(site: &Site, server: usize, node: &str) -> Result<ServerRows, Refusal> {
    let revision = match site.admin(0, "all").node(NodeAsk { node: node.into() }).await {
        Ok(row) => row.into_inner().revision,
        Err(_) => 1,
    };
    let node = node.to_owned();
    step(site, server, ResumeAsk { node, revision, by_hand: true, step: Step::Fence.into(), generation: 0 })
        .await
}

/// Says as an operator that the refused claims of a node were looked at.
pub async fn forget(site: &Site, node: &str) {
    let rows = servers(site, 0).await;
    let revision = rows.refused.iter().find(|of| of.node == node).expect("nothing was refused").revision;
    let (node, step_of) = (node.to_owned(), Step::Forget.into());
    step(site, 0, ResumeAsk { node, revision, step: step_of, ..ResumeAsk::default() }).await.unwrap();
}

/// Ends a recovery for which nothing is missing.
pub async fn resumed(site: &Site, generation: u64) {
    assert_eq!(phase(site).await, is(generation, "recovering", &[]), "a recovery ended by itself");
    let rows = resume(site).await.unwrap();
    assert_eq!((rows.generation, rows.mode.as_str()), (generation, "normal"));
}

/// Joins, and returns the Welcome.
pub async fn welcome(node: &Node, server: usize) -> (Welcome, Session) {
    match node.say_hello(server).await.unwrap() {
        (First::Welcome(welcome), session) => (welcome, session),
        (refused, _) => panic!("{refused:?}"),
    }
}

pub fn writing(access_mode: &str) -> Use {
    let (mode, attachment_mode) = ("write".into(), "file-system".into());
    Use { mode, access_mode: access_mode.into(), attachment_mode }
}

/// Returns what a node that has claimed a volume for `web` says to hold.
pub fn held(node: &Node, volume: &str, claim: &str) -> HeldClaim {
    HeldClaim {
        claim: claim.into(),
        call: "call 1".into(),
        volume: volume.into(),
        consumer: "web".into(),
        uid: 1000,
        usage: Some(writing("single-node-writer")),
        plugin: "p".into(),
        external_id: format!("ext-{volume}"),
        granted_boot: node.hello.boot.clone(),
        ..HeldClaim::default()
    }
}

/// Makes the same of a claim that a server has granted with an attachment.
pub fn held_attached(node: &Node, volume: &str, granted: &Granted) -> HeldClaim {
    HeldClaim {
        external_node_id: granted.external_node_id.clone(),
        publish_context: granted.publish_context.clone(),
        ..held(node, volume, &granted.claim)
    }
}

pub fn page(node: &Node, generation: u64, claims: Vec<HeldClaim>, last: bool) -> HeldClaims {
    HeldClaims { boot: node.hello.boot.clone(), generation, claims, last }
}

/// Says a page of what a node holds, of which nothing is refused.
pub async fn hold(node: &Node, server: usize, page: HeldClaims) -> Result<(), Refusal> {
    let refused = try_hold(node, server, page).await?;
    assert!(refused.is_empty(), "{refused:?}");
    Ok(())
}

/// Says a page of what a node holds. Returns what was refused of it.
pub async fn try_hold(node: &Node, server: usize, page: HeldClaims) -> Result<Vec<RefusedClaim>, Refusal> {
    // The row changes with the report of the session, and the node says it once more then, as csid does.
    let end = Instant::now() + Duration::from_secs(20);
    loop {
        match node.client(server).hold(page.clone()).await.map_err(|status| Refusal::of(&status)) {
            Err(refusal) if refusal.kind == "Unavailable" && Instant::now() < end => {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            held => return held.map(|held| held.into_inner().refused),
        }
    }
}

/// Returns the claims of a volume in etcd, by NODE/CONSUMER.
pub async fn claims(site: &Site, volume: &str) -> Vec<String> {
    let prefix = format!("/csid/v1/vol/default/{volume}/claim/");
    let found = site.raw().await.below(&prefix).await;
    found.into_iter().map(|kv| String::from_utf8(kv.key).unwrap()[prefix.len()..].to_owned()).collect()
}
