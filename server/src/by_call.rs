//! Attachments by AttachVolume, as changes of their record. They are pure.
//!
//! ```text
//!            intent            answered
//!   nothing ───────▶ making ─────────────▶ present
//!      ▲ never asked  │  │ no answer, refused  │ DetachVolume, a fence
//!      ├──────────────┘  ▼                     │
//!      └─ acknowledged ─ removing ◀────────────┘
//! ```
//!
//! A volume with such an attachment has no claim, and one with a claim has no such attachment.
//!
//! An attachment of an earlier generation is of a backup: the volume may have been attached since. Without a word it stays as it is.

use csid::store::registry::{AskedAttach, Attachment, Blocked, DrivenCall, DrivenRpc, Record, VolumeName};
use csid::store::rows::Leg;
use csid::volume::rules::{ClaimAction, ClaimOutcome};

use crate::forward::Ended;

/// How many rows of forgotten attachments one change removes. A transaction of etcd takes 128 operations, with those of claims.
const REMOVED_AT_ONCE: usize = 64;

/// Returns the name under which the failure of an attachment is kept for the callers that wait.
pub fn failure_name(name: &VolumeName, node_id: &str) -> String {
    format!("attach {name} to {node_id}")
}

/// Returns the name by which servers know that a caller waits for an attachment.
pub fn name_of_call(owner: &str, name: &VolumeName, node_id: &str) -> String {
    format!("{owner}/attach {name} to {node_id}")
}

/// Returns the attachment by AttachVolume for a node. `node_id`: the plugin's name of the node.
pub fn attachment<'a>(record: &'a Record, node_id: &str) -> Option<&'a Attachment> {
    record.attachments.iter().find(|at| at.is_by_call(node_id))
}

fn attachment_mut<'a>(record: &'a mut Record, node_id: &str) -> Option<&'a mut Attachment> {
    record.attachments.iter_mut().find(|at| at.is_by_call(node_id))
}

/// Returns the attachments by AttachVolume of a record.
pub fn attachments(record: &Record) -> impl Iterator<Item = &Attachment> {
    record.attachments.iter().filter(|at| at.by_call.is_some())
}

/// Returns those for which a controller may have to be called, those that end first.
pub fn due_attachments(record: &Record) -> impl Iterator<Item = &Attachment> {
    let of = |leg: Leg| attachments(record).filter(move |at| at.leg == leg && !is_forgotten(at));
    of(Leg::Removing).chain(of(Leg::Making))
}

/// Returns how many attachments of an identity a plugin makes or removes for a volume. Those that wait for an operator are left out.
pub fn unfinished(record: &Record, owner: &str, plugin: &str, generation: u64) -> usize {
    let counts = |at: &&Attachment| {
        has(at, |asked| asked.owner == owner && asked.blocked.is_none()) && !is_of_backup(at, generation)
    };
    match record.volume.plugin == plugin {
        true => due_attachments(record).filter(counts).count(),
        false => 0,
    }
}

fn has(at: &Attachment, what: impl Fn(&AskedAttach) -> bool) -> bool {
    at.asked.as_ref().is_some_and(what)
}

/// Returns whether a caller or a fence has ended an attachment. Otherwise the attachment is wanted, or a failed attach is undone.
pub fn is_ended(at: &Attachment) -> bool {
    has(at, |asked| asked.ended)
}

/// Returns whether an operator has forgotten an attachment. Its row stays while a controller's call for the volume has no answer.
pub fn is_forgotten(at: &Attachment) -> bool {
    has(at, |asked| asked.forgotten)
}

/// Returns whether an attachment is of a backup of etcd, and nobody has ended it. It may have been made since the backup, so nothing undoes it.
pub fn is_of_backup(at: &Attachment, generation: u64) -> bool {
    has(at, |asked| asked.generation < generation && !asked.ended)
}

/// Returns the attachments that a backup of etcd has half done. The servers do not know what has become of them since.
pub fn half_done(record: &Record, generation: u64) -> impl Iterator<Item = &Attachment> {
    due_attachments(record).filter(move |at| is_of_backup(at, generation))
}

/// Returns the attachment with an ID, unless it was forgotten.
pub fn meant<'a>(record: &'a Record, node_id: &str, id: &str) -> Option<&'a Attachment> {
    attachment(record, node_id).filter(|at| has(at, |asked| asked.id == id && !asked.forgotten))
}

