//! The calls to the server of the session.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use csi_proto::cluster::v1::cluster_client::ClusterClient;
use csi_proto::cluster::v1::{
    AttachAsk, AttachmentRow, CallName, Capability, ChangeAsk, ClaimAsk, CreateAsk, DeleteAsk, Deregister,
    DetachAsk, ExpandAsk, ExternalSnapshot, Granted as GrantedRow, Owed, Register, SnapshotAsk, Use,
    ValidateAsk, Validated, VolumeAsk, VolumeRow, change_ask,
};
use futures_util::future::{BoxFuture, FutureExt};
use rustix::time::{ClockId, clock_gettime};
use tokio::sync::Semaphore;
use tonic::transport::Channel;
use tonic::{Response, Status};

use crate::cluster::explained::read_explanation;
use crate::cluster::failure::{read, unavailable};
use crate::cluster::link;
use crate::cluster::node::Node;
use crate::cluster::rows::{read_attached, read_known, read_record, write_spec};
use crate::error::{Error, Kind, Result, presentable, shortened};
use crate::fault;
use crate::random;
use crate::store::registry::{
    Capability as Mode, Claim, MadeSnapshot, Record, Registration, VolumeName, VolumeSpec,
};
use crate::store::rows::VolumeKey;
use crate::volume::rules::{
    check_credential, check_external_id, check_name, check_publish_context, name_call, words_of,
    words_of_capability,
};
use crate::volume::servers::{
    Granted, KnownVolume, RegistrationMark, ServerAttach, ServerCreation, ServerFailure, ServerSnapshot,
    Servers, ServersExplanation,
};

/// How long csid waits for an answer. The server goes on with a change that it has sent to etcd.
const CALL: Duration = Duration::from_secs(10);
/// How long a question waits for a session, and how long a Claim does. Others' operations wait in the queue behind a Claim.
const SESSION: Duration = Duration::from_secs(5);
const CLAIM: Duration = Duration::from_secs(2);

/// How long a server may wait with its answer to a claim that is in the queue, in milliseconds. Others' operations wait behind the call,
/// and it is made again later.
const ANSWER_IN_QUEUE: u32 = 1;

/// The calls whose answers may be in memory at the same time. A server that lies may send the largest ones.
static PLACES: Semaphore = Semaphore::const_new(8);
/// The same of Claims. A server answers one when the volume is attached. A plugin that hangs must not hold up the ends of claims.
static CLAIMS: Semaphore = Semaphore::const_new(12);

/// The same of creations and deletions, which a server answers when the plugin has answered.
static CHANGES: Semaphore = Semaphore::const_new(4);
/// The limit of a plugin's reason, in bytes.
const REASON: usize = 1024;
/// The pause before such a call is made again.
const PAUSE: Duration = Duration::from_millis(200);

/// Bounds a call in time, and the calls in number.
pub(super) async fn answered<T>(
    call: impl Future<Output = Result<Response<T>, Status>>,
) -> Result<T, ServerFailure> {
    answered_in(&PLACES, call).await
}

async fn answered_in<T>(
    places: &Semaphore,
    call: impl Future<Output = Result<Response<T>, Status>>,
) -> Result<T, ServerFailure> {
    // They are never closed.
    let Ok(Ok(_place)) = tokio::time::timeout(CLAIM, places.acquire()).await else {
        let text = "as many calls to the cluster's server as csid makes at the same time have no answer";
        return Err(ServerFailure::NotSent(unavailable(text)));
    };
    let late = || format!("the cluster's server did not answer within {} s", CALL.as_secs());
    match tokio::time::timeout(CALL, call).await {
        Ok(Ok(answer)) => Ok(answer.into_inner()),
        Ok(Err(status)) => Err(read(&status)),
        Err(_) => Err(ServerFailure::Unknown(unavailable(late()))),
    }
}

impl Node {
    /// Returns the row of a volume that etcd has now.
    pub(super) async fn volume_row(
        &self,
        mut client: ClusterClient<Channel>,
        name: &VolumeName,
    ) -> Result<VolumeRow> {
        let ask = VolumeAsk {
            namespace: name.namespace.clone(),
            volume: name.volume.clone(),
            ..VolumeAsk::default()
        };
        let generation = self.generation();
        let row = answered(client.volume(ask)).await?;
        self.has_seen(generation, row.revision);
        Ok(row)
    }

