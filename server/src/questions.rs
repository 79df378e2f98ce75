//! Calls to a controller that change nothing: ValidateVolumeCapabilities, ListVolumes, ListSnapshots and GetCapacity. They have no intent
//! and no epoch: an answer that is lost is asked for again. A server asks a node that has its session here. Without one it refuses the call
//! as `Unavailable`, so that the caller asks the next server.

use std::time::Duration;

use csi_proto::cluster::CALL;
use csi_proto::cluster::v1::call_ended::How;
use csi_proto::cluster::v1::controller_call::Method;
use csi_proto::cluster::v1::inventory_ask::What as Asked;
use csi_proto::cluster::v1::inventory_page::Is as Page;
use csi_proto::cluster::v1::{
    Answer, Capability, ControllerCall, InventoryAsk, InventoryPage, ListExternal, Listed, Register,
    ValidateAsk, ValidateCapabilities, Validated, VolumeRow,
};
use csi_proto::identity::{Identity, Role};
use csid::error::{Step, presentable};
use csid::store::registry::{Capability as Mode, Record, Registration, Registry};
use csid::volume::rules;
use csid::{Error, Kind, random};
use prost::Message;

use crate::failure::{Result, ServerError};
use crate::forward::{failure_of, is_silent, message};
use crate::grants::May;
use crate::metrics::method_name;
use crate::places::Kept;
use crate::service::Service;
use crate::view;

/// How long a question may wait on its host before the plugin is asked, how long the plugin has, and how much longer a server waits.
const START: Duration = Duration::from_secs(2);
const PLUGIN: Duration = Duration::from_secs(5);
const LATER: Duration = Duration::from_secs(1);
/// The limit of the plugin's reason for which it does not confirm a capability, in bytes.
const REASON: usize = 1024;

impl Service {
    /// Asks a plugin's controller for a page of its volumes or snapshots, or for its capacity.
    pub async fn ask_inventory(&self, caller: &Identity, ask: InventoryAsk) -> Result<InventoryPage> {
        require_inventory(self, caller)?;
        rules::check_name("plugin", &ask.plugin)?;
        let (method, is_list) = match ask.what {
            Some(Asked::List(list)) => {
                rules::check_page(&list.token, &list.snapshot, &list.external_id)?;
                (Method::List(list), true)
            }
            Some(Asked::Capacity(capacity)) => (Method::Capacity(capacity), false),
            None => return Err(Error::invalid("this server does not know the question").into()),
        };
        self.cluster.presence.here()?;
        let hosts = self.cluster.hosts_of_plugin(&ask.plugin, None, self.sessions.answering(&ask.plugin));
        let host = hosts.first().ok_or_else(|| no_host(&ask.plugin))?;
        let call = about_plugin(&ask.plugin, method);
        let Answer { listed, available, .. } = self.question(caller, host, call, None).await?;
        let is = match (is_list, listed, available) {
            (true, Some(listed), _) => Page::Listed(listed),
            (false, _, Some(available)) => Page::Available(available),
            _ => return Err(no_answer(host, None)),
        };
        Ok(InventoryPage { is: Some(is), node: host.clone() })
    }

    /// Asks a plugin's controller for a page of its list. `namespace`: only a controller for its volumes. `None`: of some namespace.
    pub(crate) async fn listed(
        &self,
        caller: &Identity,
        plugin: &str,
        list: ListExternal,
        namespace: Option<&str>,
    ) -> Result<Listed> {
        let hosts = self.cluster.hosts_of_plugin(plugin, namespace, self.sessions.answering(plugin));
        let host = hosts.first().ok_or_else(|| no_host(plugin))?;
        let answer = self.question(caller, host, about_plugin(plugin, Method::List(list)), None).await?;
        answer.listed.ok_or_else(|| no_answer(host, None))
    }

    /// Asks the plugin whether a registered volume can be used in some ways.
    pub async fn validate(&self, caller: &Identity, ask: ValidateAsk) -> Result<VolumeRow> {
        let name = rules::volume_name(&ask.namespace, &ask.volume)?;
        self.cluster.require(caller, &name.namespace, May::Register)?;
        self.cluster.presence.here()?;
        self.cluster.require_unblocked(caller).await?;
        let mut modes = Vec::new();
        for of in &ask.capabilities {
            modes.push(rules::read_capability(&of.access_mode, &of.attachment_mode)?);
        }
        let record = self.cluster.registry.record(name).await?;
        let registration = rules::registered(&record)?;
        if modes.is_empty() {
            modes.clone_from(&registration.spec.capabilities);
        }
        let validated = self.validated(caller, &record, registration, &modes).await?;
        let row = match self.cluster.sees(caller, &record.name.namespace) {
            true => view::row(&record, caller),
            false => VolumeRow {
                namespace: record.name.namespace.clone(),
                volume: record.name.volume.clone(),
                ..VolumeRow::default()
            },
        };
        Ok(VolumeRow { validated: Some(validated), ..row })
    }

    /// Registers a volume, or changes its registration. The plugin is asked first whether it has the volume so, if its controller has a
    /// session with this server.
    pub async fn register(&self, caller: &Identity, ask: Register) -> Result<VolumeRow> {
        let (name, volume, new) = self.cluster.registration(caller, &ask)?;
        let present = self.cluster.registry.record(name.clone()).await?;
        let mut record = present.clone();
        // What the record refuses or has, the change says.
        let changes = matches!(rules::put_registration(&mut record, &volume, &new), Ok(Some(_)));
        if changes && !self.hosts_for(&record).is_empty() {
            self.cluster.presence.here()?;
            self.cluster.require_unblocked(caller).await?;
            // The plugin's reason may repeat what another's registration of the volume says.
            self.cluster.refuse_of_others(caller, &present, &record.volume, &new).await?;
            let validated = self.validated(caller, &record, &new, &new.spec.capabilities).await?;
            if !validated.confirmed {
                return Err(rules::not_confirmed(&name, validated.message).into());
            }
        }
        self.cluster.register(caller, ask).await
    }

