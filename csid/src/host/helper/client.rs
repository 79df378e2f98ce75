//! The side of the helper in csid: its connections, and the calls that wait.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType};
use serde::de::DeserializeOwned;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

use crate::host::deadline::DEADLINE;
use crate::host::error::HostError;
use crate::host::helper::places::SiftPlaces;
use crate::host::helper::slots::{self, Slots};
use crate::host::helper::ticker::Ticker;
use crate::host::helper::turns::{PathTurn, PathTurns};
use crate::host::helper::wire::{self, HelperRequest};
use crate::host::helper::worker;

/// The helper's socket, in csid's runtime directory.
pub const SOCKET: &str = "helper.sock";
/// Calls at once that have not taken [`SLOW`] yet.
const QUICK: usize = 24;
/// The number of these calls for one plugin, those that watch its mounts included. The other places are for other plugins, however
/// many of its file systems hang.
const QUICK_EACH: usize = 12;
/// Calls that have taken longer; with [`QUICK`] fewer than there can be workers.
const ASIDE: usize = 104;
/// The number of these calls for one plugin, and of those that watch its mounts.
const ASIDE_EACH: usize = 32;
/// A call is put aside once it has taken as long as this, and before it has taken twice as long.
const SLOW: Duration = Duration::from_millis(20);

/// Workers without a call that are kept. Others end at the end of a call, when they have had none for [`IDLE`].
const KEPT: usize = 8;
const IDLE: Duration = Duration::from_secs(10);

/// The end of the name by which calls that watch a plugin's mounts are bounded. The beginning is the plugin's name.
pub(in crate::host) const WATCHED: &str = ", watched";
/// The name by which the helper's closes are bounded, as a plugin's calls are.
const CLOSING: &str = "";

/// How long a full backlog is given before the next try.
const AGAIN: Duration = Duration::from_millis(10);

/// An answer that did not come.
#[derive(Debug)]
pub(in crate::host) enum Unanswered {
    /// The call was not made, for an earlier one at its path hangs, or too many of its plugin's; or it hangs itself.
    Hung,
    /// The worker ended, or cannot be reached. The call may have been made.
    Lost(io::Error),
}

enum Connect {
    Socket(PathBuf),
    /// Threads of this process, and the slots that none of them has.
    Threads(Slots, Arc<Mutex<Vec<usize>>>),
}

/// The handle of the helper.
#[derive(Clone)]
pub(in crate::host) struct Helper(pub(super) Arc<Inner>);

pub(super) struct Inner {
    connect: Connect,
    /// The workers without a call, and since when. The last one had a call last.
    idle: Mutex<VecDeque<(Instant, Connection)>>,
    quick: Arc<Room>,
    /// The room of each plugin with a quick call, or with one that waits. Others are removed at the next call.
    quick_each: Mutex<BTreeMap<String, Arc<Room>>>,
    aside: Arc<Semaphore>,
    turns: PathTurns,
    ticker: Ticker,
    /// How many of each plugin's calls are aside.
    aside_each: Mutex<BTreeMap<String, usize>>,
    pub(super) sifting: SiftPlaces,
}

impl Helper {
    /// Returns a handle of the helper that listens at `socket`; nothing is connected yet.
    pub(in crate::host) fn at(socket: PathBuf) -> Helper {
        Helper::new(Connect::Socket(socket))
    }

    /// Returns a helper whose workers are threads of this process, for tests: it is held up by what hangs.
    pub(in crate::host) fn of_threads() -> Helper {
        Helper::new(Connect::Threads(Slots::own(), Arc::new(Mutex::new((0..slots::WORKERS).collect()))))
    }

    fn new(connect: Connect) -> Helper {
        Helper(Arc::new(Inner {
            connect,
            idle: Mutex::default(),
            quick: Room::new(QUICK),
            quick_each: Mutex::default(),
            aside: Arc::new(Semaphore::new(ASIDE)),
            turns: PathTurns::default(),
            ticker: Ticker::new(SLOW),
            aside_each: Mutex::default(),
            sifting: SiftPlaces::default(),
        }))
    }

    /// Makes the call for `plugin`. When the answer is no longer waited for, the worker takes no further step. `patience`: how
    /// long the answer is waited for once a worker has the call; `None`: however long it takes.
    pub(in crate::host) async fn call<T: DeserializeOwned>(
        &self,
        plugin: &str,
        request: &HelperRequest,
        fd: Option<OwnedFd>,
        patience: Option<Duration>,
    ) -> Result<(T, Option<Tree>), Unanswered> {
        let fd = Arc::new(Mutex::new(fd));
        self.call_with(plugin, request, fd, patience).await
    }

