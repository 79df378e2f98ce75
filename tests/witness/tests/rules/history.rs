//! What a CO did, given to the checker event by event.

use csi_witness::rules::{Checker, Verdict};
use csi_witness::{Event, Mark};
use serde_json::{Value, json};

#[derive(Default)]
pub struct History {
    checker: Checker,
    host: usize,
    connection: u64,
    socket: usize,
    pub last: u64,
    pub at_rest: bool,
}

impl History {
    /// A CO that knows a plugin with everything but what a test takes away.
    pub fn new() -> Self {
        let mut new = Self::unacquainted();
        new.ok("Probe", json!({}));
        let plugin = ["CONTROLLER_SERVICE", "VOLUME_ACCESSIBILITY_CONSTRAINTS"];
        new.plugin_can(&plugin);
        new.controller_can(&[
            "CREATE_DELETE_VOLUME",
            "PUBLISH_UNPUBLISH_VOLUME",
            "PUBLISH_READONLY",
            "EXPAND_VOLUME",
            "MODIFY_VOLUME",
        ]);
        new.node_can(&["STAGE_UNSTAGE_VOLUME", "GET_VOLUME_STATS", "EXPAND_VOLUME"]);
        new.answered("NodeGetInfo", json!({}), json!({"node_id": "n1"}));
        new
    }

    /// It has asked nothing yet.
    pub fn unacquainted() -> Self {
        let mut new = History::default();
        new.connect(1);
        new
    }

    /// It speaks with the plugin at another socket from now on; what is in flight at the one before still is.
    pub fn at(&mut self, socket: usize) {
        self.socket = socket;
        self.connect(1);
    }

    /// It speaks with the plugin on another host from now on, as [`History::at`] does.
    pub fn on(&mut self, host: usize) {
        self.host = host;
        self.connect(1);
    }

    pub fn verdict(&self) -> &Verdict {
        self.checker.verdict()
    }

    fn connect(&mut self, co: i32) {
        self.connection += 1;
        self.checker.feed(
            self.host,
            &Event::Connected { connection: self.connection, socket: self.socket, co, plugin: 99 },
        );
    }

    /// The CO dies and comes back.
    pub fn crash(&mut self) {
        self.checker.feed(self.host, &Event::Closed { connection: self.connection });
        let co = i32::try_from(self.connection).unwrap() + 1;
        self.connect(co);
        self.ok("Probe", json!({}));
    }

    /// The same process connects again.
    pub fn reconnect(&mut self) {
        self.checker.feed(self.host, &Event::Closed { connection: self.connection });
        self.connect(1);
    }

    pub fn reboot(&mut self) {
        self.checker.feed(self.host, &Event::Marked { mark: Mark::Reboot });
    }

    pub fn rest(&mut self) {
        self.at_rest = true;
        self.checker.feed(self.host, &Event::Marked { mark: Mark::Rest });
    }

    pub fn forgets(&mut self, volume: &str, node: &str) {
        let mark = Mark::Forgotten { volume: volume.into(), node: node.into() };
        self.checker.feed(self.host, &Event::Marked { mark });
    }

    /// A call that has no answer yet.
    pub fn begins(&mut self, rpc: &str, request: Value) -> u64 {
        self.last += 1;
        let (call, rpc) = (self.last, rpc.to_owned());
        self.checker.feed(self.host, &Event::Called { call, connection: self.connection, rpc, request });
        call
    }

    pub fn ends(&mut self, call: u64, code: Option<&str>, response: Value) {
        let code = code.map(str::to_owned);
        self.checker.feed(self.host, &Event::Ended { call, code, response, fault: None });
    }

    pub fn answered(&mut self, rpc: &str, request: Value, response: Value) {
        let call = self.begins(rpc, request);
        self.ends(call, Some("OK"), response);
    }

    pub fn ok(&mut self, rpc: &str, request: Value) {
        self.answered(rpc, request, Value::Null);
    }

    pub fn fails(&mut self, rpc: &str, request: Value, code: &str) {
        let call = self.begins(rpc, request);
        self.ends(call, Some(code), Value::Null);
    }

    /// The CO gave up.
    pub fn lost(&mut self, rpc: &str, request: Value) {
        let call = self.begins(rpc, request);
        self.ends(call, None, Value::Null);
    }

    pub fn plugin_can(&mut self, can: &[&str]) {
        let one = |name: &&str| json!({"service": {"type": name}});
        let all: Value = can.iter().map(one).collect();
        self.answered("GetPluginCapabilities", json!({}), json!({"capabilities": all}));
    }

    pub fn controller_can(&mut self, can: &[&str]) {
        self.answered("ControllerGetCapabilities", json!({}), rpcs(can));
    }

    pub fn node_can(&mut self, can: &[&str]) {
        self.answered("NodeGetCapabilities", json!({}), rpcs(can));
    }

    /// Attached, with the context `ctx` to be passed on.
    pub fn attach(&mut self, volume: &str) {
        self.answered("ControllerPublishVolume", attach(volume), json!({"publish_context": ctx()}));
    }

    pub fn stage(&mut self, volume: &str) {
        self.ok("NodeStageVolume", stage(volume));
    }

    /// Attached and staged.
    pub fn up(&mut self, volume: &str) {
        self.attach(volume);
        self.stage(volume);
    }

    pub fn publish(&mut self, volume: &str, target: &str) {
        self.ok("NodePublishVolume", publish(volume, target));
    }

    pub fn unpublish(&mut self, volume: &str, target: &str) {
        self.ok("NodeUnpublishVolume", unpublish(volume, target));
    }

    pub fn unstage(&mut self, volume: &str) {
        self.ok("NodeUnstageVolume", unstage(volume));
    }

    pub fn detach(&mut self, volume: &str) {
        self.ok("ControllerUnpublishVolume", detach(volume));
    }
}

fn rpcs(can: &[&str]) -> Value {
    let all: Value = can.iter().map(|name| json!({"rpc": {"type": name}})).collect();
    json!({"capabilities": all})
}

/// A request with some of its fields otherwise.
pub fn with(mut request: Value, fields: Value) -> Value {
    for (field, value) in fields.as_object().unwrap() {
        request[field] = value.clone();
    }
    request
}

pub fn ctx() -> Value {
    json!({"bytes": 9, "values": {"device": "d1"}})
}

pub fn capability(mode: &str) -> Value {
    json!({"mount": {}, "access_mode": {"mode": mode}})
}

pub fn staging(volume: &str) -> String {
    format!("/staging/{volume}")
}

pub fn attach(volume: &str) -> Value {
    json!({"volume_id": volume, "node_id": "n1", "volume_capability": capability("MULTI_NODE_MULTI_WRITER")})
}

pub fn stage(volume: &str) -> Value {
    json!({
        "volume_id": volume,
        "publish_context": ctx(),
        "staging_target_path": staging(volume),
        "volume_capability": capability("MULTI_NODE_MULTI_WRITER"),
    })
}

pub fn publish(volume: &str, target: &str) -> Value {
    with(stage(volume), json!({"target_path": target}))
}

pub fn unpublish(volume: &str, target: &str) -> Value {
    json!({"volume_id": volume, "target_path": target})
}

pub fn unstage(volume: &str) -> Value {
    json!({"volume_id": volume, "staging_target_path": staging(volume)})
}

pub fn detach(volume: &str) -> Value {
    json!({"volume_id": volume, "node_id": "n1"})
}

pub fn create(name: &str) -> Value {
    json!({"name": name, "volume_capabilities": [capability("SINGLE_NODE_WRITER")]})
}
