//! A world for programs in other languages: `csid-world PROGRAM…` runs it in one, with csid on `$CSID_SOCKET` and on a system bus
//! of its own. What the program wants of the world it asks for on the socket `$CSID_WORLD`, in lines of JSON: `{"do": "kill"}`, and
//! has a line of JSON for answer.

use std::process::ExitCode;

use csi_proto::csi::v1;
use csi_proto::csi::v1::node_client::NodeClient;
use csi_proto::csi::v1::volume_capability::{AccessType, MountVolume, access_mode};
use csid_client::CallOptions;
use csid_tests::ask::NAMESPACE;
use csid_tests::dbus::{Bus, Policy};
use csid_tests::script::{self, Rule};
use csid_tests::world::{World, child, eventually, world};
use rustix::process::{Pid, Signal, kill_process};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1).collect::<Vec<_>>().into_iter();
    let Some(program) = arguments.next() else {
        eprintln!("csid-world PROGRAM…");
        return ExitCode::from(2);
    };
    let (sender, status) = std::sync::mpsc::channel();
    world(async move |w| {
        let bus = Bus::start(w, Policy::Shipped).await;
        drop(w.start().await);
        bus.has_csid().await;
        let socket = w.path("world");
        let listener = UnixListener::bind(&socket).expect("the world's socket");
        let mut command = child(program.as_ref());
        command.args(arguments).env("CSID_SOCKET", w.socket()).env("CSID_WORLD", &socket);
        command.env("DBUS_SYSTEM_BUS_ADDRESS", format!("unix:path={}", bus.socket.display()));
        let mut process = tokio::process::Command::from(command).spawn().expect("the program starts");
        let ended = tokio::select! {
            ended = process.wait() => ended.expect("its status"),
            () = serve(w, &listener) => unreachable!("it is served for ever"),
        };
        let _ = sender.send(ended.code().unwrap_or(1));
    });
    ExitCode::from(u8::try_from(status.recv().unwrap_or(1)).unwrap_or(1))
}

/// A request of a program.
#[derive(Deserialize)]
#[serde(tag = "do", rename_all = "kebab-case")]
enum Wish {
    /// csid: killed; started again; stopped as by ^Z; and going on.
    Kill,
    Start,
    Pause,
    Resume,
    /// Begins a new journal, as if there had been none.
    NewJournal,
    /// A plugin of this id that csid does not know; the answer is its socket. A controller has every capability.
    Plugin {
        id: String,
        controller: bool,
    },
    /// Sets the rules of a plugin from now on.
    Rules {
        id: String,
        rules: Vec<Rule>,
    },
    /// Starts a plugin again, with another id of the node.
    Rename {
        id: String,
        node: String,
    },
    /// A snapshot is ready when it is asked for so often.
    ReadyAt {
        id: String,
        asked: u64,
    },
    /// A device behind this volume.
    Device {
        id: String,
        volume: String,
    },
    /// Another manager stages and publishes this volume by calls of its own; the answer is where.
    Foreign {
        id: String,
        volume: String,
    },
    /// The calls about volumes that it had.
    Calls {
        id: String,
    },
    /// Whether this text is in csid's log, its journal, or anywhere else below its directories.
    Grep {
        text: String,
    },
    /// Waits until an operation on this volume waits.
    Waits {
        volume: String,
    },
    /// A file of volumes.d declares this volume, whose plugin is never there; or the file goes.
    Declare {
        volume: String,
    },
    Undeclare {
        volume: String,
    },
    /// Checks that nothing is left of any volume, and no witness saw a broken rule.
    NothingLeft,
}

async fn serve(w: &mut World, listener: &UnixListener) {
    loop {
        let (stream, _) = listener.accept().await.expect("a connection");
        grant_all(w, stream).await;
    }
}

async fn grant_all(w: &mut World, stream: UnixStream) {
    let (read, mut write) = stream.into_split();
    let mut lines = BufReader::new(read).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        let wish = serde_json::from_str(&line).unwrap_or_else(|error| panic!("{line}: {error}"));
        let answer = grant(w, wish).await;
        if write.write_all(format!("{answer}\n").as_bytes()).await.is_err() {
            return;
        }
    }
}

