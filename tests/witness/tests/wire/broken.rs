//! The end of one side is the end of the other's connection.

use std::time::{Duration, Instant};

use csi_proto::csi::v1::node_client::NodeClient;
use csi_proto::csi::v1::{NodeStageVolumeRequest, NodeUnstageVolumeRequest};
use tokio::io::AsyncReadExt;
use tokio::net::UnixStream;
use tokio::time::timeout;
use tonic::Code;

use crate::plugin::ENDLESS;
use crate::world::{AGES, World, probe};

fn endless() -> NodeStageVolumeRequest {
    NodeStageVolumeRequest { volume_id: ENDLESS.into(), ..Default::default() }
}

#[tokio::test]
async fn dying_plugin_ends_its_calls_as_without_a_witness() {
    let mut world = World::new("");
    let (through, past) = (world.co().await, world.direct().await);
    let calls = [through, past].map(|channel| {
        tokio::spawn(async move { NodeClient::new(channel).node_stage_volume(endless()).await.unwrap_err() })
    });
    world.until_staged(2).await;
    world.kill_plugin();
    let mut codes = Vec::new();
    for call in calls {
        let error = timeout(AGES, call).await.expect("the call ends").unwrap();
        assert!(std::error::Error::source(&error).is_some(), "no plugin said this: {error:?}");
        codes.push(error.code());
    }
    assert_eq!(codes[0], codes[1]);
    world.until_log(r#""event":"closed","connection":1"#).await;
    world.until_log(r#""event":"ended","call":1}"#).await;

    // It comes back, and so does the CO.
    world.start_plugin();
    probe(&world.co().await).await.unwrap();
}

#[tokio::test]
async fn without_a_plugin_a_connection_ends() {
    let mut world = World::new("");
    world.kill_plugin();
    let mut stream = UnixStream::connect(world.at("co.sock")).await.unwrap();
    let read = timeout(AGES, stream.read(&mut [0])).await.expect("the connection ends");
    assert_eq!(read.unwrap(), 0);
    assert_eq!(world.log(), "");
}

#[tokio::test]
async fn plugin_that_starts_again_is_waited_for() {
    let mut world = World::new("");
    // Where the machine stands still for a second it is not; then once more.
    for _ in 0..20 {
        world.kill_plugin();
        let mut stream = UnixStream::connect(world.at("co.sock")).await.unwrap();
        // The witness has tried meanwhile.
        tokio::time::sleep(Duration::from_millis(50)).await;
        world.start_plugin();
        // The server's side of HTTP/2 speaks first.
        if timeout(AGES, stream.read(&mut [0])).await.expect("it speaks or ends").unwrap() > 0 {
            return;
        }
    }
    panic!("no connection was kept until the plugin came");
}

#[tokio::test]
async fn co_that_gives_up_cancels_its_call_at_the_plugin() {
    let world = World::new("");
    let co = world.co().await;
    let mut node = NodeClient::new(co.clone());
    let call = tokio::spawn(async move { node.node_stage_volume(endless()).await });
    world.until_staged(1).await;
    call.abort();
    world.until_log(r#""event":"ended","call":1}"#).await;
    world.until(|world| *world.plugin.cancelled.lock().unwrap() == 1).await;
    // The connection stays.
    probe(&co).await.unwrap();
    assert!(!world.log().contains("closed"), "{}", world.log());
}

/// The log has the calls in the order in which the CO gave up one and sent the other.
#[tokio::test]
async fn abandoned_call_is_not_in_flight_at_the_next() {
    let world = World::new("");
    let mut node = NodeClient::new(world.co().await);
    for round in 1..=100 {
        let stage = node.node_stage_volume(endless());
        tokio::select! {
            _ = stage => panic!("it is never answered"),
            () = world.until_staged(round) => {}
        }
        let unstage = NodeUnstageVolumeRequest { volume_id: ENDLESS.into(), ..Default::default() };
        node.node_unstage_volume(unstage).await.unwrap();
    }
    let breaches = world.witness.verdict().unwrap().breaches;
    assert!(breaches.iter().all(|breach| breach.rule != 18), "{breaches:?}");
}

#[tokio::test]
async fn deadline_of_the_co_is_its_own() {
    let world = World::new("");
    let mut request = tonic::Request::new(endless());
    request.set_timeout(Duration::from_millis(20));
    let error = NodeClient::new(world.co().await).node_stage_volume(request).await.unwrap_err();
    assert!(matches!(error.code(), Code::DeadlineExceeded | Code::Cancelled), "{error:?}");
    world.until_log(r#""event":"ended","call":1"#).await;
}

/// What the witness costs a call, printed. The bound only says that nothing waits for a timer.
#[tokio::test]
async fn call_is_delayed_by_a_fraction_of_a_millisecond() {
    let world = World::new("");
    let (through, past) = (world.co().await, world.direct().await);
    let mut times = [Vec::new(), Vec::new()];
    for _ in 0..300 {
        for (channel, times) in [&past, &through].into_iter().zip(&mut times) {
            let start = Instant::now();
            probe(channel).await.unwrap();
            times.push(start.elapsed());
        }
    }
    let [past, through] = times.map(|mut times| {
        times.sort_unstable();
        times[times.len() / 2]
    });
    println!("median of a call past the witness {past:?}, through it {through:?}");
    assert!(through < past + Duration::from_millis(20));
}

/// A call that the witness has queued for the plugin ends with the plugin's connection.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queued_calls_end_with_the_plugin() {
    let mut world = World::new("");
    for _ in 0..20 {
        let co = world.co().await;
        probe(&co).await.unwrap();
        let probing: Vec<_> = (0..8)
            .map(|_| {
                let co = co.clone();
                tokio::spawn(async move { while probe(&co).await.is_ok() {} })
            })
            .collect();
        tokio::task::yield_now().await;
        world.kill_plugin();
        for probing in probing {
            timeout(AGES, probing).await.expect("the calls end").unwrap();
        }
        world.start_plugin();
    }
}