    /// Returns a volume that etcd has now, without its claims, and remembers it.
    async fn ask_for(&self, name: &VolumeName) -> Result<Record> {
        let session = self.remembered.session();
        let client = self.joined(SESSION).await?;
        let mut row = self.volume_row(client, name).await?;
        let mark = std::mem::take(&mut row.mark);
        let record = read_record(name, row)?;
        self.remembered.keep(session, &record, mark);
        Ok(record)
    }

    /// Returns the mark that the server of this session compares. A mark of an earlier session is compared here with the server's present one, so
    /// that a repeated call keeps its name and its place in the queue. Fails with `Changed` if the volume is registered otherwise.
    async fn mark_of_session(
        &self,
        name: &VolumeName,
        mark: Option<RegistrationMark>,
    ) -> Result<Option<RegistrationMark>, ServerFailure> {
        let Some(mark) = mark else { return Ok(None) };
        if mark.session == self.remembered.session() {
            return Ok(Some(mark));
        }
        match self.ask_for(name).await {
            Err(error) if error.kind == Kind::NotFound => {}
            asked => drop(asked.map_err(ServerFailure::NotSent)?),
        }
        match self.remembered.find(name) {
            Some((_, present)) if present.digest == mark.digest => Ok(Some(present)),
            _ => {
                let text = format!(
                    "{name} is registered otherwise than csid knows, or its server compares no marks"
                );
                Err(ServerFailure::Changed(Error::new(Kind::Busy, text)))
            }
        }
    }

    /// Reports to the server that this node has nothing of a claim any more.
    pub(super) async fn report(&self, owed: Owed) -> Result<(), ServerFailure> {
        let mut client = self.client().map_err(ServerFailure::NotSent)?;
        answered(client.detached(Owed { boot: self.boot.clone(), ..owed })).await.map(drop)
    }

    /// Withdraws a call that was granted nothing, as far as this node knows. Returns whether it was granted its claim.
    async fn withdraw(&self, owed: &Owed) -> Result<bool, ServerFailure> {
        let mut client = self.client().map_err(ServerFailure::NotSent)?;
        let name = CallName {
            call: owed.call.clone(),
            namespace: owed.namespace.clone(),
            volume: owed.volume.clone(),
            boot: self.boot.clone(),
        };
        match fault::around("Withdraw", answered(client.withdraw(name))).await {
            Ok(withdrawn) => Ok(withdrawn.taken),
            // A server of an earlier version has no queue. Detached names the call, too.
            Err(ServerFailure::Refused(error)) if error.kind == Kind::NotSupported => Ok(true),
            Err(failure) => Err(failure),
        }
    }
}

impl Node {
    /// Makes a change that takes long, and repeats it until `until`. The same call joins what the servers go on with.
    async fn change_until(&self, what: change_ask::What, until: Instant) -> Result<VolumeRow> {
        // As with a claim: the controller's host may have joined a moment ago.
        let awaits_controller = matches!(what, change_ask::What::Attach(_));
        let ask = ChangeAsk { what: Some(what) };
        loop {
            let generation = self.generation();
            let changed = match self.joined(SESSION).await {
                Ok(mut client) => answered_in(&CHANGES, client.change(ask.clone())).await,
                Err(error) => Err(ServerFailure::NotSent(error)),
            };
            let error = match changed {
                Ok(row) => {
                    self.has_seen(generation, row.revision);
                    return Ok(row);
                }
                Err(ServerFailure::Refused(error))
                    if awaits_controller && error.kind == Kind::PluginUnavailable =>
                {
                    error
                }
                Err(
                    ServerFailure::Refused(error)
                    | ServerFailure::Queued(error)
                    | ServerFailure::Changed(error),
                ) => return Err(error),
                Err(ServerFailure::NotSent(error) | ServerFailure::Unknown(error)) => error,
            };
            if Instant::now() + PAUSE >= until {
                return Err(error);
            }
            tokio::time::sleep(PAUSE).await;
        }
    }
}