/// Detaches for a caller or a fence. A call that has begun before makes no attachment of its own any more.
pub fn detach(record: &mut Record, node_id: &str, generation: u64) {
    if attachment(record, node_id).is_some_and(|at| is_of_backup(at, generation)) {
        // The call may have been made since the backup.
        set_called(record, node_id);
    }
    note_end(record, node_id);
    end(record, node_id);
}

/// Forgets an attachment that is being detached. Its row stays while a call for the volume may run: nothing else has the volume until then.
pub fn forget(record: &mut Record, node_id: &str) {
    note_end(record, node_id);
    let may_run = record.driver.is_some();
    match attachment_mut(record, node_id).and_then(|at| at.asked.as_mut()) {
        Some(asked) if may_run => asked.forgotten = true,
        _ => remove(record, node_id),
    }
}

/// Removes rows of forgotten attachments, as many as a transaction takes. No call for the volume may run any more.
pub fn remove_forgotten(record: &mut Record) {
    let mut left = REMOVED_AT_ONCE;
    record.attachments.retain(|at| {
        let is_removed = is_forgotten(at) && left > 0;
        left -= usize::from(is_removed);
        !is_removed
    });
}

fn note_end(record: &mut Record, node_id: &str) {
    let asked = attachment_mut(record, node_id).and_then(|at| at.asked.as_mut());
    let Some(asked) = asked.filter(|asked| !asked.ended) else { return };
    asked.ended = true;
    let call = asked.call.clone();
    record.ended_attaches.add(&call);
}

/// Ends an attachment: its row is removed if no controller was called for it, else it is to be detached.
pub fn end(record: &mut Record, node_id: &str) {
    match attachment_mut(record, node_id) {
        Some(at) if !at.uncalled => {
            at.leg = Leg::Removing;
            if let Some(asked) = &mut at.asked {
                asked.blocked = None;
            }
        }
        Some(_) => remove(record, node_id),
        None => {}
    }
}

/// Has an attach of a backup made again, also one that the backup has as done.
pub fn attach_again(record: &mut Record, node_id: &str) {
    let Some(at) = attachment_mut(record, node_id) else { return };
    (at.leg, at.uncalled) = (Leg::Making, false);
    if let Some(asked) = &mut at.asked {
        asked.blocked = None;
    }
}

/// Removes the row of an attachment.
pub fn remove(record: &mut Record, node_id: &str) {
    record.attachments.retain(|at| !at.is_by_call(node_id));
}

/// Notes that a controller is called for an attachment.
pub fn set_called(record: &mut Record, node_id: &str) {
    if let Some(at) = attachment_mut(record, node_id) {
        at.uncalled = false;
    }
}

/// Notes which server was asked last.
pub fn set_keeper(record: &mut Record, node_id: &str, keeper: &str) {
    if let Some(asked) = attachment_mut(record, node_id).and_then(|at| at.asked.as_mut()) {
        keeper.clone_into(&mut asked.keeper);
    }
}

/// Notes which node has the name of an attachment.
pub fn set_node(record: &mut Record, node_id: &str, node: &str) {
    if let Some(at) = attachment_mut(record, node_id) {
        node.clone_into(&mut at.node);
    }
}

/// What the end of a call is judged by.
pub struct Judged {
    /// Whether an earlier call may have had an effect.
    pub was_asked: bool,
    /// Whether volumes may be attached to the node.
    pub is_ready: bool,
    /// The cluster's.
    pub generation: u64,
}

