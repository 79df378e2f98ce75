//! What csid asks of systemd, answered over D-Bus by the test, of real processes: as fast as they end.
#![expect(clippy::disallowed_types, reason = "the test's own systemd")]

use std::collections::{BTreeSet, HashMap};
use std::io::{BufRead, BufReader, Lines, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard};

use futures_util::StreamExt;
use rustix::process::{Pid, Signal, kill_process};
use zbus::connection::Builder;
use zbus::{Connection, Guid, Message, MessageStream, OwnedObjectPath, OwnedVariant, Variant};

use crate::host::units::Units;

/// Starts each command line, one after the other, and prints its pid and status. It is one process: a fork of the tests' own would hold the
/// locks of all that they have open until its exec.
const SHELL: &str = "while read -r line; do sh -c \"exec $line\" </dev/null >/dev/null 2>&1 & echo $!; wait $!; echo $?; done";

/// A command as `ExecStart` has it.
type Exec = (String, Vec<String>, bool, u64, u64, u64, u64, u32, i32, i32);
/// A property as StartTransientUnit has it.
type Property = (String, OwnedVariant);

pub struct Machine {
    /// What the next start runs, as a shell has it.
    pub runs: &'static str,
    pub starts: usize,
    /// Starts while a process of the unit was there.
    pub doubles: usize,
    /// The unit of the last start.
    pub unit: String,
    /// Whether helper processes stay in a unit that is stopped, so that it stays loaded.
    pub helps: bool,
    /// The ended units in which helper processes are.
    pub left: BTreeSet<String>,
    shell: Child,
    orders: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
    /// The main process, 0: there is none.
    main: u32,
    /// waitid's code and status of the last process.
    exit: (i32, i32),
    is_loaded: bool,
    /// A restart is answered at once; the process ends, and the next one begins, when this is taken back.
    pub lingers: bool,
    restarts: bool,
    /// Whether the unit has PrivateTmp=.
    pub hides: bool,
}

#[derive(Clone)]
pub struct Systemd(Arc<Mutex<Machine>>);

impl Systemd {
    /// csid's systemd is this one from now on.
    pub async fn behind(units: &Units) -> Self {
        let systemd = Systemd(Arc::new(Mutex::new(Machine::new())));
        systemd.connect(units).await;
        systemd
    }

    /// The next csid has the same one.
    pub async fn connect(&self, units: &Units) {
        let (client, server) = std::os::unix::net::UnixStream::pair().unwrap();
        let guid = Guid::generate();
        let serving = Builder::unix_stream(server).server(guid).p2p().build_message_stream();
        let connecting = Builder::unix_stream(client).p2p().build();
        let (serving, connection) = tokio::join!(serving, connecting);
        tokio::spawn(self.clone().serve(serving.unwrap()));
        units.connect_to(connection.unwrap()).await;
    }

    pub fn machine(&self) -> MutexGuard<'_, Machine> {
        self.0.lock().unwrap()
    }

    pub fn pid(&self) -> u32 {
        self.machine().look()
    }

    async fn serve(self, mut stream: MessageStream) {
        let connection = Connection::from(&stream);
        while let Some(Ok(call)) = stream.next().await {
            let answer = self.machine().answer(&call);
            connection.send(&answer).await.unwrap();
        }
    }
}

impl Machine {
    fn new() -> Self {
        let mut shell = Command::new("/bin/sh");
        let mut shell =
            shell.args(["-c", SHELL]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (orders, output) =
            (shell.stdin.take().unwrap(), BufReader::new(shell.stdout.take().unwrap()).lines());
        let (starts, doubles, main, exit, is_loaded) = (0, 0, 0, (0, 0), false);
        let (lingers, restarts, hides) = (false, false, false);
        Machine {
            runs: "",
            starts,
            doubles,
            unit: String::new(),
            helps: false,
            left: BTreeSet::new(),
            shell,
            orders,
            output,
            main,
            exit,
            is_loaded,
            lingers,
            restarts,
            hides,
        }
    }

    fn hear(&mut self) -> u32 {
        self.output.next().expect("the shell is there").unwrap().parse().unwrap()
    }

    /// The main process. What ended well is forgotten, as a transient unit is.
    fn look(&mut self) -> u32 {
        if self.main != 0 && !Path::new(&format!("/proc/{}", self.main)).exists() {
            let status = self.hear() as i32;
            self.exit = if status > 128 { (2, status - 128) } else { (1, status) };
            self.is_loaded = status != 0;
            self.main = 0;
        }
        if self.restarts && !self.lingers {
            self.restarts = false;
            self.stop();
            self.start();
        }
        self.main
    }

    fn start(&mut self) {
        if self.look() != 0 {
            self.doubles += 1;
            self.stop();
        }
        self.starts += 1;
        self.is_loaded = true;
        writeln!(self.orders, "{}", self.runs).unwrap();
        self.main = self.hear();
    }

    fn stop(&mut self) {
        if self.look() != 0 {
            let main = Pid::from_raw(self.main as i32).unwrap();
            let _ = kill_process(main, Signal::KILL);
            self.hear();
            self.main = 0;
        }
        self.is_loaded = false;
    }

    /// Returns a property of a unit in which helper processes are left.
    fn property_left(name: &str) -> Variant<'static> {
        match name {
            "ActiveState" => "inactive".into(),
            "MainPID" => 0_u32.into(),
            "Result" => "success".into(),
            "ExecMainCode" | "ExecMainStatus" => 0_i32.into(),
            "Description" => "as it was before".into(),
            "ExecStart" => Vec::<Exec>::new().into(),
            "Environment" => Vec::<String>::new().into(),
            "LoadCredential" => Vec::<(String, String)>::new().into(),
            other => panic!("{other} is asked for"),
        }
    }

