//! Random histories: nodes claim one volume in turn, and its controller answers late, wrongly or not at all. A node that has the claim has the
//! volume attached until it gives the claim back, and no other node has.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use csi_proto::cluster::v1::call_ended::How;
use csi_proto::cluster::v1::{Answer, CallClass, ControllerCall};

use crate::attach::{Controller, attached, failed, is_publish, node_id, row, user};
use crate::site::{Node, Refusal, Site, eventually};

const ROUNDS: usize = 12;
const NODES: [&str; 3] = ["n1", "n2", "n3"];

/// The storage, and which node uses it.
#[derive(Default)]
struct World {
    /// The plugin's name of the node, and the device there.
    attached: Option<(String, String)>,
    user: Option<String>,
    devices: u32,
    greatest: u64,
    calls: u32,
    grants: u32,
}

impl World {
    /// Does what a call asks for. Returns the device.
    fn apply(&mut self, call: &ControllerCall) -> String {
        let node = node_id(call).to_owned();
        if !is_publish(call) {
            if self.attached.as_ref().is_some_and(|(at, _)| *at == node) {
                self.attached = None;
            }
            return String::new();
        }
        self.devices += 1;
        let device = format!("/dev/{}", self.devices);
        if let Some((at, _)) = &self.attached {
            assert_eq!(*at, node, "a volume of one node was attached to two");
        }
        self.attached = Some((node, device.clone()));
        device
    }

    fn check(&mut self, call: &ControllerCall) {
        assert!(call.epoch > self.greatest, "an epoch came again: {call:?}");
        self.greatest = call.epoch;
        self.calls += 1;
        if !is_publish(call) {
            assert_ne!(self.user.as_deref(), Some(node_id(call)), "a volume in use was detached");
        }
    }
}

/// A generator of numbers, of which each seed has its own.
#[derive(Clone)]
pub struct Dice(pub u64);

impl Dice {
    /// Returns a number that is less than `sides`.
    pub fn roll(&mut self, sides: u64) -> u64 {
        // SplitMix64: near seeds give unlike numbers.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % sides
    }
}

/// Answers calls until the task is aborted.
async fn control(mut controller: Controller, world: Arc<Mutex<World>>, mut dice: Dice) {
    loop {
        let call = controller.called_within(Duration::from_secs(600)).await;
        world.lock().unwrap().check(&call);
        tokio::time::sleep(Duration::from_millis(dice.roll(20))).await;
        // Whether the plugin does it, whatever is answered.
        let device = (dice.roll(2) == 0).then(|| world.lock().unwrap().apply(&call));
        let how = match dice.roll(10) {
            0 => {
                controller.join_again(0).await;
                continue;
            }
            1 => failed(CallClass::Unknown),
            2 => failed(CallClass::Again),
            3 if device.is_none() => failed(CallClass::NotSent),
            4 if device.is_none() => How::NotStarted(true),
            5 if is_publish(&call) => failed(CallClass::Refused),
            _ => {
                let device = device.unwrap_or_else(|| world.lock().unwrap().apply(&call));
                match is_publish(&call) {
                    true => attached(&device),
                    false => How::Answer(Answer::default()),
                }
            }
        };
        controller.end(&call, how).await;
    }
}

/// Claims the volume, uses it, and gives it back, again and again.
async fn use_volume(node: Node, name: &str, world: Arc<Mutex<World>>, mut dice: Dice) {
    let id = format!("id of {name}");
    for round in 0..ROUNDS {
        let mut tries = 0;
        let granted = loop {
            let mut ask = node.ask("data", "web");
            ask.call = format!("{name} {round} {tries}");
            match node.client(0).claim(ask).await {
                Ok(granted) => break granted.into_inner(),
                Err(status) => match Refusal::of(&status).kind.as_str() {
                    // The claim goes on, and the same call finds it.
                    "TimedOut" => {}
                    "ClaimConflict" | "PluginError" | "Uncertain" | "Busy" => {
                        tries += 1;
                        tokio::time::sleep(Duration::from_millis(20 + dice.roll(30))).await;
                    }
                    _ => panic!("{status:?}"),
                },
            }
        };
        {
            let mut world = world.lock().unwrap();
            let due = Some((id.clone(), granted.publish_context["device"].clone()));
            assert_eq!(world.attached, due, "{name} was granted what it has not");
            assert_eq!(world.user.replace(id.clone()), None, "two nodes have the volume");
            world.grants += 1;
        }
        tokio::time::sleep(Duration::from_millis(dice.roll(30))).await;
        assert_eq!(world.lock().unwrap().user.take(), Some(id.clone()));
        node.detached(0, "data", &granted.claim).await.unwrap();
    }
}

#[tokio::test]
async fn volume_is_attached_while_its_claim_is_held() {
    let seed = std::env::var("CSID_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or_else(|| u64::from(std::process::id()));
    println!("CSID_SEED={seed}");
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let world = Arc::new(Mutex::new(World::default()));
    let controller = Controller::start(&site, "c1", 0).await;
    let mut controlling = tokio::spawn(control(controller, world.clone(), Dice(seed)));
    let (mut sessions, mut using) = (Vec::new(), Vec::new());
    for (n, name) in NODES.into_iter().enumerate() {
        let (node, session) = user(&site, name, 0).await;
        sessions.push(session);
        using.push(use_volume(node, name, world.clone(), Dice(seed + 1 + n as u64)));
    }
    let users = futures_util::future::join_all(using);
    let ended = tokio::select! {
        ended = &mut controlling => ended.err(),
        _ = tokio::time::timeout(Duration::from_secs(300), users) => None,
    };
    if let Some(panic) = ended {
        std::panic::resume_unwind(panic.into_panic());
    }
    eventually("the volume is at rest", async || {
        let claims = row(&site, "vol/default/data/claim").await;
        claims.is_empty() && !row(&site, "vol/default/data/head").await.contains("driver")
    })
    .await;
    controlling.abort();
    let World { calls, grants, attached, .. } = &*world.lock().unwrap();
    println!("{calls} calls, {grants} grants");
    assert_eq!(*grants as usize, ROUNDS * NODES.len(), "they took too long");
    assert_eq!(*attached, None, "a volume without a claim is attached");
}
