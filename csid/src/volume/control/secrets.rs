//! Secrets that a plugin may know of a volume, and may repeat in its messages.

use crate::store::registry::Record;
use crate::volume::control::engine::Engine;
use crate::volume::seam::Site;

impl<S: Site> Engine<'_, S> {
    /// Returns whether the plugin may know secrets of the volume that a controller call does not have. Its messages are then
    /// withheld. With `given`, the call has those of the consumer `own`, or of the credential `at_hand`.
    pub(in crate::volume::control) fn others_secrets(
        &self,
        record: &Record,
        own: Option<&str>,
        at_hand: Option<&String>,
        given: bool,
    ) -> bool {
        let mounts = self.site.has_other_secrets(own, at_hand, given);
        let claims = record.claims.iter().any(|claim| {
            let is_own = given && own == Some(claim.consumer.as_str());
            claim.secrets_given && !is_own
        });
        let attached = record.attachments.iter().any(|at| {
            let by_claims = at.secrets.as_ref().is_some_and(|had| had.given);
            by_claims || at.by_call.as_ref().is_some_and(|call| call.secrets_given)
        });
        mounts || claims || (attached && !given)
    }
}