impl Node {
    /// Asks for the ID of the registration that is to end. A call that is repeated names it, and ends no registration that was made meanwhile.
    /// Empty: the server is of an earlier version. `None`: there is no registration, or a server of an earlier version has ended it.
    async fn registration_id(&self, asks: change_ask::What, until: Instant) -> Result<Option<String>> {
        let VolumeRow { plugin, registration_id, .. } = self.change_until(asks, until).await?;
        if !registration_id.is_empty() {
            check_name("registration", &registration_id)?;
        }
        Ok((!plugin.is_empty()).then_some(registration_id))
    }
}

impl Node {
    /// Asks the servers one after the other, that of the session first. The controller's node has a session with one of them.
    async fn asked(&self, ask: ChangeAsk) -> Result<VolumeRow> {
        let first = self.joined(SESSION).await?;
        let others = link::servers(&self.link, &self.name).unwrap_or_default();
        let others = others.into_iter().map(|server| link::open(&self.link.join(server)));
        let mut last = unavailable("no server has answered");
        for mut client in std::iter::once(first).chain(others) {
            match answered_in(&CHANGES, client.change(ask.clone())).await {
                Ok(row) => return Ok(row),
                Err(
                    ServerFailure::Refused(error)
                    | ServerFailure::Queued(error)
                    | ServerFailure::Changed(error),
                ) => return Err(error),
                Err(ServerFailure::Unknown(error)) if error.kind == Kind::TimedOut => return Err(error),
                Err(ServerFailure::NotSent(error) | ServerFailure::Unknown(error)) => last = error,
            }
        }
        Err(last)
    }
}

impl Servers for Node {
    fn cluster(&self) -> &str {
        &self.cluster
    }

    fn fence(&self) -> Option<Error> {
        let fenced = || unavailable(format!("this node is fenced, and mounts nothing: {}", self.status()));
        self.fence.number().map(|_| fenced())
    }

    fn drain(&self) -> Option<Error> {
        let text = || format!("node {} drains, and takes no claim and no mount", self.name);
        (self.drain_number() != 0).then(|| Error::new(Kind::Busy, text()))
    }

    fn name_call(&self) -> String {
        // It grows as long as the boot lasts, whatever becomes of csid and of the wall clock.
        let now = clock_gettime(ClockId::Boottime);
        let place = now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs();
        name_call(&self.calls, place, &random::name())
    }

    fn is_of_boot(&self, call: &str) -> bool {
        call.strip_prefix(self.calls.as_str()).is_some_and(|rest| rest.starts_with('.'))
    }

