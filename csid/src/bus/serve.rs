//! Connections: the peers of the private socket, and the one to the system bus.
//!
//! Invariants:
//! - csid reads from a connection only while it has fewer calls in progress than its limit. So a peer that does not read its answers
//!   costs limited memory for a limited time.
//! - A lost connection does not end a call that has started.

use std::collections::HashMap;
use std::future::{Future, poll_fn};
use std::num::NonZeroUsize;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;
use std::time::Duration;

use futures_util::StreamExt;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Notify, Semaphore};
use tokio::task::JoinSet;
use tracing::{debug, info, warn};
use zbus::connection::{AuthMechanism, Builder};
use zbus::fdo::{RequestNameFlags, RequestNameReply};
use zbus::message::Type;
use zbus::{Address, Connection, Guid, Message, MessageStream, OwnedGuid};

use super::authorise::{Authoriser, PolkitAction};
use super::call::Server;
use super::caller::{Caller, CallerSource, Senders, csid_group};
use super::dispatch::answer;
use super::failure;
use super::polkit::{Polkit, Timeouts};
use super::rooms::{Rooms, State};
use super::signals::{self, Signals};
use super::socket::{Credentials, Sifter, Takes, Transport};
use crate::quiet_stream::QuietStream;
use crate::system_bus;

/// The name on the system bus.
const NAME: &str = "org.csid1";
const GROUP_FILE: &str = "/etc/group";
/// The limit of calls in progress on one connection: the bus', or one of root's. No client needs more, and csid can hold as many.
const CALLS: usize = 4096;
/// Extra slots of another uid's connection, for reads, cancels and refusals while all its operation slots are in use.
const EXTRA_CALLS: usize = 256;
/// The limit of a peer without rights, whose calls are all refused.
const CALLS_OF_STRANGERS: usize = 8;
/// The limits of peers of the private socket: of one uid, and of all uids except root.
const PEERS_PER_UID: usize = 256;
const PEERS: usize = 1024;
/// The limit of messages read ahead on the bus connection. Each may be as large as the bus allows.
const QUEUED_ON_BUS: NonZeroUsize = NonZeroUsize::new(8).unwrap();
/// The timeout of a peer's login.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// The timeout of writing one answer. A peer that reads nothing for this time is disconnected, because its answers occupy memory and
/// its uid's slots.
const WRITE: Duration = Duration::from_secs(10);
/// The time for calls in progress to end when csid stops.
const GRACE: Duration = Duration::from_secs(5);
const RECONNECT: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(30));

/// Serves the private socket until csid stops.
pub async fn serve_socket(
    listener: std::os::unix::net::UnixListener,
    rooms: Rooms,
    signals: Signals,
) -> std::io::Result<()> {
    serve_peers(listener, rooms, signals, GROUP_FILE.into()).await
}

/// Serves the system bus until csid stops. It reconnects whenever the bus is gone.
pub async fn serve_bus(rooms: Rooms, signals: Signals) {
    serve_bus_at(None, rooms, signals, GROUP_FILE.into(), Timeouts::default()).await;
}

/// Waits until csid stops.
async fn stopping(rooms: &Rooms) {
    let mut state = rooms.state.clone();
    // A dropped sender means that the daemon has stopped too.
    let _ = state.wait_for(|state| *state == State::Stopping).await;
}

/// A task that ends when this is dropped.
struct Background(tokio::task::JoinHandle<()>);

impl Background {
    fn spawn(task: impl Future<Output = ()> + Send + 'static) -> Self {
        Background(tokio::spawn(task))
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        self.0.abort();
    }
}

