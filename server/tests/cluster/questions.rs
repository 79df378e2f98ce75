//! Questions to a controller: inventory and validation. The controller runs on another node, and is the test.

use std::time::Duration;

use csi_proto::cluster::v1::call_ended::How;
use csi_proto::cluster::v1::change_ask::What;
use csi_proto::cluster::v1::controller_call::Method;
use csi_proto::cluster::v1::{
    Answer, AvailableCapacity, CallClass, CallEnded, ChangeAsk, ExternalSnapshot, ExternalVolume,
    InventoryAsk, InventoryPage, ListExternal, Listed, MeasureCapacity, PluginReport, ValidateAsk, Validated,
    VolumeAsk, VolumeRow, inventory_ask, inventory_page,
};
use tokio::task::JoinHandle;

use crate::attach::{Controller, healthy};
use crate::creations::failed;
use crate::operators::{csictl, operator};
use crate::site::{Refusal, Site, eventually, register};

/// Starts a controller whose csid knows the calls that change nothing.
pub async fn answering(site: &Site, server: usize) -> Controller {
    let mut controller = Controller::start(site, "c1", server).await;
    answers(&mut controller).await;
    controller
}

/// Reports that the controller's csid knows these calls.
pub async fn answers(controller: &mut Controller) {
    controller.session.report_as(PluginReport { calls: 1, ..healthy() }).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
}

fn asking(
    site: &Site,
    server: usize,
    who: &str,
    what: inventory_ask::What,
) -> JoinHandle<Result<InventoryPage, Refusal>> {
    let mut client = site.operator(server, who);
    let ask = InventoryAsk { plugin: "p".into(), what: Some(what) };
    tokio::spawn(async move {
        client.inventory(ask).await.map(|page| page.into_inner()).map_err(|status| Refusal::of(&status))
    })
}

fn list() -> inventory_ask::What {
    inventory_ask::What::List(ListExternal { token: "page 2".into(), max: 7, ..ListExternal::default() })
}

fn validating(site: &Site, server: usize) -> JoinHandle<Result<VolumeRow, Refusal>> {
    let mut client = site.operator(server, "all");
    let validate = ValidateAsk { volume: "data".into(), ..ValidateAsk::default() };
    let ask = ChangeAsk { what: Some(What::Validate(validate)) };
    tokio::spawn(async move {
        client.change(ask).await.map(|row| row.into_inner()).map_err(|status| Refusal::of(&status))
    })
}

fn validated(confirmed: bool, message: &str) -> How {
    let validated = Some(Validated { confirmed, message: message.into() });
    How::Answer(Answer { validated, ..Answer::default() })
}

#[tokio::test]
async fn inventory_is_what_the_controller_says() {
    let site = Site::start(2).await;
    let none = asking(&site, 0, "reads", list()).await.unwrap().unwrap_err();
    assert_eq!(none.kind, "Unavailable", "{none:?}");
    let mut controller = answering(&site, 0).await;
    let page = asking(&site, 0, "reads", list());
    let call = controller.called().await;
    let Some(Method::List(asked)) = &call.method else { panic!("{call:?}") };
    assert_eq!((asked.token.as_str(), asked.max, call.epoch, call.order.as_str()), ("page 2", 7, 0, ""));
    let volume = ExternalVolume { external_id: "ext-1".into(), capacity: 5, ..ExternalVolume::default() };
    let listed = Listed { volumes: vec![volume], snapshots: Vec::new(), next: "page 3".into() };
    controller.end(&call, How::Answer(Answer { listed: Some(listed.clone()), ..Answer::default() })).await;
    let page = page.await.unwrap().unwrap();
    assert_eq!((page.is, page.node.as_str()), (Some(inventory_page::Is::Listed(listed)), "c1"));

    let capacity = asking(&site, 0, "all", inventory_ask::What::Capacity(MeasureCapacity::default()));
    let call = controller.called().await;
    let available = Some(AvailableCapacity { bytes: 1 << 40 });
    controller.end(&call, How::Answer(Answer { available, ..Answer::default() })).await;
    let is = capacity.await.unwrap().unwrap().is;
    assert_eq!(is, Some(inventory_page::Is::Available(AvailableCapacity { bytes: 1 << 40 })));

    // Another server knows no such node.
    let other = asking(&site, 1, "reads", list()).await.unwrap().unwrap_err();
    assert_eq!(other.kind, "Unavailable", "{other:?}");
    let denied = asking(&site, 0, "local", list()).await.unwrap().unwrap_err();
    assert_eq!(denied.kind, "NotAuthorized", "{denied:?}");
    let long = ListExternal { token: "x".repeat(100_000), ..ListExternal::default() };
    let long = asking(&site, 0, "reads", inventory_ask::What::List(long)).await.unwrap().unwrap_err();
    assert_eq!(long.kind, "InvalidArgument", "{long:?}");
    assert!(!controller.is_called(Duration::from_millis(300)).await);
}

