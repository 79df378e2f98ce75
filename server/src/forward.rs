//! A controller call as it crosses to its host, and its end as it comes back.

use std::collections::BTreeMap;
use std::time::Duration;

use csi_proto::cluster::v1::call_ended::How;
use csi_proto::cluster::v1::controller_call::Method;
use csi_proto::cluster::v1::{
    CallClass, CallEnded, CallFailure, Capability, ControllerCall, Hidden, Publish, Unpublish,
};
use csi_proto::cluster::{CALL, HIDE};
use csid::error::presentable;
use csid::store::registry::{Capability as Mode, Record, Registration, VolumeSpec};
use csid::volume::rules::{self, ClaimAction, ClaimEffect, ClaimOutcome};
use csid::{Error, Kind};
use prost::Message;

use crate::failure::Result;
use crate::metrics::method_name;
use crate::random;

/// How long a call may wait on its host before it begins.
pub const START: Duration = Duration::from_secs(10);
/// What a call grows by when it has its epoch and stands in its message, in bytes.
const FRAME: usize = 64;
/// The most bytes that a value of `hide` has besides its text.
const OF_VALUE: usize = 6;
/// The limit of a host's message, in bytes.
const MESSAGE: usize = 2048;

/// A call that is ready to be sent.
pub struct Ready {
    pub id: String,
    pub host: String,
    pub effect: ClaimEffect,
    /// The boot of the node that is attached.
    pub boot: String,
    pub message: ControllerCall,
}

/// How a call ended.
pub struct Ended {
    pub outcome: ClaimOutcome,
    pub context: Option<BTreeMap<String, String>>,
    pub error: Option<Error>,
}

impl Ended {
    pub fn failed(outcome: ClaimOutcome, error: Error) -> Ended {
        Ended { outcome, context: None, error: Some(error) }
    }

    /// Returns the end of a call without an answer.
    pub fn lost(host: &str) -> Ended {
        let text = format!("node {host} did not answer the controller call");
        Ended::failed(ClaimOutcome::Unknown, Error::new(Kind::Uncertain, text))
    }
}

impl Ready {
    /// Makes the call of an effect. Its epoch is not known yet. `time`: how long the plugin has.
    pub fn new(
        record: &Record,
        effect: ClaimEffect,
        host: &str,
        boot: String,
        time: Duration,
    ) -> Result<Ready> {
        let lacks = |what: &str| Error::internal(format!("{}: the record has no {what}", record.name));
        let none = rules::new_registration("", VolumeSpec::default());
        let registration = match &record.registration {
            Some(registration) => registration,
            // A node has brought the attachment back after a restore of etcd. A detach needs the volume's ID alone.
            None if effect.action == ClaimAction::Detach => &none,
            None => return Err(lacks("registration").into()),
        };
        let at = record.attachment(&effect.node).ok_or_else(|| lacks("attachment"))?;
        let claim = record.claim_at(&effect.consumer, &effect.node).ok_or_else(|| lacks("claim"))?;
        let node_id = at.node_id.clone().ok_or_else(|| lacks("name of the node"))?;
        let capability = claim.usage.capability;
        let method = match effect.action {
            ClaimAction::Attach => {
                let read_only = rules::reader_only(capability.access_mode);
                Method::Publish(publish(registration, capability, read_only, node_id))
            }
            _ => Method::Unpublish(Unpublish { node_id }),
        };
        let credential =
            record.attach_secrets(&effect.node).credential.or(registration.spec.credential.clone());
        Ready::of(record, registration, effect, host, boot, (method, credential, time))
    }

    /// Makes the call of an attachment by AttachVolume. `node_id`: the plugin's name of the node.
    pub fn of_attachment(
        record: &Record,
        node_id: &str,
        action: ClaimAction,
        host: &str,
        time: Duration,
    ) -> Result<Ready> {
        let lacks = |what: &str| Error::internal(format!("{}: the record has no {what}", record.name));
        let registration = record.registration.as_ref().ok_or_else(|| lacks("registration"))?;
        let at = record.attachments.iter().find(|at| at.is_by_call(node_id));
        let at = at.ok_or_else(|| lacks("attachment"))?;
        let call = at.by_call.as_ref().ok_or_else(|| lacks("call"))?;
        let (capability, node_id) = (call.capability, node_id.to_owned());
        let method = match action {
            ClaimAction::Attach => {
                let read_only = call.read_only || rules::reader_only(capability.access_mode);
                Method::Publish(publish(registration, capability, read_only, node_id))
            }
            _ => Method::Unpublish(Unpublish { node_id }),
        };
        let (consumer, node) = (String::new(), at.node.clone());
        let effect = ClaimEffect { action, consumer, node, from: None, grant: None };
        let credential = registration.spec.credential.clone();
        Ready::of(record, registration, effect, host, String::new(), (method, credential, time))
    }

