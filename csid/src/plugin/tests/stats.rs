//! What is counted of RPCs.

use tonic::Code;

use super::*;
use crate::plugin::tests::calls::{call, usage};

/// Deadlines that a busy machine does not reach before the call is sent.
const LATE: Duration = Duration::from_secs(2);

/// How often an RPC of `p` ended with a code.
async fn count(host: &Host, rpc: &str, code: Code) -> u64 {
    let stats = host.plugins.stats("p").await.unwrap();
    let mut counts = stats.rpcs.iter().filter(|count| (count.rpc, count.code) == (rpc, code));
    counts.next().map_or(0, |count| count.took.count())
}

#[tokio::test]
async fn each_rpc_is_counted_by_its_end() {
    let host = Host::new();
    let mut fake = host.fake();
    fake.start();
    host.register(&fake).await;
    let (ready, usage) = (host.ready().await, usage());
    let stage = || ready.stage(call(&usage, soon(LONG)));
    stage().await.unwrap();
    stage().await.unwrap();
    fake.script().answer = Some(Err((Code::FailedPrecondition, "no".into())));
    stage().await.unwrap_err();
    // One that is not answered in time, and one that nobody waits for any more.
    fake.script().answer = None;
    ready.stage(call(&usage, soon(LATE))).await.unwrap_err();
    tokio::time::timeout(LATE, stage()).await.unwrap_err();
    // Not sent, so no RPC.
    ready.stage(call(&usage, Instant::now())).await.unwrap_err();

    for (code, times) in
        [(Code::Ok, 2), (Code::FailedPrecondition, 1), (Code::DeadlineExceeded, 1), (Code::Cancelled, 1)]
    {
        assert_eq!(count(&host, "NodeStageVolume", code).await, times, "{code:?}");
    }
    assert!(count(&host, "Probe", Code::Ok).await > 0, "csid's own looks count too");
    let stats = host.plugins.stats("p").await.unwrap();
    let late = stats.rpcs.iter().find(|count| count.code == Code::DeadlineExceeded).unwrap();
    assert!(u128::from(late.took.longest_usec) >= LATE.as_micros(), "{late:?}");

    // Whatever instance: the counts are the plugin's. csid runs none of them, and so measures nothing else.
    fake.script().answer = Some(Ok(()));
    let _other = host.instance("b", true, false).await;
    host.ready().await.stage(call(&usage, soon(LONG))).await.unwrap();
    assert_eq!(count(&host, "NodeStageVolume", Code::Ok).await, 3);
    let stats = host.plugins.stats("p").await.unwrap();
    let instances: Vec<_> =
        stats.instances.iter().map(|of| (of.instance.as_str(), of.unit.as_str())).collect();
    assert_eq!(instances, [("b", ""), ("default", "")]);
    assert_eq!(stats.instances[0].resources, Default::default());
    assert_eq!(host.plugins.rpcs().len(), 1);
}