#[tokio::test]
async fn controller_that_fails_or_lies_is_no_answer() {
    let site = Site::start(1).await;
    let mut controller = answering(&site, 0).await;
    for (how, kind) in [
        (failed(CallClass::Refused, Some(12)), "PluginError"),
        (failed(CallClass::NotSent, None), "PluginError"),
        (How::NotStarted(true), "PluginUnavailable"),
        (How::Stale(true), "PluginError"),
        (validated(true, ""), "PluginError"),
        (How::Answer(Answer::default()), "PluginError"),
    ] {
        let page = asking(&site, 0, "reads", list());
        let call = controller.called().await;
        controller.end(&call, how).await;
        let error = page.await.unwrap().unwrap_err();
        assert_eq!(error.kind, kind, "{error:?}");
    }
    // One that does not answer holds nobody up for long.
    let page = asking(&site, 0, "reads", list());
    let _call = controller.called().await;
    let error = page.await.unwrap().unwrap_err();
    assert_eq!(error.kind, "TimedOut", "{error:?}");
    let page = asking(&site, 0, "reads", list());
    let _call = controller.called().await;
    controller.leave().await;
    let error = page.await.unwrap().unwrap_err();
    assert_eq!(error.kind, "Unavailable", "{error:?}");
}

/// A host without the grant is asked nothing, whatever it says to know. One with the grant that knows no such call is no answer.
#[tokio::test]
async fn lie_about_known_calls_answers_nothing() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let stranger = site.node("n1");
    let mut session = stranger.say_hello(0).await.unwrap().1;
    session.report_as(PluginReport { calls: u32::MAX, node_id: "id of n1".into(), ..healthy() }).await;
    eventually("the report is written", async || {
        crate::attach::row(&site, "node/n1").await.contains("\"attaches\":true")
    })
    .await;
    for what in [list(), inventory_ask::What::Capacity(MeasureCapacity::default())] {
        let none = asking(&site, 0, "all", what).await.unwrap().unwrap_err();
        assert_eq!(none.kind, "Unavailable", "{none:?}");
    }
    assert_eq!(validating(&site, 0).await.unwrap().unwrap_err().kind, "Unavailable");
    // A controller's host says that its csid knows none of these calls, or all that there will ever be.
    let mut controller = Controller::start(&site, "c1", 0).await;
    assert_eq!(asking(&site, 0, "all", list()).await.unwrap().unwrap_err().kind, "Unavailable");
    controller.session.report_as(PluginReport { calls: u32::MAX, ..healthy() }).await;
    let mut answer = None;
    eventually("the host is asked", async || {
        let page = asking(&site, 0, "all", list());
        let asked = tokio::time::timeout(Duration::from_secs(1), controller.called()).await;
        if let Ok(call) = &asked {
            // csid of an earlier release does not know the method.
            controller.say(CallEnded { call: call.call.clone(), epoch: call.epoch, how: None }).await;
            answer = Some(page.await.unwrap());
        }
        asked.is_ok()
    })
    .await;
    assert_eq!(answer.unwrap().unwrap_err().kind, "PluginError");
    let asked = tokio::time::timeout(Duration::from_millis(300), session.from_server.message()).await;
    assert!(asked.is_err(), "the stranger got {asked:?}");
}

