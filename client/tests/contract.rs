//! The client against a stand-in server: its messages and its results.

use std::{
    collections::HashMap,
    io::Read,
    os::{fd::AsFd, unix::net::UnixStream},
    path::{Path, PathBuf},
    pin::pin,
    process::{Child, Command, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

use csid_client::{
    AccessMode, CallOptions, Client, Error, Event, Kind, MountFilter, MountOptions, News, Restore, Secrets,
    Session, Target,
};
use futures_util::poll;
use tokio::{net::UnixListener, sync::Notify, time::timeout};
use zbus::{
    Connection, DBusError, Guid, Message, OwnedVariant, Variant,
    connection::Builder,
    interface,
    message::Header,
    names::{ErrorName, OwnedUniqueName},
    object_server::SignalEmitter,
};

const SOON: Duration = Duration::from_secs(10);

type Dict = HashMap<String, OwnedVariant>;

#[derive(Default)]
struct State {
    options: Mutex<Option<Dict>>,
    secrets: Mutex<String>,
    caller: Mutex<Option<OwnedUniqueName>>,
    release: Notify,
    in_flight: AtomicUsize,
    most: AtomicUsize,
    begun: AtomicUsize,
    events: Mutex<Vec<Event>>,
    journal: Mutex<String>,
    /// The newest sequences that GetEvents has; older ones are a gap.
    kept: AtomicUsize,
    get_events: AtomicUsize,
}

#[derive(Clone, Default)]
struct Server(Arc<State>);

#[derive(Debug)]
struct Failure(&'static str, String, Dict);

impl DBusError for Failure {
    fn create_reply(&self, header: &Header<'_>) -> zbus::Result<Message> {
        Message::error(header, self.0).build(&(&self.1, &self.2))
    }

    fn name(&self) -> ErrorName<'_> {
        ErrorName::from_static_str_unchecked(self.0)
    }

    fn description(&self) -> Option<&str> {
        Some(&self.1)
    }
}

fn dict<const N: usize>(entries: [(&str, Variant<'static>); N]) -> Dict {
    entries.into_iter().map(|(key, value)| (key.to_owned(), value.try_into_owned().unwrap())).collect()
}

#[interface(name = "org.csid1.Manager")]
impl Server {
    async fn mount(
        &self,
        _namespace: String,
        volume: String,
        consumer: String,
        options: Dict,
    ) -> Result<(String, bool), Failure> {
        if let Some(secrets) = options.get("secrets") {
            let Variant::Fd(fd) = &**secrets else { panic!("secrets are no fd") };
            let mut file = std::fs::File::from(fd.as_fd().try_clone_to_owned().unwrap());
            file.read_to_string(&mut self.0.secrets.lock().unwrap()).unwrap();
        }
        *self.0.options.lock().unwrap() = Some(options);
        match volume.as_str() {
            "conflict" => Err(Failure(
                "org.csid1.Error.ClaimConflict",
                "two".into(),
                dict([
                    ("holders", vec!["job-1", "job-2"].into()),
                    ("retryable", false.into()),
                    ("namespace", "default".into()),
                    ("grpc-code", 9u32.into()),
                    ("step", 5u32.into()),
                    ("of-tomorrow", 1u32.into()),
                ]),
            )),
            "new" => Err(Failure("org.csid1.Error.OfTomorrow", "new".into(), Dict::new())),
            "stopping" if self.0.begun.fetch_add(1, SeqCst) < 6 => {
                Err(Failure("org.csid1.Error.ShuttingDown", "csid stops".into(), Dict::new()))
            }
            "wait" => {
                let now = self.0.in_flight.fetch_add(1, SeqCst) + 1;
                self.0.most.fetch_max(now, SeqCst);
                self.0.begun.fetch_add(1, SeqCst);
                self.0.release.notified().await;
                self.0.in_flight.fetch_sub(1, SeqCst);
                Ok((consumer, false))
            }
            _ => Ok(("/published".into(), true)),
        }
    }

    fn list_mounts(&self, filter: Dict) -> Vec<Dict> {
        *self.0.options.lock().unwrap() = Some(filter);
        vec![dict([
            ("namespace", "ns".into()),
            ("is-device", true.into()),
            ("since", 7u64.into()),
            ("new", 1u32.into()),
        ])]
    }

    fn has_mount(&self, source: String) -> u32 {
        source.len() as u32
    }

    fn cancel_operation(&self, _id: String, #[zbus(header)] header: Header<'_>) {
        *self.0.caller.lock().unwrap() = header.sender().map(|name| name.to_owned().into());
    }

    fn get_events(&self, since: u64, max: u32) -> (Vec<Event>, bool) {
        self.0.get_events.fetch_add(1, SeqCst);
        let events = self.0.events.lock().unwrap();
        let kept = events.len().saturating_sub(self.0.kept.load(SeqCst));
        let gap = since > events.last().map_or(0, |last| last.sequence)
            || events[..kept].iter().any(|event| event.sequence > since);
        (events[kept..].iter().filter(|e| e.sequence > since).take(max as usize).cloned().collect(), gap)
    }

    #[zbus(property)]
    fn event_sequence(&self) -> u64 {
        self.0.events.lock().unwrap().last().map_or(0, |event| event.sequence)
    }

    #[zbus(property)]
    fn journal_id(&self) -> String {
        self.0.journal.lock().unwrap().clone()
    }

    #[zbus(property)]
    fn features(&self) -> Vec<String> {
        vec!["mount".into()]
    }

    #[zbus(signal)]
    async fn event(
        emitter: &SignalEmitter<'_>,
        sequence: u64,
        realtime_usec: u64,
        r#type: &str,
        subject: &str,
        details: Dict,
    ) -> zbus::Result<()>;
}

fn event(sequence: u64) -> Event {
    Event {
        sequence,
        realtime_usec: 1,
        kind: "mount".into(),
        subject: "ns/v".into(),
        details: dict([("success", true.into())]),
    }
}

/// A directory of its own, the server's state, and a client; the server's end of the connection closes on
/// demand.
struct Fixture {
    _directory: tempfile::TempDir,
    server: Server,
    client: Client,
    connection: Connection,
}

/// Serves the contract on a connection.
async fn served(stream: tokio::net::UnixStream, server: &Server) -> Connection {
    Builder::unix_stream(stream.into_std().unwrap())
        .server(Guid::generate().as_str())
        .p2p()
        .serve_at("/org/csid1", server.clone())
        .build()
        .await
        .unwrap()
}

async fn fixture() -> Fixture {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("csid.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let server = Server::default();
    server.0.kept.store(usize::MAX, SeqCst);
    let accept = async {
        let (stream, _) = listener.accept().await.unwrap();
        served(stream, &server).await
    };
    let target = Target::Socket(path);
    let (connection, client) = tokio::join!(accept, Client::connect(&target));
    Fixture { _directory: directory, server, client: client.unwrap(), connection }
}

impl Fixture {
    async fn mount(&self, volume: &str, options: MountOptions) -> csid_client::Result<csid_client::Mounted> {
        timeout(SOON, self.client.mount("default", volume, "job", options)).await.expect("an answer")
    }

    async fn emit(&self, sequence: u64, signal: bool) {
        let event = event(sequence);
        self.server.0.events.lock().unwrap().push(event.clone());
        if signal {
            let emitter = SignalEmitter::new(&self.connection, "/org/csid1").unwrap();
            Server::event(&emitter, sequence, 1, &event.kind, &event.subject, event.details).await.unwrap();
        }
    }
}

#[tokio::test]
async fn options_are_the_contracts_keys_and_types() {
    let f = fixture().await;
    let secrets = Secrets::from_json(br#"{"password":"canary"}"#).unwrap();
    let mounted = f
        .mount(
            "v",
            MountOptions {
                plugin: Some("local".into()),
                external_id: Some("x".into()),
                volume_context: Some([("k".into(), "v".into())].into()),
                publish_context: Some([].into()),
                mount_flags: Some(vec!["noatime".into()]),
                access_mode: Some(AccessMode::SingleNodeMultiWriter),
                read_only: Some(true),
                restore: Some(Restore::Auto),
                deadline_usec: Some(30_000_000),
                secrets: Some(secrets.seal().unwrap()),
                ..MountOptions::default()
            },
        )
        .await
        .unwrap();
    assert_eq!((mounted.source.as_str(), mounted.is_device), ("/published", true));
    let options = f.server.0.options.lock().unwrap().take().unwrap();
    let mut sent: Vec<_> =
        options.iter().map(|(key, value)| format!("{key} {}", value.value_signature())).collect();
    sent.sort();
    assert_eq!(
        sent,
        [
            "access-mode s",
            "deadline-usec t",
            "external-id s",
            "mount-flags as",
            "plugin s",
            "publish-context a{ss}",
            "read-only b",
            "restore s",
            "secrets h",
            "volume-context a{ss}"
        ]
    );
    assert_eq!(options["access-mode"], Variant::from("single-node-multi-writer").try_into_owned().unwrap());
    assert_eq!(*f.server.0.secrets.lock().unwrap(), r#"{"password":"canary"}"#);

    f.client.list_mounts(MountFilter { uid: Some(0), ..MountFilter::default() }).await.unwrap();
    let filter = f.server.0.options.lock().unwrap().take().unwrap();
    assert_eq!(filter, dict([("uid", 0u32.into())]));
}

#[tokio::test]
async fn unknown_keys_of_rows_are_ignored() {
    let f = fixture().await;
    let rows = f.client.list_mounts(MountFilter::default()).await.unwrap();
    assert_eq!(rows.len(), 1);
    assert_eq!((rows[0].namespace.as_str(), rows[0].is_device, rows[0].since), ("ns", true, 7));
    assert_eq!(f.client.manager().await.unwrap().features, ["mount"]);
}

#[tokio::test]
async fn csids_errors_keep_their_details() {
    let f = fixture().await;
    let error = f.mount("conflict", MountOptions::default()).await.unwrap_err();
    assert_eq!(error.to_string(), "ClaimConflict: two");
    let details = &error.csid().unwrap().details;
    assert_eq!(details.holders, ["job-1", "job-2"]);
    assert_eq!((details.retryable, details.grpc_code), (Some(false), Some(9)));
    assert_eq!(details.namespace.as_deref(), Some("default"));
    assert_eq!(details.step, None, "a detail of the wrong type hides nothing else");

    let error = f.mount("new", MountOptions::default()).await.unwrap_err();
    assert_eq!(error.csid().unwrap().kind, Kind::Other("OfTomorrow".into()));
}

#[tokio::test]
async fn other_failures_have_their_own_names() {
    let f = fixture().await;
    let error = f.client.reload(CallOptions::default()).await.unwrap_err();
    assert!(matches!(error, Error::NotServed { .. }), "{error:?}");
    let error = f.client.plugin("p").await.unwrap_err();
    assert_eq!(error.csid().map(|error| &error.kind), Some(&Kind::NotFound), "{error:?}");
    let error = f.client.has_mount("/x").await.unwrap_err();
    assert!(matches!(error, Error::Bus { .. }), "an answer of another type: {error:?}");

    let missing = PathBuf::from("/nonexistent/csid.sock");
    let Err(error) = Client::connect(&Target::Socket(missing)).await else { panic!("connected") };
    let said = error.to_string();
    assert!(said.starts_with("cannot reach csid: /nonexistent/csid.sock: No such file"), "{said}");
    assert!(!said.contains("system bus"), "a named socket has no fall-back: {said}");
}

#[tokio::test]
async fn lost_connection_has_an_error_of_its_own() {
    let f = fixture().await;
    let Fixture { server, client, connection, .. } = &f;
    let call = client.mount("default", "wait", "job", MountOptions::default());
    let close = async {
        while server.0.in_flight.load(SeqCst) == 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        connection.clone().close().await.unwrap();
    };
    let (answer, ()) = tokio::join!(call, close);
    let error = answer.unwrap_err();
    assert!(matches!(error, Error::Disconnected(_)), "{error:?}");
    timeout(SOON, client.closed()).await.unwrap();
}

#[tokio::test]
async fn call_outlasts_a_csid_that_stops_for_seconds() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("csid.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let server = Server::default();
    let serving = async {
        let mut connections = Vec::new();
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            connections.push(served(stream, &server).await);
        }
    };
    let calling = async {
        let session = Session::open(Target::Socket(path)).await?;
        let mount = |client: Client, _| async move {
            client.mount("default", "stopping", "job", MountOptions::default()).await
        };
        session.ask(Some(Instant::now() + SOON), mount).await
    };
    tokio::select! {
        mounted = calling => assert_eq!(mounted.unwrap().source, "/published"),
        () = serving => {}
    }
    assert_eq!(server.0.begun.load(SeqCst), 7, "each refusal is followed by another try");
}

#[tokio::test]
async fn calls_in_flight_are_bounded_and_dropped_ones_count() {
    let f = fixture().await;
    let calls: Vec<_> = (0..200)
        .map(|_| {
            let client = f.client.clone();
            tokio::spawn(async move { client.mount("default", "wait", "job", MountOptions::default()).await })
        })
        .collect();
    let counts = || (f.server.0.begun.load(SeqCst), f.server.0.in_flight.load(SeqCst));
    let begun_and_in_flight = async |wanted: (usize, usize)| {
        let so = async {
            while counts() != wanted {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(SOON, so).await.unwrap_or_else(|_| panic!("{:?}, not {wanted:?}", counts()));
    };
    // There is always room to cancel. What the client has sent before reaches the server before.
    let earlier_ones_came = async || {
        for _ in 0..10 {
            timeout(SOON, f.client.cancel_operation("x")).await.expect("an answer").unwrap();
        }
    };
    begun_and_in_flight((112, 112)).await;
    earlier_ones_came().await;
    assert_eq!(f.server.0.most.load(SeqCst), 112);
    // Dropped calls still count as unanswered, so no other call takes their place.
    for call in calls.iter().take(112) {
        call.abort();
    }
    earlier_ones_came().await;
    assert_eq!(f.server.0.most.load(SeqCst), 112);
    f.server.0.release.notify_waiters();
    // The others come next.
    begun_and_in_flight((200, 88)).await;
    f.server.0.release.notify_waiters();
    for call in calls.into_iter().skip(112) {
        timeout(SOON, call).await.unwrap().unwrap().unwrap();
    }
}

async fn next(follower: &mut csid_client::Follower) -> Option<u64> {
    match timeout(SOON, follower.next()).await.expect("news").unwrap() {
        News::Event(event) => Some(event.sequence),
        News::Gap => None,
    }
}

#[tokio::test]
async fn events_come_in_order_and_holes_are_filled() {
    let f = fixture().await;
    f.emit(1, false).await;
    f.emit(2, false).await;
    let mut follower = f.client.follow(Some(1)).await.unwrap();
    assert_eq!(next(&mut follower).await, Some(2));
    {
        // The follower asks once more. That call is answered meanwhile.
        let mut more = pin!(follower.next());
        for _ in 0..10 {
            assert!(poll!(&mut more).is_pending(), "nothing more yet");
            f.client.cancel_operation("x").await.unwrap();
        }
    }
    let asked = f.server.0.get_events.load(SeqCst);
    f.emit(3, true).await;
    assert_eq!(next(&mut follower).await, Some(3));
    assert_eq!(f.server.0.get_events.load(SeqCst), asked, "no question while nothing is missing");
    f.emit(4, false).await;
    f.emit(5, true).await;
    assert_eq!((next(&mut follower).await, next(&mut follower).await), (Some(4), Some(5)));
    // csid was killed: the numbers leap, and nothing is lost.
    f.emit(10_001, true).await;
    assert_eq!(next(&mut follower).await, Some(10_001));
    // More than csid keeps.
    for sequence in 10_002..10_010 {
        f.emit(sequence, false).await;
    }
    f.server.0.kept.store(2, SeqCst);
    f.emit(10_010, true).await;
    assert_eq!(next(&mut follower).await, None);
    assert_eq!((next(&mut follower).await, next(&mut follower).await), (Some(10_009), Some(10_010)));
    assert_eq!(follower.cursor(), 10_010);
}

#[tokio::test]
async fn slow_reader_loses_no_event_and_blocks_no_other() {
    let f = fixture().await;
    let mut follower = f.client.follow(None).await.unwrap();
    for sequence in 1..=1000 {
        f.emit(sequence, true).await;
    }
    timeout(SOON, f.client.cancel_operation("x")).await.expect("the connection is not blocked").unwrap();
    for sequence in 1..=1000 {
        assert_eq!(next(&mut follower).await, Some(sequence));
    }
}

#[tokio::test]
async fn cursor_of_another_journal_restarts() {
    let f = fixture().await;
    f.emit(1, false).await;
    let mut follower = f.client.follow(Some(500)).await.unwrap();
    assert_eq!((next(&mut follower).await, next(&mut follower).await), (None, Some(1)));
}

#[tokio::test]
async fn events_of_another_journal_follow_a_gap() {
    let f = fixture().await;
    for sequence in 1..=3 {
        f.emit(sequence, false).await;
    }
    *f.server.0.journal.lock().unwrap() = "new".to_owned();
    let mut same = f.client.follow_journal("new", 2).await.unwrap();
    assert_eq!((next(&mut same).await, same.journal()), (Some(3), "new"));
    let mut another = f.client.follow_journal("old", 2).await.unwrap();
    assert_eq!((next(&mut another).await, another.journal(), another.cursor()), (None, "new", 0));
    assert_eq!((next(&mut another).await, next(&mut another).await), (Some(1), Some(2)));
}

/// A bus with dbus-daemon's own limits.
struct Bus(Child, tempfile::TempDir);

impl Bus {
    fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let config = directory.path().join("bus.conf");
        let socket = directory.path().join("bus");
        std::fs::write(
            &config,
            format!(
                r#"<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN"
 "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig><listen>unix:path={}</listen><policy context="default">
<allow send_destination="*" eavesdrop="false"/><allow own="*"/><allow receive_sender="*"/></policy>
<limit name="max_replies_per_connection">128</limit></busconfig>"#,
                socket.display()
            ),
        )
        .unwrap();
        let daemon = Command::new("dbus-daemon")
            .arg("--nofork")
            .arg(format!("--config-file={}", config.display()))
            .stdin(Stdio::null())
            .spawn()
            .expect("dbus-daemon (package dbus-daemon) starts");
        // The socket is there before the daemon listens at it.
        while UnixStream::connect(&socket).is_err() {
            std::thread::sleep(Duration::from_millis(10));
        }
        Self(daemon, directory)
    }

    fn socket(&self) -> &Path {
        self.1.path()
    }
}

impl Drop for Bus {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The only test that looks at `$DBUS_SYSTEM_BUS_ADDRESS`, and so the only one that may set it.
#[tokio::test]
async fn on_a_bus_with_its_limits() {
    let bus = Bus::start();
    let address = format!("unix:path={}/bus", bus.socket().display());
    // SAFETY: no other thread of this process reads the environment: the other tests name their socket.
    unsafe { std::env::set_var("DBUS_SYSTEM_BUS_ADDRESS", &address) };
    let client = Client::connect(&Target::SystemBus).await.unwrap();
    let error = client.cancel_operation("x").await.unwrap_err();
    assert!(matches!(error, Error::NotRunning { masked: false, .. }), "{error:?}");

    let server = Server::default();
    server.0.kept.store(usize::MAX, SeqCst);
    let connection = serve_on_bus(&server).await;
    let calls: Vec<_> = (0..300)
        .map(|_| {
            let client = client.clone();
            tokio::spawn(async move { client.mount("default", "wait", "job", MountOptions::default()).await })
        })
        .collect();
    while calls.iter().any(|call| !call.is_finished()) {
        tokio::time::sleep(Duration::from_millis(50)).await;
        client.cancel_operation("x").await.unwrap();
        server.0.release.notify_waiters();
    }
    for call in calls {
        call.await.unwrap().unwrap();
    }

    let mut follower = client.follow(None).await.unwrap();
    // Any client of the bus can send a signal, and the follower does not return a forged event.
    let forger = Builder::system().build().await.unwrap();
    let victim = server.0.caller.lock().unwrap().clone().unwrap();
    let emitter =
        SignalEmitter::new(&forger, "/org/csid1").unwrap().set_destination(victim.into_inner().into());
    Server::event(&emitter, 1, 1, "mount", "forged", Dict::new()).await.unwrap();
    while server.0.get_events.load(SeqCst) == 0 {
        assert!(timeout(Duration::from_millis(20), follower.next()).await.is_err(), "the forged event");
    }
    let real = event(2);
    server.0.events.lock().unwrap().push(real.clone());
    let emitter = SignalEmitter::new(&connection, "/org/csid1").unwrap();
    Server::event(&emitter, 2, 1, &real.kind, &real.subject, real.details.clone()).await.unwrap();
    let News::Event(event) = timeout(SOON, follower.next()).await.unwrap().unwrap() else { panic!("a gap") };
    assert_eq!(event, real);
    another_journal_is_a_gap(&mut follower, connection).await;
}

async fn serve_on_bus(server: &Server) -> Connection {
    Builder::system().serve_at("/org/csid1", server.clone()).name("org.csid1").build().await.unwrap()
}

/// The connection to the bus outlives csid. Each csid here has a journal of its own, whose events count from 1.
async fn another_journal_is_a_gap(follower: &mut csid_client::Follower, mut csid: Connection) {
    let kept = follower.cursor();
    for (journal, events, is_signalled) in
        [("below", 1, true), ("beyond", kept + 3, true), ("silent", 2, false)]
    {
        // Nothing is left to read.
        assert!(timeout(Duration::from_millis(100), follower.next()).await.is_err(), "{journal}");
        csid.close().await.unwrap();
        let server = Server::default();
        server.0.kept.store(usize::MAX, SeqCst);
        *server.0.journal.lock().unwrap() = journal.to_owned();
        *server.0.events.lock().unwrap() = (1..=events).map(event).collect();
        csid = serve_on_bus(&server).await;
        if is_signalled {
            let emitter = SignalEmitter::new(&csid, "/org/csid1").unwrap();
            Server::event(&emitter, events, 1, "mount", "ns/v", Dict::new()).await.unwrap();
        }
        assert_eq!(next(follower).await, None, "{journal}");
        for sequence in 1..=events {
            assert_eq!(next(follower).await, Some(sequence), "{journal}");
        }
        assert_eq!(follower.journal(), journal);
    }
}