    /// Makes the call as [`Self::call`] does. The descriptor is taken out of `fd` once a worker has it.
    async fn call_with<T: DeserializeOwned>(
        &self,
        plugin: &str,
        request: &HelperRequest,
        fd: Unsent,
        patience: Option<Duration>,
    ) -> Result<(T, Option<Tree>), Unanswered> {
        let lost = |error: serde_json::Error| Unanswered::Lost(error.into());
        let packet = serde_json::to_vec(request).map_err(lost)?;
        let turn = match request.is_despite_hung() {
            true => PathTurn::default(),
            false => self.0.turns.wait(&request.paths()).await.ok_or(Unanswered::Hung)?,
        };
        let quick = self.0.enter(plugin, patience).await?;
        if !request.is_despite_hung() && self.0.is_full(plugin) {
            return Err(Unanswered::Hung);
        }
        let (reply, answer) = oneshot::channel();
        let call = Call { plugin: plugin.to_owned(), packet, fd, quick, turn };
        tokio::spawn(Arc::clone(&self.0).carry(call, reply));
        let ended = || Unanswered::Lost(io::ErrorKind::UnexpectedEof.into());
        let answer = match patience {
            None => answer.await,
            Some(patience) => tokio::time::timeout(patience, answer).await.map_err(|_| Unanswered::Hung)?,
        };
        let (packet, fd) = answer.map_err(|_| ended())?.map_err(Unanswered::Lost)?;
        Ok((serde_json::from_slice(&packet).map_err(lost)?, fd))
    }

    /// Returns the descriptor as one that a worker closes.
    pub(in crate::host) fn tree(&self, fd: OwnedFd) -> Tree {
        Tree { fd: Some(fd), helper: self.clone() }
    }

    /// Closes the descriptor by a worker, and tries until a worker has it.
    fn close(&self, fd: OwnedFd) {
        // Without an executor csid is at its end, which closes everything.
        let Ok(executor) = tokio::runtime::Handle::try_current() else { return };
        let (helper, fd) = (self.clone(), Arc::new(Mutex::new(Some(fd))));
        let is_unsent = |fd: &Unsent| fd.lock().unwrap_or_else(PoisonError::into_inner).is_some();
        executor.spawn(async move {
            let mut pause = AGAIN;
            loop {
                let closed = helper.call_with::<Result<(), HostError>>(
                    CLOSING,
                    &HelperRequest::Close,
                    Arc::clone(&fd),
                    None,
                );
                let closed = closed.await;
                if !is_unsent(&fd) {
                    return;
                }
                if let Err(error) = closed {
                    tracing::warn!(?error, "no worker of the helper takes a mount to close it; trying again");
                }
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(DEADLINE);
            }
        });
    }
}

/// A descriptor that no worker has received yet; `None`: one has, or there was none.
type Unsent = Arc<Mutex<Option<OwnedFd>>>;

/// A descriptor of a mount that is attached nowhere. Dropping it has the helper close it, for the close of the last one may wait
/// for the file system's server.
pub struct Tree {
    fd: Option<OwnedFd>,
    helper: Helper,
}

impl Tree {
    /// Returns the descriptor, for a request to a worker.
    pub(in crate::host) fn into_fd(mut self) -> Option<OwnedFd> {
        self.fd.take()
    }
}

impl AsFd for Tree {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.fd {
            Some(fd) => fd.as_fd(),
            // Only while it is dropped.
            None => rustix::fs::CWD,
        }
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        if let Some(fd) = self.fd.take() {
            self.helper.close(fd);
        }
    }
}

/// The places of calls that have not taken [`SLOW`] yet. Calls that wait for one get it in their order.
struct Room {
    places: Semaphore,
    /// How many calls have left the room: they ended, or were put aside.
    left: AtomicU64,
}

/// A call's place in a room; dropping it lets the next call in.
struct Place {
    room: Arc<Room>,
    /// Whether the call leaves the room with it. A call that waits for a second place in vain does not.
    leaves: bool,
}

/// The places of a quick call: among its plugin's calls, and among all.
type Quick = (Place, Place);