/// Enters how a call has ended.
pub fn enter_end(record: &mut Record, node_id: &str, action: ClaimAction, of: &Ended, by: &Judged) {
    let &Judged { was_asked, is_ready, generation } = by;
    let Some(at) = attachment_mut(record, node_id) else { return };
    if let Some(asked) = at.asked.as_mut().filter(|asked| asked.forgotten) {
        match (action, &of.outcome) {
            // The volume is attached since it was forgotten, so it is detached.
            (ClaimAction::Attach, ClaimOutcome::Done) => asked.forgotten = false,
            (ClaimAction::Attach, _) => {}
            (_, ClaimOutcome::Done) => remove(record, node_id),
            _ => {}
        }
        return;
    }
    let is_of_backup = is_of_backup(at, generation);
    // The call may have been made since the backup, which says that none was.
    let was_asked = was_asked || has(at, |asked| asked.generation < generation);
    let is_wanted = at.leg == Leg::Making && (is_ready || is_of_backup);
    if let Some(asked) = &mut at.asked {
        asked.error = of.error.as_ref().map(|error| error.message.clone());
        asked.error_kind = of.error.as_ref().map(|error| error.kind.name().to_owned()).unwrap_or_default();
    }
    if action != ClaimAction::Attach {
        match &of.outcome {
            ClaimOutcome::Done => remove(record, node_id),
            ClaimOutcome::Hopeless(why) | ClaimOutcome::NotSent(Some(why)) => set_blocked(at, why),
            ClaimOutcome::Unknown | ClaimOutcome::Again | ClaimOutcome::NotSent(None) => {}
        }
        return;
    }
    match &of.outcome {
        ClaimOutcome::Done => {
            at.leg = if is_wanted { Leg::Present } else { Leg::Removing };
            at.publish_context = of.context.clone().unwrap_or_default();
            if let Some(asked) = at.asked.as_mut().filter(|_| is_wanted) {
                // The context is one of now, so the attachment is of a backup no more.
                (asked.blocked, asked.generation) = (None, generation);
            }
        }
        ClaimOutcome::Hopeless(why) | ClaimOutcome::NotSent(Some(why)) if is_of_backup => {
            set_blocked(at, why)
        }
        _ if is_of_backup => {}
        ClaimOutcome::NotSent(None) if is_wanted => at.uncalled = !was_asked,
        ClaimOutcome::NotSent(_) if !was_asked => remove(record, node_id),
        ClaimOutcome::Again if is_wanted => {}
        // A plugin that has refused it may have attached the volume all the same.
        _ => at.leg = Leg::Removing,
    }
}

fn set_blocked(at: &mut Attachment, why: &str) {
    if let Some(asked) = &mut at.asked {
        asked.blocked = Some(Blocked { reason: why.to_owned() });
    }
}

/// Enters that a call has no answer.
pub fn enter_lost(record: &mut Record, call: &DrivenCall, host: &str, generation: u64) {
    let action = match call.rpc {
        DrivenRpc::Publish => ClaimAction::Attach,
        _ => ClaimAction::Detach,
    };
    let judged = Judged { was_asked: true, is_ready: true, generation };
    enter_end(record, &call.node_id, action, &Ended::lost(host), &judged);
}

#[cfg(test)]
mod tests {
    use csid::store::registry::{AskedAttach, Driver};
    use csid::volume::rules;
    use csid::{Error, Kind};

    use super::*;

    const ID: &str = "i-1";

    fn record(leg: Leg, uncalled: bool) -> Record {
        let name = VolumeName { namespace: "ns".into(), volume: "v".into() };
        let mut record = Record::none(name);
        let usage = rules::read_use("write", "single-node-writer", "file-system").unwrap();
        let spec = csid::store::registry::VolumeSpec {
            capabilities: vec![usage.capability],
            ..csid::store::registry::VolumeSpec::default()
        };
        record.registration = Some(rules::new_registration("operator/a", spec));
        let by_call = Some(rules::new_attach(&record, false, "", "").unwrap());
        let asked = Some(AskedAttach { owner: "operator/a".into(), generation: 1, ..AskedAttach::default() });
        let at = Attachment::new("n1", leg);
        record.attachments.push(Attachment { node_id: Some(ID.into()), uncalled, by_call, asked, ..at });
        record
    }

    fn failed(outcome: ClaimOutcome) -> Ended {
        Ended::failed(outcome, Error::new(Kind::PluginError, "no"))
    }

    fn by(was_asked: bool, is_ready: bool) -> Judged {
        Judged { was_asked, is_ready, generation: 1 }
    }

    fn done() -> Ended {
        let context = Some([("device".to_owned(), "x".to_owned())].into());
        Ended { outcome: ClaimOutcome::Done, context, error: None }
    }

    /// Returns the leg after the end of an attach, whether no call was made, and whether the row is there.
    fn attached(leg: Leg, of: &Ended, was_asked: bool, is_ready: bool) -> (Leg, bool) {
        let mut record = record(leg, false);
        enter_end(&mut record, ID, ClaimAction::Attach, of, &by(was_asked, is_ready));
        attachment(&record, ID).map_or((Leg::Absent, false), |at| (at.leg, at.uncalled))
    }