    fn property(&mut self, name: &str) -> Variant<'static> {
        let pid = self.look();
        match name {
            "ActiveState" if pid != 0 => "active".into(),
            "ActiveState" => "failed".into(),
            "MainPID" => pid.into(),
            "Result" => "exit-code".into(),
            "ExecMainCode" => self.exit.0.into(),
            "ExecMainStatus" => self.exit.1.into(),
            other => panic!("{other} is asked for"),
        }
    }

    fn answer(&mut self, call: &Message) -> Message {
        let header = call.header();
        let path = OwnedObjectPath::try_from("/org/freedesktop/systemd1/it").unwrap();
        let left = OwnedObjectPath::try_from("/org/freedesktop/systemd1/left").unwrap();
        let answer = Message::method_return(&header);
        let gone = || {
            let error = Message::error(&header, "org.freedesktop.systemd1.NoSuchUnit");
            error.build(&"no such unit").unwrap()
        };
        let exists = || {
            let error = Message::error(&header, "org.freedesktop.systemd1.UnitExists");
            error.build(&"the unit exists").unwrap()
        };
        match header.member().unwrap().as_str() {
            "GetUnit" => {
                let (unit,): (String,) = call.body().deserialize().unwrap();
                self.look();
                match self.is_loaded && self.unit == unit {
                    true => answer.build(&path).unwrap(),
                    false if self.left.contains(&unit) => answer.build(&left).unwrap(),
                    false => gone(),
                }
            }
            "StartTransientUnit" => {
                type Auxiliary = Vec<(String, Vec<Property>)>;
                let (unit, _, _, _): (String, String, Vec<Property>, Auxiliary) =
                    call.body().deserialize().unwrap();
                if self.left.contains(&unit) {
                    return exists();
                }
                self.unit = unit;
                self.start();
                answer.build(&path).unwrap()
            }
            "StopUnit" => {
                self.stop();
                if self.helps {
                    self.left.insert(self.unit.clone());
                }
                answer.build(&path).unwrap()
            }
            "StartUnit" => {
                (self.unit, _) = call.body().deserialize::<(String, String)>().unwrap();
                self.start();
                answer.build(&path).unwrap()
            }
            "RestartUnit" => {
                self.restarts = true;
                answer.build(&path).unwrap()
            }
            "ListUnitsByNames" => {
                let (names,): (Vec<String>,) = call.body().deserialize().unwrap();
                let active = if self.look() != 0 { "active" } else { "inactive" };
                let job = u32::from(self.restarts);
                let row = |name: &String| {
                    (name.clone(), "", "loaded", active, "running", "", path.clone(), job, "", path.clone())
                };
                answer.build(&(names.iter().map(row).collect::<Vec<_>>(),)).unwrap()
            }
            "ResetFailedUnit" => {
                self.is_loaded &= self.look() != 0;
                answer.build(&()).unwrap()
            }
            "Get" => {
                let (_, name): (String, String) = call.body().deserialize().unwrap();
                let value = match header.path().is_some_and(|asked| *asked == *left) {
                    true => Machine::property_left(&name),
                    false => self.property(&name),
                };
                let value = OwnedVariant::try_from(value).unwrap();
                answer.build(&value).unwrap()
            }
            "GetAll" => answer.build(&HashMap::from([("PrivateTmp", Variant::from(self.hides))])).unwrap(),
            other => panic!("{other} is called"),
        }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.stop();
        let _ = self.shell.kill();
        let _ = self.shell.wait();
    }
}