    fn claim(
        &self,
        name: VolumeName,
        claim: Claim,
        wait: Duration,
        mark: Option<RegistrationMark>,
    ) -> BoxFuture<'_, Result<Granted, ServerFailure>> {
        async move {
            let [mode, access_mode, attachment_mode] = words_of(claim.usage).map(str::to_owned);
            let mark = self.mark_of_session(&name, mark).await?;
            let ask = ClaimAsk {
                call: claim.call,
                namespace: name.namespace.clone(),
                volume: name.volume.clone(),
                consumer: claim.consumer.clone(),
                uid: claim.uid,
                r#use: Some(Use { mode, access_mode, attachment_mode }),
                by_mount: claim.by_mount,
                // A controller on another host loads the credential, too. Its name crosses, and no secret. No host loads one of another
                // namespace for a volume of the servers.
                credential: claim
                    .credential
                    .filter(|credential| check_credential(&name.namespace, credential).is_ok())
                    .unwrap_or_default(),
                boot: self.boot.clone(),
                queue_ms: u64::try_from(wait.as_millis()).unwrap_or(u64::MAX),
                answer_ms: ANSWER_IN_QUEUE,
                mark: mark.as_ref().map(|mark| mark.digest.clone()).unwrap_or_default(),
                brings_secrets: claim.secrets_given,
                ..ClaimAsk::default()
            };
            let consumer = claim.consumer;
            let mut client = self.joined(CLAIM).await.map_err(ServerFailure::NotSent)?;
            if mark.is_some_and(|mark| mark.session != self.remembered.session()) {
                let text = format!("{name}: csid has joined another server in the moment of the claim");
                return Err(ServerFailure::NotSent(unavailable(text)));
            }
            // An answer may come after the next session has begun, in another generation.
            let generation = self.generation();
            let GrantedRow { claim: id, volume, publish_context, external_node_id, revision } =
                answered_in(&CLAIMS, client.claim(ask)).await.inspect_err(|failure| match failure {
                    ServerFailure::Changed(_) => self.remembered.forget(&name),
                    ServerFailure::Refused(error) if error.kind == Kind::NotFound => {
                        self.remembered.forget(&name);
                    }
                    _ => {}
                })?;
            let wrong = |error: Error| ServerFailure::Unknown(error);
            if self.generation() != generation {
                // etcd was restored meanwhile, and lacks the claim perhaps. The same call again finds out.
                let text = format!("{name} was granted in generation {generation}, which is over");
                return Err(wrong(Error::new(Kind::Unavailable, text)));
            }
            self.has_seen(generation, revision);
            let volume =
                volume.ok_or_else(|| wrong(Error::internal("a server granted a claim of no volume")))?;
            let record = read_record(&name, volume).map_err(wrong)?;
            check_name("claim", &id).map_err(wrong)?;
            if fault::breaks("early-detached") {
                let VolumeName { namespace, volume } = name.clone();
                self.report(Owed { claim: id.clone(), namespace, volume, consumer, ..Owed::default() })
                    .await?;
            }
            let attached = read_attached(external_node_id, publish_context).map_err(wrong)?;
            Ok(Granted { id, record, attached, generation, revision })
        }
        .boxed()
    }

    fn detached(
        &self,
        name: VolumeName,
        claim: Claim,
        still_staged: bool,
    ) -> BoxFuture<'_, Result<(), ServerFailure>> {
        let owed = Owed {
            claim: claim.id,
            namespace: name.namespace,
            volume: name.volume,
            consumer: claim.consumer,
            still_staged,
            boot: String::new(),
            call: claim.call,
        };
        async move {
            if fault::breaks("no-detached") {
                return Ok(());
            }
            let is_ended = owed.claim.is_empty() && !owed.call.is_empty() && !self.withdraw(&owed).await?;
            if is_ended { Ok(()) } else { self.report(owed).await }
        }
        .boxed()
    }

    fn volume(&self, name: VolumeName) -> BoxFuture<'_, Result<Record>> {
        async move {
            self.ask_for(&name).await.inspect_err(|error| {
                if error.kind == Kind::NotFound {
                    self.remembered.forget(&name);
                }
            })
        }
        .boxed()
    }

    fn known(&self, name: VolumeName, volume: VolumeKey) -> BoxFuture<'_, Result<Option<KnownVolume>>> {
        async move {
            let mut client = self.joined(SESSION).await?;
            let ask = VolumeAsk {
                namespace: name.namespace,
                volume: name.volume,
                external_id: volume.handle.to_string(),
                plugin: volume.plugin,
            };
            match answered(client.volume(ask)).await {
                Ok(row) => read_known(row).map(Some),
                Err(ServerFailure::Refused(error)) if error.kind == Kind::NotFound => Ok(None),
                Err(failure) => Err(failure.into()),
            }
        }
        .boxed()
    }

    fn remembered(&self, name: &VolumeName) -> Option<(Record, RegistrationMark)> {
        self.remembered.find(name)
    }

    fn explain(&self, name: VolumeName) -> BoxFuture<'_, Result<ServersExplanation>> {
        async move {
            let mut client = self.client()?;
            let VolumeName { namespace, volume } = name;
            let explained =
                answered(client.explain(VolumeAsk { namespace, volume, ..VolumeAsk::default() })).await?;
            Ok(read_explanation(explained, &self.name))
        }
        .boxed()
    }

    fn register(
        &self,
        name: VolumeName,
        volume: VolumeKey,
        spec: VolumeSpec,
    ) -> BoxFuture<'_, Result<Record>> {
        async move {
            let ask = registration(&name, volume, &spec)?;
            let mut client = self.joined(SESSION).await?;
            let generation = self.generation();
            // A server may ask a plugin first.
            let row = answered_in(&CHANGES, client.change(ask)).await?;
            self.has_seen(generation, row.revision);
            read_registered(&name, row, spec)
        }
        .boxed()
    }

    fn register_before_join(
        &self,
        name: VolumeName,
        volume: VolumeKey,
        spec: VolumeSpec,
    ) -> BoxFuture<'_, Result<Record>> {
        async move {
            let ask = registration(&name, volume, &spec)?;
            let mut last = unavailable(format!("{} has no socket of a server", self.link.display()));
            // The same registration again changes nothing, so the next server may be asked for it.
            for server in link::servers(&self.link, &self.name).unwrap_or_default() {
                let mut client = link::open(&self.link.join(server));
                match answered(client.change(ask.clone())).await {
                    Ok(row) if row.owner != format!("node/{}", self.name) => {
                        let text = format!("the servers have registered it for {:?}", shortened(&row.owner));
                        return Err(Error::new(Kind::NotAuthorized, text));
                    }
                    Ok(row) => return read_registered(&name, row, spec),
                    Err(
                        ServerFailure::Refused(error)
                        | ServerFailure::Queued(error)
                        | ServerFailure::Changed(error),
                    ) => return Err(error),
                    Err(ServerFailure::NotSent(error) | ServerFailure::Unknown(error)) => last = error,
                }
            }
            Err(last)
        }
        .boxed()
    }

    fn create(
        &self,
        name: VolumeName,
        creation: ServerCreation,
        until: Instant,
    ) -> BoxFuture<'_, Result<Record>> {
        async move {
            let ServerCreation { plugin, spec, capacity_min, capacity_max } = creation;
            refuse_unkept(&spec)?;
            let create = CreateAsk {
                namespace: name.namespace.clone(),
                volume: name.volume.clone(),
                plugin,
                spec: Some(write_spec(&spec)),
                capacity_min,
                capacity_max,
            };
            let what = match spec.has_source() {
                true => change_ask::What::CreateFrom(create),
                false => change_ask::What::Create(create),
            };
            let row = self.change_until(what, until).await?;
            read_record(&name, row)
        }
        .boxed()
    }

    fn expand(
        &self,
        name: VolumeName,
        (required, limit): (u64, u64),
        until: Instant,
    ) -> BoxFuture<'_, Result<Record>> {
        async move {
            let (namespace, volume) = (name.namespace.clone(), name.volume.clone());
            let expand = change_ask::What::Expand(ExpandAsk { namespace, volume, required, limit });
            read_record(&name, self.change_until(expand, until).await?)
        }
        .boxed()
    }

    fn validate(
        &self,
        name: VolumeName,
        capabilities: Vec<Mode>,
    ) -> BoxFuture<'_, Result<Result<(), String>>> {
        async move {
            let capabilities = capabilities.into_iter().map(|mode| {
                let [access_mode, attachment_mode] = words_of_capability(mode).map(str::to_owned);
                Capability { access_mode, attachment_mode }
            });
            let validate = ValidateAsk {
                namespace: name.namespace,
                volume: name.volume,
                capabilities: capabilities.collect(),
            };
            let row = self.asked(ChangeAsk { what: Some(change_ask::What::Validate(validate)) }).await?;
            let Validated { confirmed, message } = row
                .validated
                .ok_or_else(|| Error::internal("a server answered a question with another answer"))?;
            Ok(if confirmed { Ok(()) } else { Err(presentable(&message, REASON)) })
        }
        .boxed()
    }

    fn snapshot(
        &self,
        name: VolumeName,
        snapshot: ServerSnapshot,
        until: Instant,
    ) -> BoxFuture<'_, Result<MadeSnapshot>> {
        async move {
            let ServerSnapshot { name: of, parameters, until_ready } = snapshot;
            let ask = SnapshotAsk {
                namespace: name.namespace,
                volume: name.volume,
                name: of,
                parameters,
                call: random::name(),
                no_wait: !until_ready,
            };
            let row = self.change_until(change_ask::What::Snapshot(ask), until).await?;
            let made = row
                .snapshot
                .ok_or_else(|| Error::internal("a server answered a snapshot with another answer"))?;
            let ExternalSnapshot { id, external_id, size, created_usec, ready } = made;
            check_external_id(&id)?;
            check_external_id(&external_id)?;
            Ok(MadeSnapshot { id, external_id, size, created_usec, ready })
        }
        .boxed()
    }

    fn has_expanded(&self) {
        self.expanded.notify_waiters();
    }

    fn attach(
        &self,
        name: VolumeName,
        attach: ServerAttach,
        until: Instant,
    ) -> BoxFuture<'_, Result<BTreeMap<String, String>>> {
        async move {
            let ServerAttach { node_id, read_only, access_mode, attachment_mode } = attach;
            let VolumeName { namespace, volume } = name;
            let call = random::name();
            let ask = AttachAsk { namespace, volume, node_id, read_only, access_mode, attachment_mode, call };
            let asked_for = ask.node_id.clone();
            let row = self.change_until(change_ask::What::Attach(ask), until).await?;
            let wrong = || Error::internal("a server answered an attach with another answer");
            let attached = row.attached.ok_or_else(wrong)?;
            if attached.node_id != asked_for {
                return Err(wrong());
            }
            check_publish_context(&attached.publish_context)?;
            Ok(attached.publish_context.into_iter().collect())
        }
        .boxed()
    }

    fn detach(
        &self,
        name: VolumeName,
        node_id: String,
        forget: bool,
        until: Instant,
    ) -> BoxFuture<'_, Result<()>> {
        async move {
            let VolumeName { namespace, volume } = name;
            let ask = DetachAsk { namespace, volume, node_id, forget, id: String::new() };
            let found = self.change_until(change_ask::What::Detach(ask.clone()), until).await?;
            // The caller may attach the volume again when it has given up. No try may end that.
            let Some(AttachmentRow { id, .. }) = found.attached else { return Ok(()) };
            check_name("attachment", &id)?;
            let detach = DetachAsk { id, ..ask };
            self.change_until(change_ask::What::Detach(detach), until).await.map(drop)
        }
        .boxed()
    }

    fn deregister(&self, name: VolumeName, until: Instant) -> BoxFuture<'_, Result<()>> {
        async move {
            let ask = Deregister { namespace: name.namespace, volume: name.volume, ..Deregister::default() };
            let asked = Deregister { asks_id: true, ..ask.clone() };
            let Some(id) = self.registration_id(change_ask::What::Deregister(asked), until).await? else {
                return Ok(());
            };
            let deregister = Deregister { id, ..ask };
            self.change_until(change_ask::What::Deregister(deregister), until).await.map(drop)
        }
        .boxed()
    }

    fn delete(&self, name: VolumeName, until: Instant) -> BoxFuture<'_, Result<()>> {
        async move {
            let ask = DeleteAsk { namespace: name.namespace, volume: name.volume, ..DeleteAsk::default() };
            let asked = DeleteAsk { asks_id: true, ..ask.clone() };
            let Some(id) = self.registration_id(change_ask::What::Delete(asked), until).await? else {
                return Ok(());
            };
            let delete = DeleteAsk { id, ..ask };
            self.change_until(change_ask::What::Delete(delete), until).await.map(drop)
        }
        .boxed()
    }
}

/// Refuses a spec with options that servers do not keep.
fn refuse_unkept(spec: &VolumeSpec) -> Result<()> {
    match spec.suid || spec.dev {
        true => {
            let text = "suid and dev: servers keep neither, name them when you mount the volume";
            Err(Error::new(Kind::NotSupported, text))
        }
        false => Ok(()),
    }
}

/// Returns what registers a volume. Servers keep no options that root alone gives.
fn registration(name: &VolumeName, volume: VolumeKey, spec: &VolumeSpec) -> Result<ChangeAsk> {
    refuse_unkept(spec)?;
    let register = Register {
        namespace: name.namespace.clone(),
        volume: name.volume.clone(),
        plugin: volume.plugin,
        external_id: volume.handle.to_string(),
        spec: Some(write_spec(spec)),
    };
    Ok(ChangeAsk { what: Some(change_ask::What::Register(register)) })
}

/// Reads the answer to a registration. It has no context, which only a node with a claim gets.
fn read_registered(name: &VolumeName, row: VolumeRow, spec: VolumeSpec) -> Result<Record> {
    let record = read_record(name, row)?;
    let registration = record.registration.map(|of| Registration { spec, ..of });
    Ok(Record { registration, ..record })
}