    #[test]
    fn what_was_never_asked_of_a_plugin_leaves_nothing() {
        let not_sent = || failed(ClaimOutcome::NotSent(None));
        let withheld = || failed(ClaimOutcome::NotSent(Some("no".into())));
        assert_eq!(attached(Leg::Making, &not_sent(), false, true), (Leg::Making, true));
        assert_eq!(attached(Leg::Making, &not_sent(), false, false), (Leg::Absent, false));
        assert_eq!(attached(Leg::Making, &withheld(), false, true), (Leg::Absent, false));
        assert_eq!(attached(Leg::Removing, &not_sent(), false, true), (Leg::Absent, false));
        // An earlier call may have had its effect.
        assert_eq!(attached(Leg::Making, &not_sent(), true, true), (Leg::Making, false));
        assert_eq!(attached(Leg::Making, &not_sent(), true, false), (Leg::Removing, false));
        assert_eq!(attached(Leg::Making, &withheld(), true, true), (Leg::Removing, false));
        let mut record = record(Leg::Making, true);
        end(&mut record, ID);
        assert_eq!(attachment(&record, ID), None);
    }

    #[test]
    fn what_may_be_attached_is_detached() {
        let refused = || failed(ClaimOutcome::Hopeless("no".into()));
        for of in [refused(), failed(ClaimOutcome::Unknown)] {
            assert_eq!(attached(Leg::Making, &of, false, true), (Leg::Removing, false));
        }
        assert_eq!(attached(Leg::Making, &failed(ClaimOutcome::Again), false, true), (Leg::Making, false));
        assert_eq!(attached(Leg::Making, &failed(ClaimOutcome::Again), false, false).0, Leg::Removing);
        assert_eq!(attached(Leg::Making, &done(), false, true), (Leg::Present, false));
        // DetachVolume or a fence has come meanwhile.
        assert_eq!(attached(Leg::Removing, &done(), false, true), (Leg::Removing, false));
        assert_eq!(attached(Leg::Making, &done(), false, false), (Leg::Removing, false));
        let mut record = record(Leg::Present, false);
        end(&mut record, ID);
        assert_eq!(attachment(&record, ID).unwrap().leg, Leg::Removing);
    }

    #[test]
    fn acknowledged_detach_alone_ends_an_attachment() {
        for (of, is_blocked) in [
            (failed(ClaimOutcome::Unknown), false),
            (failed(ClaimOutcome::NotSent(None)), false),
            (failed(ClaimOutcome::Hopeless("no".into())), true),
        ] {
            let mut record = record(Leg::Removing, false);
            enter_end(&mut record, ID, ClaimAction::Detach, &of, &by(true, true));
            let asked = attachment(&record, ID).unwrap().asked.clone().unwrap();
            assert_eq!((asked.blocked.is_some(), asked.error.as_deref()), (is_blocked, Some("no")));
            end(&mut record, ID);
            assert_eq!(attachment(&record, ID).unwrap().asked.as_ref().unwrap().blocked, None);
            enter_end(&mut record, ID, ClaimAction::Detach, &done(), &by(true, true));
            assert_eq!(attachment(&record, ID), None);
        }
    }

    #[test]
    fn ended_attachment_is_counted_once_with_its_call() {
        let mut undone = record(Leg::Making, false);
        let mut record = record(Leg::Present, false);
        record.attachments[0].asked.as_mut().unwrap().call = "c".into();
        for _ in 0..2 {
            detach(&mut record, ID, 1);
            assert_eq!(
                (record.ended_attaches.number, &*record.ended_attaches.calls),
                (1, &["c".to_owned()][..])
            );
        }
        assert!(is_ended(attachment(&record, ID).unwrap()));
        // A failed attach that is undone was ended by nobody.
        enter_end(&mut undone, ID, ClaimAction::Attach, &failed(ClaimOutcome::Unknown), &by(true, true));
        assert!(undone.ended_attaches.is_none() && !is_ended(attachment(&undone, ID).unwrap()));
    }