    /// Makes the call of a method. It has the name of a credential, and the time that the plugin has.
    fn of(
        record: &Record,
        registration: &Registration,
        effect: ClaimEffect,
        host: &str,
        boot: String,
        (method, credential, time): (Method, Option<String>, Duration),
    ) -> Result<Ready> {
        let order = record.volume.handle.text().into_owned();
        let message = message(record, registration, order, credential, method, time)?;
        Ok(Ready { id: message.call.clone(), host: host.to_owned(), effect, boot, message })
    }
}

/// Makes the message of a call. Its epoch is not known yet.
pub fn message(
    record: &Record,
    registration: &Registration,
    order: String,
    credential: Option<String>,
    method: Method,
    time: Duration,
) -> Result<ControllerCall> {
    let milliseconds = |time: Duration| u32::try_from(time.as_millis()).unwrap_or(u32::MAX);
    let mut message = ControllerCall {
        call: random::name(),
        epoch: 0,
        start_within_ms: milliseconds(START),
        plugin: record.volume.plugin.clone(),
        order,
        credential: credential.unwrap_or_default(),
        hidden: None,
        deadline_ms: milliseconds(time),
        method: Some(method),
        namespace: record.name.namespace.clone(),
        volume: record.name.volume.clone(),
    };
    let bytes = message.encoded_len() + FRAME;
    let room = CALL.checked_sub(bytes).ok_or_else(|| {
        Error::internal(format!(
            "{}: the controller call has {bytes} bytes, and the limit is {CALL}",
            record.name
        ))
    })?;
    let (hide, more) = hidden(rules::given_values(registration, &record.attachments), room);
    message.hidden = Some(Hidden { hide, more });
    Ok(message)
}

fn publish(registration: &Registration, capability: Mode, read_only: bool, node_id: String) -> Publish {
    let usage = registration.usage(capability);
    let [access_mode, attachment_mode] = rules::words_of_capability(capability).map(str::to_owned);
    Publish {
        node_id,
        capability: Some(Capability { access_mode, attachment_mode }),
        read_only,
        fs_type: usage.fs_type,
        mount_flags: usage.mount_flags,
        mount_group: usage.mount_group,
        volume_context: usage.context,
    }
}

/// Returns the values that fit into the rest of a call, in bytes, and whether there are others.
fn hidden(mut values: Vec<String>, room: usize) -> (Vec<String>, bool) {
    values.sort();
    values.dedup();
    let mut size = 0;
    let count = values.len();
    values.retain(|value| {
        size += value.len() + OF_VALUE;
        size <= room
    });
    values.truncate(HIDE);
    let is_silent = values.len() < count;
    (values, is_silent)
}

/// Reads the end of a call, as the host says it.
pub fn read(ready: &Ready, ended: CallEnded) -> Ended {
    let host = &ready.host;
    let unsent = |why: &str| {
        let text = format!("node {host} did not make the controller call: {why}");
        Ended::failed(ClaimOutcome::NotSent(None), Error::new(Kind::PluginUnavailable, text))
    };
    match ended.how {
        Some(How::Answer(answer)) if ready.effect.action == ClaimAction::Attach => {
            match rules::check_publish_context(&answer.publish_context) {
                Ok(()) => {
                    Ended { outcome: ClaimOutcome::Done, context: Some(answer.publish_context), error: None }
                }
                Err(error) => Ended::failed(ClaimOutcome::Hopeless(error.message.clone()), error),
            }
        }
        Some(How::Answer(_)) => Ended { outcome: ClaimOutcome::Done, context: None, error: None },
        Some(How::Failed(failure)) => failed(ready, &failure),
        Some(How::NotStarted(true)) => unsent("it could not begin in time"),
        Some(How::Stale(true)) => unsent("it has had a later one"),
        // A word of a later version. The call may have been made.
        _ => Ended::failed(
            ClaimOutcome::Unknown,
            Error::internal(format!("node {host} ended the controller call with an unknown word")),
        ),
    }
}

/// Returns whether the plugin's message may have values of a call that could not be named.
pub fn is_silent(call: &ControllerCall) -> bool {
    call.hidden.as_ref().is_some_and(|hidden| hidden.more)
}

/// Returns the failure of a plugin's RPC as a host says it. `is_silent`: as of the call.
pub fn failure_of(host: &str, rpc: &'static str, is_silent: bool, failure: &CallFailure) -> Error {
    let text = match is_silent {
        true => format!("node {host}: the plugin's message is withheld, for it may repeat a context"),
        false => format!("node {host}: {}", presentable(&failure.message, MESSAGE)),
    };
    Error::new(Kind::read(&failure.kind).unwrap_or(Kind::PluginError), text).with(|details| {
        (details.rpc, details.grpc_code) = (failure.code.map(|_| rpc), failure.code);
    })
}

