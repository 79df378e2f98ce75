//! A world for programs in other languages: `csid-world PROGRAM…` runs it in one, with csid on `$CSID_SOCKET` and on a system bus
//! of its own. What the program wants of the world it asks for on the socket `$CSID_WORLD`, in lines of JSON: `{"do": "kill"}`, and
//! has a line of JSON for answer.

use std::process::ExitCode;

use csid_tests::dbus::{Bus, Policy};
use csid_tests::script::{self, Rule};
use csid_tests::world::{World, child, world};
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

/// What a program can ask for.
#[derive(Deserialize)]
#[serde(tag = "do", rename_all = "kebab-case")]
enum Wish {
    /// csid: killed; started again; stopped as by ^Z; and going on.
    Kill,
    Start,
    Pause,
    Resume,
    /// A plugin of this id that csid is not told of; the answer is its socket. With a controller it can do all.
    Plugin {
        id: String,
        controller: bool,
    },
    /// What it does from now on.
    Rules {
        id: String,
        rules: Vec<Rule>,
    },
    /// It starts again, and calls the node so.
    Rename {
        id: String,
        node: String,
    },
    /// A device behind this volume.
    Device {
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
    /// Nothing is left of any volume, and no plugin saw a rule broken.
    NothingLeft,
}

async fn serve(w: &mut World, listener: &UnixListener) {
    let mut plugins = Vec::new();
    loop {
        let (stream, _) = listener.accept().await.expect("a connection");
        grant_all(w, &mut plugins, stream).await;
    }
}

async fn grant_all(w: &mut World, plugins: &mut Vec<String>, stream: UnixStream) {
    let (read, mut write) = stream.into_split();
    let mut lines = BufReader::new(read).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        let wish = serde_json::from_str(&line).unwrap_or_else(|error| panic!("{line}: {error}"));
        let answer = grant(w, plugins, wish).await;
        if write.write_all(format!("{answer}\n").as_bytes()).await.is_err() {
            return;
        }
    }
}

async fn grant(w: &mut World, plugins: &mut Vec<String>, wish: Wish) -> Value {
    match wish {
        Wish::Kill => w.kill(),
        Wish::Start => {
            w.launch(&[]).await;
        }
        Wish::Pause => signal(w, Signal::STOP),
        Wish::Resume => signal(w, Signal::CONT),
        Wish::Plugin { id, controller } => {
            let plugin = w.add_plugin(&id).await;
            if controller {
                plugin.set(|script| {
                    script.control(&script::CONTROLLER);
                    script.capabilities.extend(["GET_VOLUME_STATS", "EXPAND_VOLUME"].map(str::to_owned));
                });
            }
            let socket = plugin.socket();
            // csid is told of it by the program.
            std::fs::remove_file(w.path("etc/plugins.d").join(format!("{id}.toml"))).expect("its file");
            plugins.push(id);
            return json!(socket);
        }
        Wish::Rules { id, rules } => w.plugin(&id).rules(rules),
        Wish::Rename { id, node } => {
            let plugin = w.plugin(&id);
            plugin.set(|script| script.others = vec![std::mem::replace(&mut script.node_id, node)]);
            plugin.kill();
            plugin.start().await;
        }
        Wish::Device { id, volume } => {
            w.add_device(&id, &volume);
        }
        Wish::Calls { id } => {
            let told = w.plugin(&id).volume_calls().into_iter();
            return told
                .map(|told| json!({"call": told.call, "code": told.code, "cancelled": told.cancelled}))
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
        Wish::NothingLeft => {
            let client = w.client().await;
            w.nothing_left(&client).await;
            for id in plugins {
                w.plugin(id).assert_rules();
            }
        }
    }
    Value::Null
}

fn signal(w: &World, signal: Signal) {
    let csid = Pid::from_raw(w.csid_pid().cast_signed()).expect("a pid");
    kill_process(csid, signal).expect("csid gets a signal");
}