    #[test]
    fn forgotten_attachment_stays_while_a_call_may_run() {
        let driver = |call| Driver {
            server: String::new(),
            host: "h".into(),
            call,
            unanswered: "c".into(),
            deadline_ms: 1,
            sent_usec: 0,
        };
        let mut idle = record(Leg::Removing, false);
        forget(&mut idle, ID);
        assert!(idle.attachments.is_empty());
        let mut record = record(Leg::Removing, false);
        record.driver = Some(driver(None));
        forget(&mut record, ID);
        assert!(is_forgotten(attachment(&record, ID).unwrap()) && due_attachments(&record).next().is_none());
        assert_eq!(meant(&record, ID, ""), None, "it is detached as far as callers know");
        let mut gone = record.clone();
        enter_end(&mut gone, ID, ClaimAction::Attach, &failed(ClaimOutcome::Unknown), &by(true, true));
        assert!(is_forgotten(attachment(&gone, ID).unwrap()), "the call may run yet");
        remove_forgotten(&mut gone);
        assert!(gone.attachments.is_empty());
        // The plugin has attached it since.
        enter_end(&mut record, ID, ClaimAction::Attach, &done(), &by(true, true));
        assert_eq!(due_attachments(&record).count(), 1);
    }

    #[test]
    fn attach_of_a_backup_is_undone_by_a_word_alone() {
        let in_two = |is_ready| Judged { was_asked: false, is_ready, generation: 2 };
        let refused = || failed(ClaimOutcome::Hopeless("no".into()));
        for (of, is_blocked) in [
            (refused(), true),
            (failed(ClaimOutcome::NotSent(Some("no".into()))), true),
            (failed(ClaimOutcome::NotSent(None)), false),
            (failed(ClaimOutcome::Unknown), false),
            (failed(ClaimOutcome::Again), false),
        ] {
            for (leg, is_ready) in [(Leg::Making, true), (Leg::Making, false), (Leg::Removing, true)] {
                let mut record = record(leg, false);
                enter_end(&mut record, ID, ClaimAction::Attach, &of, &in_two(is_ready));
                let at = attachment(&record, ID).expect("it is removed");
                assert_eq!((at.leg, at.uncalled), (leg, false), "{:?}", of.outcome);
                assert_eq!(at.asked.as_ref().unwrap().blocked.is_some(), is_blocked);
                assert_eq!((half_done(&record, 2).count(), half_done(&record, 1).count()), (1, 0));
                let mut late = record.clone();
                enter_end(&mut late, ID, ClaimAction::Attach, &done(), &in_two(is_ready));
                let is_done = leg == Leg::Making;
                let asked = attachment(&late, ID).unwrap().asked.clone().unwrap();
                assert_eq!(asked.blocked.is_some(), is_blocked && !is_done);
                assert_eq!(is_of_backup(attachment(&late, ID).unwrap(), 2), !is_done);
                attach_again(&mut record, ID);
                let at = attachment(&record, ID).unwrap();
                assert_eq!((at.leg, at.asked.as_ref().unwrap().blocked.as_ref()), (Leg::Making, None));
            }
        }
        let mut record_of = record(Leg::Making, false);
        enter_end(&mut record_of, ID, ClaimAction::Attach, &done(), &in_two(false));
        assert_eq!(attachment(&record_of, ID).unwrap().leg, Leg::Present);
        // The call may have been made since the backup, which says that none was.
        let mut uncalled = record(Leg::Making, true);
        detach(&mut uncalled, ID, 2);
        assert_eq!(attachment(&uncalled, ID).map(|at| (at.leg, at.uncalled)), Some((Leg::Removing, false)));
        assert_eq!(half_done(&uncalled, 2).count(), 0, "its caller has ended it");
        // The end of a call whose intent was written before that.
        let not_sent = |why: Option<&str>| failed(ClaimOutcome::NotSent(why.map(str::to_owned)));
        for of in [refused(), not_sent(None), not_sent(Some("no"))] {
            enter_end(&mut uncalled, ID, ClaimAction::Attach, &of, &in_two(true));
            assert_eq!(attachment(&uncalled, ID).map(|at| at.leg), Some(Leg::Removing), "{:?}", of.outcome);
        }
    }

    #[test]
    fn refused_detach_is_in_no_other_attachs_way() {
        let mut record = record(Leg::Removing, false);
        record.volume.plugin = "p".into();
        let count = |record: &Record, owner, plugin| unfinished(record, owner, plugin, 1);
        assert_eq!(count(&record, "operator/a", "p"), 1);
        assert_eq!(unfinished(&record, "operator/a", "p", 2), 0, "it waits for a word since a restore");
        assert_eq!([count(&record, "operator/a", "q"), count(&record, "operator/b", "p")], [0, 0]);
        enter_end(
            &mut record,
            ID,
            ClaimAction::Detach,
            &failed(ClaimOutcome::Hopeless("no".into())),
            &by(true, true),
        );
        assert_eq!(count(&record, "operator/a", "p"), 0);
    }
}