    /// Returns the nodes with a session here that may be asked about a volume, the best first. A node that was sent the volume's last
    /// call makes one after the other.
    fn hosts_for(&self, record: &Record) -> Vec<String> {
        let mut hosts = self.cluster.hosts(record, self.sessions.answering(&record.volume.plugin));
        let is_last = |host: &String| record.driver.as_ref().is_some_and(|driver| driver.host == *host);
        hosts.sort_by_key(|host| !is_last(host));
        hosts
    }

    async fn validated(
        &self,
        caller: &Identity,
        record: &Record,
        registration: &Registration,
        modes: &[Mode],
    ) -> Result<Validated> {
        let hosts = self.hosts_for(record);
        let host = hosts.first().ok_or_else(|| no_host(&record.volume.plugin))?;
        let capabilities = modes.iter().map(|mode| {
            let [access_mode, attachment_mode] = rules::words_of_capability(*mode).map(str::to_owned);
            Capability { access_mode, attachment_mode }
        });
        let spec = registration.spec.clone();
        let method = Method::Validate(ValidateCapabilities {
            capabilities: capabilities.collect(),
            fs_type: spec.fs_type,
            mount_flags: spec.mount_flags,
            mount_group: spec.mount_group,
            volume_context: spec.context,
            parameters: spec.parameters,
        });
        let order = record.volume.handle.text().into_owned();
        let mut call = message(record, registration, order, spec.credential, method, PLUGIN)?;
        call.start_within_ms = u32::try_from(START.as_millis()).unwrap_or(u32::MAX);
        let is_silent = is_silent(&call);
        let answer = self.question(caller, host, call, Some(Step::Validate)).await?;
        let validated = answer.validated.ok_or_else(|| no_answer(host, Some(Step::Validate)))?;
        let message = match is_silent {
            true => "the plugin's message is withheld, for it may repeat a context".to_owned(),
            false => presentable(&validated.message, REASON),
        };
        Ok(Validated { message, ..validated })
    }

    /// Sends a question to a node, and waits for its answer.
    async fn question(
        &self,
        caller: &Identity,
        host: &str,
        call: ControllerCall,
        step: Option<Step>,
    ) -> Result<Answer> {
        let bytes = call.encoded_len();
        if bytes > CALL {
            // Its node would end the session.
            let text = format!("the question has {bytes} bytes, and the limit is {CALL}");
            return Err(Error::invalid(text).into());
        }
        let _place = self.places.enter(caller, Kept::Question)?;
        let (rpc, is_silent) = (method_name(call.method.as_ref()), is_silent(&call));
        let away = |text: String| ServerError::Unavailable(text);
        let Some(answer) = self.sessions.call(host, call) else {
            return Err(away(format!("node {host} takes no controller call now")));
        };
        let failed = |kind, text: String, retryable| {
            Error::new(kind, text).with(|details| {
                details.step = step;
                details.retryable = retryable;
            })
        };
        let ended = match tokio::time::timeout(START + PLUGIN + LATER, answer).await {
            Ok(Ok(ended)) => ended,
            Ok(Err(_)) => return Err(away(format!("node {host} has left this server"))),
            Err(_) => {
                let text =
                    format!("node {host} did not answer the question within {:?}", START + PLUGIN + LATER);
                return Err(failed(Kind::TimedOut, text, true).into());
            }
        };
        match ended.how {
            Some(How::Answer(answer)) => Ok(answer),
            Some(How::Failed(failure)) => {
                let error = failure_of(host, rpc, is_silent, &failure);
                let kind = match (failure.code, error.kind) {
                    (Some(code), _) if rules::is_gone(code) => Kind::NotFound,
                    // Another server would ask the same plugin.
                    (_, Kind::Unavailable) => Kind::PluginUnavailable,
                    (_, kind) => kind,
                };
                let error = error.with(|details| (details.step, details.retryable) = (step, false));
                Err(Error { kind, ..error }.into())
            }
            Some(How::NotStarted(true)) => Err(failed(
                Kind::PluginUnavailable,
                format!("node {host} could not ask the plugin in time"),
                true,
            )
            .into()),
            _ => Err(no_answer(host, step)),
        }
    }
}

/// Refuses a caller that may see no plugin's inventory: a plugin has volumes of all namespaces.
fn require_inventory(service: &Service, caller: &Identity) -> Result<()> {
    let grants = &service.cluster.config.grants;
    match caller.role == Role::Operator && grants.allow_everywhere(caller, May::Register) {
        true => Ok(()),
        false => service.cluster.require_operator(caller, May::Read),
    }
}

/// Makes the call of a question about no volume.
fn about_plugin(plugin: &str, method: Method) -> ControllerCall {
    let milliseconds = |time: Duration| u32::try_from(time.as_millis()).unwrap_or(u32::MAX);
    ControllerCall {
        call: random::name(),
        start_within_ms: milliseconds(START),
        plugin: plugin.to_owned(),
        deadline_ms: milliseconds(PLUGIN),
        method: Some(method),
        ..ControllerCall::default()
    }
}

fn no_host(plugin: &str) -> ServerError {
    let text = format!("no node with a controller of plugin {plugin} has joined this server");
    ServerError::Unavailable(text)
}

fn no_answer(host: &str, step: Option<Step>) -> ServerError {
    let text = format!("node {host} answered the question with another answer");
    Error::new(Kind::PluginError, text).with(|details| details.step = step).into()
}