/// An operator's terminal shows what a host says.
#[tokio::test]
async fn lie_in_the_answer_to_a_question_is_bounded() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let mut controller = answering(&site, 0).await;
    let asked = validating(&site, 0);
    let call = controller.called().await;
    controller.end(&call, validated(false, &format!("\u{1b}[2J\n{}", "y".repeat(100_000)))).await;
    let message = asked.await.unwrap().unwrap().validated.unwrap().message;
    assert!(message.len() <= 1100 && !message.contains(char::is_control), "{}", message.len());

    let volume = ExternalVolume {
        external_id: "\u{1b}[2J\nforged".into(),
        capacity: u64::MAX,
        published_node_ids: vec!["\u{1b}]0;x\u{7}".into()],
        abnormal: true,
    };
    let snapshot = ExternalSnapshot {
        id: "\u{1b}[2J".into(),
        external_id: "a\nb".into(),
        size: u64::MAX,
        created_usec: u64::MAX,
        ready: true,
    };
    let file = operator(&site, "all");
    for (words, answer) in [
        ("--operator plugin volumes p", {
            let listed = Listed { volumes: vec![volume], snapshots: Vec::new(), next: String::new() };
            Answer { listed: Some(listed), ..Answer::default() }
        }),
        ("--operator snapshots p", {
            let listed = Listed { volumes: Vec::new(), snapshots: vec![snapshot], next: String::new() };
            Answer { listed: Some(listed), ..Answer::default() }
        }),
        (
            "--operator plugin capacity p",
            Answer { available: Some(AvailableCapacity { bytes: u64::MAX }), ..Answer::default() },
        ),
    ] {
        let said = async { csictl(&file, words).await };
        let answered = async {
            let call = controller.called().await;
            controller.end(&call, How::Answer(answer)).await;
        };
        let (said, ()) = tokio::join!(said, answered);
        let is_shown = |text: &str| !text.contains(|c: char| c.is_control() && c != '\n');
        assert!(is_shown(&said.out) && is_shown(&said.err), "{words}: {said:?}");
        assert!(!said.out.lines().any(|line| line.starts_with("forged")), "{words}: {said:?}");
    }
    // A page that is too large ends the host's session, and holds no operator up.
    let page = asking(&site, 0, "all", list());
    let call = controller.called().await;
    let listed = Listed { next: "x".repeat(8 << 20), ..Listed::default() };
    controller.end(&call, How::Answer(Answer { listed: Some(listed), ..Answer::default() })).await;
    let error = page.await.unwrap().unwrap_err();
    assert!(["Unavailable", "PluginError"].contains(&error.kind.as_str()), "{error:?}");
}

#[tokio::test]
async fn volume_is_validated_by_its_plugin() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let none = validating(&site, 0).await.unwrap().unwrap_err();
    assert_eq!(none.kind, "Unavailable", "{none:?}");
    let mut controller = answering(&site, 0).await;
    for (how, confirmed) in [(validated(true, ""), true), (validated(false, "no such mode"), false)] {
        let asked = validating(&site, 0);
        let call = controller.called().await;
        let Some(Method::Validate(of)) = &call.method else { panic!("{call:?}") };
        assert_eq!((call.order.as_str(), call.epoch, call.volume.as_str()), ("ext-data", 0, "data"));
        assert_eq!(of.capabilities[0].access_mode, "single-node-writer");
        assert_eq!(of.volume_context["share"], "hunter2");
        controller.end(&call, how).await;
        let answer = asked.await.unwrap().unwrap().validated.unwrap();
        assert_eq!((answer.confirmed, answer.message.is_empty()), (confirmed, confirmed), "{answer:?}");
    }
    let asked = validating(&site, 0);
    let call = controller.called().await;
    controller.end(&call, failed(CallClass::Refused, Some(5))).await;
    let gone = asked.await.unwrap().unwrap_err();
    assert_eq!(gone.kind, "NotFound", "{gone:?}");
}

#[tokio::test]
async fn volume_that_is_not_confirmed_is_not_registered() {
    let site = Site::start(1).await;
    let mut controller = answering(&site, 0).await;
    let registering = || {
        let mut client = site.operator(0, "all");
        let ask = register("data", "single-node-writer");
        tokio::spawn(async move { client.change(ask).await.map_err(|status| Refusal::of(&status)) })
    };
    for (how, kind) in [
        (validated(false, "no such mode"), "InvalidArgument"),
        (failed(CallClass::Refused, Some(5)), "NotFound"),
    ] {
        let registered = registering();
        let call = controller.called().await;
        controller.end(&call, how).await;
        let error = registered.await.unwrap().unwrap_err();
        assert_eq!(error.kind, kind, "{error:?}");
        let ask = VolumeAsk { volume: "data".into(), ..VolumeAsk::default() };
        assert!(site.operator(0, "all").volume(ask).await.is_err());
    }
    let registered = registering();
    let call = controller.called().await;
    controller.end(&call, validated(true, "")).await;
    registered.await.unwrap().unwrap();
    // It is registered so already, and nobody is asked.
    registering().await.unwrap().unwrap();
    assert!(!controller.is_called(Duration::from_millis(300)).await);
}