impl Room {
    fn new(places: usize) -> Arc<Room> {
        Arc::new(Room { places: Semaphore::new(places), left: AtomicU64::new(0) })
    }

    /// Waits for a place. Fails if no call leaves the room in twice the time of `patience`: the calls in it hang, and there is no
    /// space to put them aside. `None`: waits however long it takes.
    async fn enter(self: &Arc<Self>, patience: Option<Duration>) -> Result<Place, Unanswered> {
        let mut place = std::pin::pin!(self.places.acquire());
        let place = match patience {
            None => place.await,
            Some(patience) => loop {
                let left = self.left.load(Ordering::Relaxed);
                match tokio::time::timeout(2 * patience, &mut place).await {
                    Ok(place) => break place,
                    Err(_) if self.left.load(Ordering::Relaxed) == left => {
                        return Err(Unanswered::Lost(io::ErrorKind::TimedOut.into()));
                    }
                    // Many calls are before this one, and they leave.
                    Err(_) => {}
                }
            },
        };
        // Dropping the place gives it back.
        place.map_err(|closed| Unanswered::Lost(io::Error::other(closed)))?.forget();
        Ok(Place { room: Arc::clone(self), leaves: false })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.room.left.fetch_add(u64::from(self.leaves), Ordering::Relaxed);
        self.room.places.add_permits(1);
    }
}

/// A call that is to be carried out.
struct Call {
    plugin: String,
    packet: Vec<u8>,
    fd: Unsent,
    quick: Quick,
    turn: PathTurn,
}

type Packet = io::Result<(Vec<u8>, Option<Tree>)>;

impl Inner {
    fn is_full(&self, plugin: &str) -> bool {
        let aside = self.aside_each.lock().unwrap_or_else(PoisonError::into_inner);
        aside.get(plugin).is_some_and(|aside| *aside >= ASIDE_EACH)
    }

    /// Waits for a place among the plugin's quick calls, and then for one among all. So at most [`QUICK_EACH`] calls of a plugin are
    /// before another plugin's.
    async fn enter(&self, plugin: &str, patience: Option<Duration>) -> Result<Quick, Unanswered> {
        let plugin = plugin.strip_suffix(WATCHED).unwrap_or(plugin);
        let own = {
            let mut each = self.quick_each.lock().unwrap_or_else(PoisonError::into_inner);
            each.retain(|_, room| Arc::strong_count(room) > 1);
            Arc::clone(each.entry(plugin.to_owned()).or_insert_with(|| Room::new(QUICK_EACH)))
        };
        let mut own = own.enter(patience).await?;
        let mut common = self.quick.enter(patience).await?;
        own.leaves = true;
        common.leaves = true;
        Ok((own, common))
    }

    async fn carry(self: Arc<Self>, call: Call, mut reply: oneshot::Sender<Packet>) {
        let Call { plugin, packet, fd, quick, turn } = call;
        let mut quick = Some(quick);
        let unsent = fd.lock().unwrap_or_else(PoisonError::into_inner).take();
        let connection = match self.send(&packet, unsent.as_ref()).await {
            Ok(connection) => connection,
            Err(error) => {
                *fd.lock().unwrap_or_else(PoisonError::into_inner) = unsent;
                let _ = reply.send(Err(error));
                return;
            }
        };
        drop(unsent);
        let mut receiving = Box::pin(connection.receive());
        let mut aside = None;
        let ticks = self.ticker.start();
        let mut tick = std::pin::pin!(ticks.next());
        let mut is_slow = false;
        let mut is_wanted = true;
        let received = loop {
            tokio::select! {
                biased;
                received = &mut receiving => break received,
                () = &mut tick, if aside.is_none() => {
                    tick.set(ticks.next());
                    if is_slow {
                        // No room: it stays among the quick ones, and is asked again at the next tick whether there is room.
                        aside = Aside::enter(&self, &plugin);
                    }
                    if aside.is_some() {
                        quick = None;
                        ticks.stop();
                    }
                    is_slow = true;
                }
                () = reply.closed(), if is_wanted => {
                    is_wanted = false;
                    connection.abandon();
                }
            }
        };
        drop((receiving, aside, turn));
        if received.is_ok() && is_wanted {
            self.keep(connection);
        }
        drop(quick);
        let helper = Helper(self);
        let _ = reply.send(received.map(|(packet, fd)| {
            let tree = fd.map(|fd| Tree { fd: Some(fd), helper });
            (packet, tree)
        }));
    }