async fn grant(w: &mut World, wish: Wish) -> Value {
    match wish {
        Wish::Kill => w.kill(),
        Wish::Start => {
            w.launch(&[]).await;
        }
        Wish::Pause => signal(w, Signal::STOP),
        Wish::Resume => signal(w, Signal::CONT),
        Wish::NewJournal => drop(w.begin_new_journal().await),
        Wish::Plugin { id, controller } => {
            // The suite's controller test has the plugin confirm a capability, and then asks for that one and another in one call. The
            // witness goes by the later answer.
            w.may_excuse(35, "with a capability that was not confirmed");
            let plugin = w.add_plugin(&id).await;
            if controller {
                plugin.set(|script| {
                    script.control(&script::CONTROLLER);
                    script.capabilities.extend(["GET_VOLUME_STATS", "EXPAND_VOLUME"].map(str::to_owned));
                });
            }
            let socket = plugin.witnessed_socket();
            // The program registers it with csid.
            std::fs::remove_file(w.path("etc/plugins.d").join(format!("{id}.toml"))).expect("its file");
            return json!(socket);
        }
        Wish::Rules { id, rules } => w.plugin(&id).rules(rules),
        Wish::Rename { id, node } => {
            let plugin = w.plugin(&id);
            plugin.set(|script| script.others = vec![std::mem::replace(&mut script.node_id, node)]);
            plugin.kill();
            plugin.start().await;
        }
        Wish::ReadyAt { id, asked } => w.plugin(&id).set(|script| script.snapshot_ready_at = asked),
        Wish::Device { id, volume } => {
            w.add_device(&id, &volume);
        }
        Wish::Foreign { id, volume } => {
            let (staging, published) = foreign(w, &id, &volume).await;
            return json!({"Staging": staging, "Published": published});
        }
        Wish::Calls { id } => {
            let reply = w.plugin(&id).volume_calls().into_iter();
            return reply
                .map(|reply| json!({"call": reply.call, "code": reply.code, "cancelled": reply.cancelled}))
                .collect();
        }
        Wish::Grep { text } => {
            let found = std::process::Command::new("grep")
                .args(["-rlaF", &text])
                .args(["state", "run", "csid.log"].map(|name| w.path(name)))
                .output()
                .expect("grep");
            return json!(String::from_utf8_lossy(&found.stdout));
        }
        Wish::Waits { volume } => {
            let (client, subject) = (w.client().await, format!("{NAMESPACE}/{volume}"));
            eventually("an operation on the volume waits", async || {
                let operations = client.list_operations().await.expect("the operations");
                operations.iter().any(|o| o.subject == subject && o.step.starts_with("waiting"))
            })
            .await;
        }
        Wish::Declare { volume } => {
            w.declare(&volume, "capabilities = [{ access-mode = \"single-node-writer\" }]\n");
            w.client().await.reload(CallOptions::default()).await.expect("a reload");
        }
        Wish::Undeclare { volume } => {
            let file = w.path("etc/volumes.d").join(format!("{volume}.toml"));
            std::fs::remove_file(file).expect("a declared volume");
            w.client().await.reload(CallOptions::default()).await.expect("a reload");
        }
        Wish::NothingLeft => {
            let client = w.client().await;
            w.nothing_left(&client).await;
            w.assert_breaches();
        }
    }
    Value::Null
}

/// Mounts a volume as another manager does: past the witness, which does not see that the volume is staged.
async fn foreign(w: &mut World, id: &str, volume: &str) -> (String, String) {
    w.may_excuse(21, "NodePublishVolume of a volume that is not staged");
    let [staging, target] = ["staging", "publish"].map(|kind| w.path("foreign").join(kind).join(volume));
    std::fs::create_dir_all(&staging).expect("the staging path");
    std::fs::create_dir_all(target.parent().expect("a parent")).expect("the target's directory");
    let [staging, target] = [staging, target].map(|path| path.to_string_lossy().into_owned());
    let socket = format!("unix://{}", w.plugin(id).socket().display());
    let endpoint = tonic::transport::Endpoint::from_shared(socket).expect("the plugin's socket");
    let mut node = NodeClient::new(endpoint.connect().await.expect("the plugin"));
    let mode = access_mode::Mode::SingleNodeMultiWriter.into();
    let capability = Some(v1::VolumeCapability {
        access_mode: Some(v1::volume_capability::AccessMode { mode }),
        access_type: Some(AccessType::Mount(MountVolume::default())),
    });
    let stage = v1::NodeStageVolumeRequest {
        volume_id: volume.to_owned(),
        staging_target_path: staging.clone(),
        volume_capability: capability.clone(),
        ..Default::default()
    };
    node.node_stage_volume(stage).await.expect("a stage");
    let publish = v1::NodePublishVolumeRequest {
        volume_id: volume.to_owned(),
        staging_target_path: staging.clone(),
        target_path: target.clone(),
        volume_capability: capability,
        ..Default::default()
    };
    node.node_publish_volume(publish).await.expect("a publish");
    (staging, target)
}

fn signal(w: &World, signal: Signal) {
    let csid = Pid::from_raw(w.csid_pid().cast_signed()).expect("a pid");
    kill_process(csid, signal).expect("csid gets a signal");
}