fn failed(ready: &Ready, failure: &CallFailure) -> Ended {
    let (rpc, call) = (method_name(ready.message.method.as_ref()), &ready.message);
    let error = failure_of(&ready.host, rpc, is_silent(call), failure);
    let effect = &ready.effect;
    let is_first_attach = effect.action == ClaimAction::Attach && effect.from.is_none();
    let is_anothers = is_first_attach && failure.code.is_some_and(rules::is_attached_otherwise);
    let outcome = match failure.class() {
        // The attachment is none of the cluster's, unless an earlier call has made it.
        CallClass::Refused if is_anothers => ClaimOutcome::NotSent(Some(error.message.clone())),
        CallClass::Unknown => ClaimOutcome::Unknown,
        CallClass::NotSent => ClaimOutcome::NotSent(None),
        CallClass::Withheld => ClaimOutcome::NotSent(Some(error.message.clone())),
        CallClass::Again => ClaimOutcome::Again,
        CallClass::Refused => ClaimOutcome::Hopeless(error.message.clone()),
    };
    let is_final = matches!(outcome, ClaimOutcome::Hopeless(_) | ClaimOutcome::NotSent(Some(_)));
    Ended::failed(outcome, error.with(|details| details.retryable = !is_final))
}

#[cfg(test)]
mod tests {
    use csi_proto::cluster::v1::Answer;
    use csid::store::registry::Attachment;
    use csid::store::rows::Leg;

    use super::*;

    fn ready(action: ClaimAction) -> Ready {
        let effect =
            ClaimEffect { action, consumer: "web".into(), node: "n1".into(), from: None, grant: None };
        let (host, boot) = ("c1".to_owned(), String::new());
        Ready { id: "c".into(), host, effect, boot, message: ControllerCall::default() }
    }

    fn ended(how: Option<How>) -> CallEnded {
        CallEnded { call: "c".into(), epoch: 1, how }
    }

    #[test]
    fn values_that_do_not_fit_silence_the_plugin() {
        let few = vec!["a".to_owned(), "b".to_owned(), "a".to_owned()];
        assert_eq!(hidden(few, CALL), (vec!["a".to_owned(), "b".to_owned()], false));
        let many = (0..HIDE + 1).map(|n| n.to_string()).collect();
        let (values, is_silent) = hidden(many, CALL);
        assert!(values.len() == HIDE && is_silent);
        let (values, is_silent) = hidden(vec!["x".repeat(1000), "y".to_owned()], 1000 + OF_VALUE);
        assert!(values.len() == 1 && is_silent);
        for length in [1, 123, 124, 16_380, 100_000] {
            let values = (0..HIDE).map(|n| format!("{n:04}{}", "x".repeat(length))).collect();
            let (hide, more) = hidden(values, CALL);
            let bytes = Hidden { hide, more }.encoded_len();
            assert!(bytes <= CALL + FRAME && (more || length < 100), "{length}: {bytes}");
        }
        let failure =
            CallFailure { class: 4, kind: "PluginError".into(), message: "y".into(), code: Some(9) };
        let shown = |more| {
            let mut ready = ready(ClaimAction::Attach);
            ready.message.hidden = Some(Hidden { more, ..Hidden::default() });
            ready.message.method = Some(Method::Publish(Publish::default()));
            let error = failed(&ready, &failure).error.unwrap();
            assert_eq!(
                (error.details.rpc, error.details.grpc_code),
                (Some("ControllerPublishVolume"), Some(9))
            );
            error.message
        };
        assert!(shown(false).ends_with(": y") && shown(true).contains("withheld"));
    }

    #[test]
    fn attachment_of_another_manager_is_not_undone() {
        let class = CallClass::Refused.into();
        let refused = |ready: &Ready, code| {
            let failure = CallFailure { class, code: Some(code), ..CallFailure::default() };
            read(ready, ended(Some(How::Failed(failure)))).outcome
        };
        let mut attach = ready(ClaimAction::Attach);
        assert!(matches!(refused(&attach, 6), ClaimOutcome::NotSent(Some(_))));
        assert!(matches!(refused(&attach, 9), ClaimOutcome::Hopeless(_)));
        assert!(matches!(refused(&ready(ClaimAction::Detach), 6), ClaimOutcome::Hopeless(_)));
        // An earlier attach may have made it.
        attach.effect.from = Some(Box::new(Attachment::new("n1", Leg::Making)));
        assert!(matches!(refused(&attach, 6), ClaimOutcome::Hopeless(_)));
    }

    #[test]
    fn word_that_is_not_known_is_an_unknown_outcome() {
        for how in [None, Some(How::NotStarted(false)), Some(How::Stale(false))] {
            assert_eq!(read(&ready(ClaimAction::Attach), ended(how)).outcome, ClaimOutcome::Unknown);
        }
        let failure = CallFailure { class: 77, ..CallFailure::default() };
        let unknown = read(&ready(ClaimAction::Detach), ended(Some(How::Failed(failure))));
        assert_eq!(unknown.outcome, ClaimOutcome::Unknown);
        // A detach has no context, whatever the host says.
        let answer =
            Answer { publish_context: [("k".to_owned(), "v".to_owned())].into(), ..Answer::default() };
        let done = read(&ready(ClaimAction::Detach), ended(Some(How::Answer(answer))));
        assert!(done.outcome == ClaimOutcome::Done && done.context.is_none());
    }
}