    /// Sends a request to an idle worker or a new one; one that has ended meanwhile has not read it.
    async fn send(&self, packet: &[u8], fd: Option<&OwnedFd>) -> io::Result<Connection> {
        loop {
            let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop_back();
            let is_new = idle.is_none();
            let connection = match idle {
                Some((_, connection)) => connection,
                None => self.connect().await?,
            };
            match connection.send(packet, fd).await {
                Err(_) if !is_new => {}
                sent => return sent.map(|()| connection),
            }
        }
    }

    /// Keeps a worker for the next call, and ends those that are too many.
    fn keep(&self, connection: Connection) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.len() < QUICK {
            idle.push_back((Instant::now(), connection));
        }
        while idle.len() > KEPT && idle.front().is_some_and(|(since, _)| since.elapsed() >= IDLE) {
            idle.pop_front();
        }
    }

    pub(super) async fn connect(&self) -> io::Result<Connection> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        match &self.connect {
            Connect::Socket(path) => {
                let socket =
                    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
                let address = SocketAddrUnix::new(path)?;
                // EAGAIN: the helper has not accepted the connections before this one yet.
                while let Err(error) = rustix::net::connect(&socket, &address) {
                    if error != rustix::io::Errno::AGAIN {
                        return Err(error.into());
                    }
                    tokio::time::sleep(AGAIN).await;
                }
                Connection::new(socket)
            }
            Connect::Threads(slots, free) => {
                let (own, other) = rustix::net::socketpair(
                    AddressFamily::UNIX,
                    SocketType::SEQPACKET,
                    SocketFlags::CLOEXEC,
                    None,
                )?;
                rustix::io::ioctl_fionbio(&own, true)?;
                let (slots, free) = (slots.clone(), Arc::clone(free));
                let slot = free.lock().unwrap_or_else(PoisonError::into_inner).pop();
                let slot = slot.ok_or(io::ErrorKind::WouldBlock)?;
                std::thread::Builder::new().spawn(move || {
                    worker::serve(other, &slots, slot);
                    free.lock().unwrap_or_else(PoisonError::into_inner).push(slot);
                })?;
                Connection::new(own)
            }
        }
    }
}

/// A call that is aside; dropping it ends that.
struct Aside {
    inner: Arc<Inner>,
    plugin: String,
    _permit: OwnedSemaphorePermit,
}

impl Aside {
    /// `None`: there is no room.
    fn enter(inner: &Arc<Inner>, plugin: &str) -> Option<Aside> {
        let permit = Arc::clone(&inner.aside).try_acquire_owned().ok()?;
        let mut each = inner.aside_each.lock().unwrap_or_else(PoisonError::into_inner);
        *each.entry(plugin.to_owned()).or_default() += 1;
        Some(Aside { inner: Arc::clone(inner), plugin: plugin.to_owned(), _permit: permit })
    }
}

impl Drop for Aside {
    fn drop(&mut self) {
        let mut each = self.inner.aside_each.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = each.get_mut(&self.plugin) {
            *count -= 1;
            if *count == 0 {
                each.remove(&self.plugin);
            }
        }
    }
}

/// A connection to one worker. csid waits only for answers: it would also wake each time the worker has read a request.
pub(super) struct Connection(AsyncFd<OwnedFd>);

impl Connection {
    fn new(socket: OwnedFd) -> io::Result<Connection> {
        #[expect(deprecated, reason = "safe for an OwnedFd; what replaces it is unsafe for every type")]
        let socket = AsyncFd::with_interest(socket, Interest::READABLE)?;
        Ok(Connection(socket))
    }

    pub(super) async fn send(&self, packet: &[u8], fd: Option<&OwnedFd>) -> io::Result<()> {
        loop {
            match wire::send(self.0.get_ref(), packet, fd) {
                // The worker has not read the packet before, or the kernel has no memory for this one.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => tokio::time::sleep(AGAIN).await,
                sent => return sent,
            }
        }
    }