pub(super) async fn serve_peers(
    listener: std::os::unix::net::UnixListener,
    rooms: Rooms,
    signals: Signals,
    group_file: PathBuf,
) -> std::io::Result<()> {
    listener.set_nonblocking(true)?;
    let listener = UnixListener::from_std(listener)?;
    let server = Arc::new(Server { rooms: rooms.clone(), authoriser: Authoriser::for_socket() });
    let guid = OwnedGuid::from(Guid::generate());
    let seats = Seats::default();
    let mut peers = JoinSet::new();
    let mut number = 0_u64;
    loop {
        let accepted = tokio::select! {
            () = stopping(&rooms) => break,
            Some(_) = peers.join_next() => continue,
            accepted = accept(&listener, &rooms) => accepted,
        };
        let stream = match accepted {
            Ok(stream) => stream,
            Err(error) => {
                // Usually csid has no free descriptors. The peer waits in the queue.
                warn!(%error, "cannot accept on the private socket");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let Ok(credentials) = Credentials::of(&stream) else { continue };
        let Some(seat) = seats.take(credentials.uid) else {
            warn!(uid = credentials.uid, "connection closed: too many connections on the private socket");
            continue;
        };
        number += 1;
        let connected = rooms.volumes.connected(format!("{guid}/{number}"));
        let caller = Caller::on_socket(&credentials, csid_group(&group_file));
        let caller = Arc::new(Caller { name: connected.name().to_owned(), ..caller });
        let peer = serve_peer(stream, server.clone(), caller, signals.clone(), guid.clone());
        peers.spawn(async move {
            peer.await;
            drop((connected, seat));
        });
    }
    while peers.join_next().await.is_some() {}
    Ok(())
}

/// Returns the next peer. csid's state cannot change to stopping during accept(2). A later peer waits in the queue for the next csid.
async fn accept(listener: &UnixListener, rooms: &Rooms) -> std::io::Result<UnixStream> {
    let accepted = poll_fn(|context| match *rooms.state.borrow() {
        State::Stopping => Poll::Pending,
        _ => listener.poll_accept(context),
    });
    Ok(accepted.await?.0)
}

async fn serve_peer(
    stream: UnixStream,
    server: Arc<Server>,
    caller: Arc<Caller>,
    signals: Signals,
    guid: OwnedGuid,
) {
    let reads = server.authoriser.permit(&caller, PolkitAction::Read).await.is_ok();
    let Ok(socket) = stream.as_fd().try_clone_to_owned() else { return };
    let takes = match (caller.is_root(), reads) {
        (true, _) => Takes::All,
        (false, true) => {
            let volumes = server.rooms.volumes.clone();
            Takes::Sifted(Sifter { volumes, uid: Some(caller.uid) })
        }
        (false, false) => Takes::Nothing,
    };
    let Ok(stream) = QuietStream::of(stream) else { return };
    let connect = Builder::socket(Transport::peer(stream, takes))
        .server(guid)
        .p2p()
        .auth_mechanism(AuthMechanism::External)
        .max_queued(NonZeroUsize::MIN)
        .validate_bodies()
        .build_message_stream();
    let connected = tokio::select! {
        connected = tokio::time::timeout(HANDSHAKE, connect) => connected,
        () = stopping(&server.rooms) => return,
    };
    let stream = match connected {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => {
            return debug!(%error, uid = caller.uid, "a peer of the private socket failed to log in");
        }
        Err(_) => {
            return debug!(
                uid = caller.uid,
                "a peer of the private socket did not log in before the timeout"
            );
        }
    };
    let connection = Connection::from(&stream);
    let _forward =
        reads.then(|| Background::spawn(signals::forward(connection.clone(), signals.subscribe())));
    drop(signals);
    let bound = match reads {
        true if caller.is_root() => CALLS,
        true => server.rooms.config.borrow().operations_per_uid.saturating_add(EXTRA_CALLS).min(CALLS),
        false => CALLS_OF_STRANGERS,
    };
    serve(stream, server, CallerSource::Peer(caller), bound).await;
    // zbus could not do it: a blocked answer may hold its lock.
    let _ = rustix::net::shutdown(&socket, rustix::net::Shutdown::Both);
}

/// Writes a connection's answers in turn, so that the timeout of each begins with its own turn.
struct Answers {
    connection: Connection,
    turn: Semaphore,
    stuck: Notify,
}

impl Answers {
    async fn send(&self, answer: &Message, call: &Message) {
        // Closed: the peer is being disconnected and needs no answer.
        let Ok(_turn) = self.turn.acquire().await else { return };
        match tokio::time::timeout(WRITE, self.connection.send(answer)).await {
            Err(_) => {
                self.turn.close();
                self.stuck.notify_one();
            }
            // The answer has a descriptor, and the peer did not negotiate descriptors.
            Ok(Err(zbus::Error::Unsupported)) => {
                if let Some(refusal) = failure::without_descriptors(call) {
                    let _ = tokio::time::timeout(WRITE, self.connection.send(&refusal)).await;
                }
            }
            Ok(_) => {}
        }
    }
}

/// Reads calls and answers each in a task of its own, until the connection ends, its peer stops reading, or csid stops.
async fn serve(mut stream: MessageStream, server: Arc<Server>, who: CallerSource, bound: usize) {
    let answers = Arc::new(Answers {
        connection: Connection::from(&stream),
        turn: Semaphore::new(1),
        stuck: Notify::new(),
    });
    let slots = Arc::new(Semaphore::new(bound));
    let read = async {
        while let Some(Ok(message)) = stream.next().await {
            if message.message_type() != Type::MethodCall {
                continue;
            }
            let Ok(slot) = slots.clone().acquire_owned().await else { return };
            let (server, who, answers) = (server.clone(), who.clone(), answers.clone());
            tokio::spawn(async move {
                if let Some((answer, until_sent)) = answer(&server, &who, message.clone()).await {
                    answers.send(&answer, &message).await;
                    // The answer first, so that its descriptor is not the last one.
                    drop(answer);
                    drop(until_sent);
                }
                drop(slot);
            });
        }
    };
    let stopped = tokio::select! {
        () = read => false,
        () = answers.stuck.notified() => {
            warn!("peer disconnected: it did not read its answer for {WRITE:?}");
            false
        }
        () = stopping(&server.rooms) => true,
    };
    drop(stream);
    if stopped {
        let all = u32::try_from(bound).unwrap_or(u32::MAX);
        let _ = tokio::time::timeout(GRACE, slots.acquire_many(all)).await;
    }
}

/// Counts of connected peers, by uid. Root is not counted, so other users cannot exhaust its connections.
#[derive(Clone, Default)]
struct Seats(Arc<Mutex<HashMap<u32, usize>>>);

struct Seat(Option<(Seats, u32)>);

impl Seats {
    fn take(&self, uid: u32) -> Option<Seat> {
        if uid == 0 {
            return Some(Seat(None));
        }
        let mut taken = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if taken.values().sum::<usize>() >= PEERS || taken.get(&uid).is_some_and(|n| *n >= PEERS_PER_UID) {
            return None;
        }
        *taken.entry(uid).or_insert(0) += 1;
        Some(Seat(Some((self.clone(), uid))))
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let Some((seats, uid)) = self.0.take() else { return };
        let mut taken = seats.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = taken.get_mut(&uid) {
            *count -= 1;
            if *count == 0 {
                taken.remove(&uid);
            }
        }
    }
}

/// Serves a bus until csid stops. `address`: another bus than the system's, for the tests.
pub(super) async fn serve_bus_at(
    address: Option<Address>,
    rooms: Rooms,
    signals: Signals,
    group_file: PathBuf,
    timeouts: Timeouts,
) {
    let mut pause = RECONNECT.0;
    loop {
        match on_bus(address.clone(), &rooms, &signals, &group_file, timeouts).await {
            Ok(Ended::Stopped) => return,
            Ok(Ended::Disconnected) => {
                warn!("the system bus is gone; the private socket is still served");
                pause = RECONNECT.0;
            }
            Err(error) => warn!(%error, "no service on the system bus; trying again in {pause:?}"),
        }
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = stopping(&rooms) => return,
        }
        pause = (pause * 2).min(RECONNECT.1);
    }
}

enum Ended {
    Stopped,
    Disconnected,
}

async fn on_bus(
    address: Option<Address>,
    rooms: &Rooms,
    signals: &Signals,
    group_file: &std::path::Path,
    timeouts: Timeouts,
) -> zbus::Result<Ended> {
    let connect = async {
        let sifter = Sifter { volumes: rooms.volumes.clone(), uid: None };
        let stream = builder(address.as_ref(), Takes::Sifted(sifter)).await?;
        let stream = stream.max_queued(QUEUED_ON_BUS).build_message_stream().await?;
        // Questions about callers need another connection, because their answers must be read even while calls are not.
        zbus::Result::Ok((stream, builder(address.as_ref(), Takes::Nothing).await?.build().await?))
    };
    let (stream, asker) = tokio::select! {
        connected = connect => connected?,
        () = stopping(rooms) => return Ok(Ended::Stopped),
    };
    let connection = Connection::from(&stream);
    let authoriser = Authoriser::for_bus(Polkit::new(asker.clone(), timeouts));
    let server = Arc::new(Server { rooms: rooms.clone(), authoriser });
    let who = CallerSource::OnBus(Arc::new(Senders::new(asker.clone(), group_file.into())));
    let hang_up = connection.clone();
    let serve = serve(stream, server, who, CALLS);
    tokio::select! {
        () = serve => {}
        // Calls are read meanwhile. Otherwise many calls in front of the answer could keep it from being read.
        error = own_name(&connection, signals) => return Err(error),
        () = asker.closed() => {}
    }
    let _ = tokio::time::timeout(GRACE, hang_up.close()).await;
    match *rooms.state.borrow() {
        State::Stopping => Ok(Ended::Stopped),
        _ => Ok(Ended::Disconnected),
    }
}

/// Connects to the bus over csid's own transport, because every client of the bus may send messages and signals to csid's names.
async fn builder(address: Option<&Address>, takes: Takes) -> zbus::Result<Builder<'static>> {
    let stream = system_bus::connect(address).await?;
    Ok(Builder::socket(Transport::bus(stream, takes)))
}

/// Acquires the name, and then sends signals. Earlier the receivers' policy could not tell that they come from csid. Returns only if
/// the name cannot be acquired.
async fn own_name(connection: &Connection, signals: &Signals) -> zbus::Error {
    const DBUS: &str = "org.freedesktop.DBus";
    let flags = RequestNameFlags::DO_NOT_QUEUE;
    let request = async {
        let body = (NAME, flags);
        let reply = connection
            .call_method(Some(DBUS), "/org/freedesktop/DBus", Some(DBUS), "RequestName", &body)
            .await?;
        match reply.body().deserialize::<RequestNameReply>()? {
            RequestNameReply::PrimaryOwner | RequestNameReply::AlreadyOwner => Ok(()),
            _ => Err(zbus::Error::NameTaken),
        }
    };
    match request.await {
        Ok(()) => {
            info!("serving {NAME} on the system bus");
            signals::forward(connection.clone(), signals.subscribe()).await;
            std::future::pending().await
        }
        Err(error) => error,
    }
}