    /// Receives the answer. A worker sends one packet for each request, so nothing is to be read after it.
    pub(super) async fn receive(&self) -> io::Result<(Vec<u8>, Option<OwnedFd>)> {
        let mut buffer = Vec::new();
        loop {
            let mut readable = self.0.readable().await?;
            let received = wire::receive(self.0.get_ref(), &mut buffer);
            readable.clear_ready();
            match received {
                Ok(Some(fd)) => return Ok((buffer, fd)),
                Ok(None) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Err(rustix::io::Errno::AGAIN) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Lets the worker know that nothing waits for its call.
    fn abandon(&self) {
        let _ = rustix::net::shutdown(self.0.get_ref(), Shutdown::Write);
    }
}

/// Returns the path that names an unanswered call.
pub(in crate::host) fn hung_at(request: &HelperRequest) -> &Path {
    match request {
        HelperRequest::RemoveLeft { paths, .. } => paths.last().map_or(Path::new("/"), |(_, path)| path),
        request => request.paths().pop().unwrap_or(Path::new("/")),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{PipeReader, Read, pipe};

    use super::*;

    fn helper_at(socket: &Path) -> OwnedFd {
        let listener =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
        let listener = listener.unwrap();
        rustix::net::bind(&listener, &SocketAddrUnix::new(socket).unwrap()).unwrap();
        rustix::net::listen(&listener, 64).unwrap();
        listener
    }

    /// Accepts a connection and receives one request with its descriptor.
    async fn received(listener: OwnedFd) -> (OwnedFd, HelperRequest, OwnedFd) {
        let received = tokio::task::spawn_blocking(move || {
            let connection = rustix::net::accept(&listener).unwrap();
            let mut buffer = Vec::new();
            let fd = wire::receive(&connection, &mut buffer).unwrap().unwrap().expect("a descriptor");
            (connection, serde_json::from_slice(&buffer).unwrap(), fd)
        });
        received.await.unwrap()
    }

    fn is_open(reader: &PipeReader) -> bool {
        let reading = rustix::event::PollFlags::IN;
        let mut fds = [rustix::event::PollFd::new(reader, reading)];
        rustix::event::poll(&mut fds, Some(&rustix::event::Timespec::default())).unwrap() == 0
    }

    #[tokio::test]
    async fn call_without_a_second_place_leaves_no_room() {
        let inner = Helper::of_threads().0;
        let all = inner.quick.places.acquire_many(QUICK as u32).await.unwrap();
        let own = Room::new(QUICK_EACH);
        inner.quick_each.lock().unwrap().insert("p".to_owned(), Arc::clone(&own));
        assert!(inner.enter("p", Some(Duration::from_millis(10))).await.is_err());
        assert_eq!(
            own.left.load(Ordering::Relaxed),
            0,
            "a call that waits for this room would go on waiting"
        );
        assert_eq!(own.places.available_permits(), QUICK_EACH);
        drop(all);
        drop(inner.enter("p", Some(Duration::from_millis(10))).await.ok().unwrap());
        assert_eq!(own.left.load(Ordering::Relaxed), 1);
    }

    #[tokio::test]
    async fn dropped_tree_is_closed_by_a_worker() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("socket");
        let listener = helper_at(&socket);
        let (mut reader, writer) = pipe().unwrap();
        drop(Tree { fd: Some(writer.into()), helper: Helper::at(socket) });
        let (_connection, request, fd) = received(listener).await;
        assert!(matches!(request, HelperRequest::Close), "{request:?}");
        assert!(is_open(&reader));
        drop(fd);
        assert_eq!(reader.read(&mut [0]).unwrap(), 0, "the worker has the only descriptor");
    }

    #[tokio::test]
    async fn tree_stays_open_until_a_worker_takes_it() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("socket");
        let (mut reader, writer) = pipe().unwrap();
        let helper = Helper::at(socket.clone());
        let tree = Arc::new(Mutex::new(Some(OwnedFd::from(writer))));
        let closed =
            helper.call_with::<Result<(), HostError>>("", &HelperRequest::Close, Arc::clone(&tree), None);
        assert!(matches!(closed.await, Err(Unanswered::Lost(_))), "nothing listens");
        let unsent = tree.lock().unwrap().take().expect("the descriptor is given back");
        drop(Tree { fd: Some(unsent), helper });
        let (_connection, _, fd) = received(helper_at(&socket)).await;
        assert!(is_open(&reader));
        drop(fd);
        assert_eq!(reader.read(&mut [0]).unwrap(), 0);
    }

    #[tokio::test]
    async fn answer_nothing_waits_for_is_closed_by_a_worker() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("socket");
        let listener = helper_at(&socket);
        let again = listener.try_clone().unwrap();
        let (mut reader, writer) = pipe().unwrap();
        let helper = Helper::at(socket);
        let request = HelperRequest::OpenTree {
            source: "/".into(),
            shown: crate::host::Look::Missing,
            subpath: None,
            how: crate::host::Restrict::default(),
        };
        let calling = tokio::spawn(async move {
            let patience = Some(Duration::from_millis(1));
            helper.call::<Result<Option<bool>, HostError>>("p", &request, None, patience).await.is_err()
        });
        let connection = tokio::task::spawn_blocking(move || {
            let connection = rustix::net::accept(&listener).unwrap();
            wire::receive(&connection, &mut Vec::new()).unwrap().unwrap();
            connection
        });
        let connection = connection.await.unwrap();
        assert!(calling.await.unwrap(), "it hangs");
        let answer = serde_json::to_vec(&Ok::<_, HostError>(Some(false))).unwrap();
        wire::send(&connection, &answer, Some(&writer.into())).unwrap();
        let (_connection, request, fd) = received(again).await;
        assert!(matches!(request, HelperRequest::Close), "{request:?}");
        assert!(is_open(&reader));
        drop(fd);
        assert_eq!(reader.read(&mut [0]).unwrap(), 0);
    }

    /// Accepts connections and answers none of their requests. Returns how many came before the request about `path`.
    async fn requests_before(listener: OwnedFd, path: &'static str) -> usize {
        let counted = tokio::task::spawn_blocking(move || {
            let mut unanswered = Vec::new();
            loop {
                let connection = rustix::net::accept(&listener).unwrap();
                let mut buffer = Vec::new();
                wire::receive(&connection, &mut buffer).unwrap();
                let request: HelperRequest = serde_json::from_slice(&buffer).unwrap();
                if request.paths() == [Path::new(path)] {
                    return unanswered.len();
                }
                unanswered.push(connection);
            }
        });
        counted.await.unwrap()
    }

    #[tokio::test]
    async fn hung_calls_leave_places_to_another_plugin() {
        const HUNG: usize = 3 * QUICK;
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("socket");
        let listener = helper_at(&socket);
        let helper = Helper::at(socket);
        let call = |plugin: String, path: PathBuf| {
            let helper = helper.clone();
            tokio::spawn(async move {
                let request = HelperRequest::Look { path, despite_hung: false };
                helper.call::<()>(&plugin, &request, None, None).await.map(|_| ())
            })
        };
        for n in 0..HUNG {
            let watched = if n % 2 == 0 { "" } else { WATCHED };
            call(format!("p{watched}"), format!("/p/{n}").into());
        }
        call("q".into(), "/q".into());
        let before = requests_before(listener, "/q").await;
        assert!(before < QUICK, "{before} of {HUNG} requests of p were sent before q's");
    }

    #[tokio::test]
    async fn workers_without_a_call_for_long_end() {
        let Helper(inner) = Helper::of_threads();
        let idle = || inner.idle.lock().unwrap();
        for _ in 0..=QUICK {
            let connection = inner.connect().await.unwrap();
            inner.keep(connection);
        }
        assert_eq!(idle().len(), QUICK, "one was too many");
        let (_, last) = idle().pop_back().unwrap();
        idle().iter_mut().for_each(|(since, _)| *since -= IDLE);
        inner.keep(last);
        assert_eq!(idle().len(), KEPT);
        assert!(idle().back().is_some_and(|(since, _)| since.elapsed() < IDLE), "it has just had a call");
    }

    #[tokio::test]
    async fn plugins_room_is_gone_after_its_last_call() {
        let Helper(inner) = Helper::at("/".into());
        let mut calls = Vec::new();
        for _ in 0..QUICK_EACH {
            calls.push(inner.enter("p", None).await.unwrap());
        }
        let patience = Some(Duration::from_millis(1));
        assert!(matches!(inner.enter("p", patience).await, Err(Unanswered::Lost(_))), "no place is free");
        // The call that gave up keeps no place.
        calls.pop();
        calls.push(inner.enter("p", patience).await.unwrap());
        drop(calls);
        let _q = inner.enter("q", patience).await.unwrap();
        let rooms = inner.quick_each.lock().unwrap();
        assert_eq!(rooms.keys().collect::<Vec<_>>(), ["q"]);
        assert_eq!(inner.quick.places.available_permits(), QUICK - 1);
    }
}
