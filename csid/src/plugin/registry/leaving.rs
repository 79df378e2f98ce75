//! A plugin, or one instance of it, is forgotten.

use crate::error::Result;
use crate::plugin::errors::registry::RegistrationError;
use crate::plugin::events;
use crate::plugin::registry::kept::Kept;
use crate::plugin::registry::plugins::{Plugins, SpecOrigin, stop, to_the_end};
use crate::plugin::spec::validate_id;
use crate::plugin::task::How;
use crate::store::Change;

impl Plugins {
    /// Forget a plugin, or one instance of it, and stop what is managed; whether it has mounts is asked before, by
    /// `volume`. What is not there is forgotten already. `uid`: who asks; another's is root's to forget.
    pub async fn unregister(&self, id: &str, instance: Option<&str>, uid: u32) -> Result<()> {
        validate_id(id)?;
        let (plugins, id, instance) = (self.clone(), id.to_owned(), instance.map(str::to_owned));
        to_the_end(async move { plugins.unregistered(&id, instance.as_deref(), uid).await }).await
    }

    async fn unregistered(&self, id: &str, instance: Option<&str>, uid: u32) -> Result<()> {
        let _changing = self.0.changing.lock().await;
        self.0.shared.store.writable()?;
        let leaving = self.leaving(id, instance, uid)?;
        if !leaving.is_empty() {
            self.refuse_upgrading(id)?;
        } else if instance.is_none() && uid == 0 {
            self.forget_node_id(id).await?;
        }
        for instance in leaving {
            self.leave(id, &instance).await?;
        }
        Ok(())
    }

    /// Forgets the accepted node ID of a plugin that has left with its registration socket.
    async fn forget_node_id(&self, id: &str) -> Result<()> {
        if self.entries().contains_key(id) || self.0.shared.node_ids.agreed(id).is_none() {
            return Ok(());
        }
        self.commit(vec![Change::DeleteNodeId(id.to_owned())]).await?;
        self.0.shared.node_ids.forget(id);
        Ok(())
    }

    /// The instances that are to leave, the oldest first: none takes over that leaves too.
    fn leaving(&self, id: &str, instance: Option<&str>, uid: u32) -> Result<Vec<String>> {
        let entries = self.entries();
        let of = entries.get(id).into_iter().flatten().rev();
        of.filter(|entry| instance.is_none_or(|instance| instance == entry.spec.instance()))
            .map(|entry| {
                // Compared here, where nobody else can register the id meanwhile.
                if uid != 0 && uid != entry.owner {
                    return Err(RegistrationError::OtherUid { id: id.to_owned() }.into());
                }
                self.refuse_defined_elsewhere(id, entry.spec.instance(), &entry.origin)?;
                Ok(entry.spec.instance().to_owned())
            })
            .collect()
    }

    /// Refuses to change an instance that a file or the plugin itself defines. It is changed there.
    pub(super) fn refuse_defined_elsewhere(
        &self,
        id: &str,
        instance: &str,
        origin: &SpecOrigin,
    ) -> Result<(), RegistrationError> {
        let (id, instance) = (id.to_owned(), instance.to_owned());
        match origin {
            SpecOrigin::Bus => Ok(()),
            SpecOrigin::File(_) => Err(RegistrationError::OfFile { id }),
            SpecOrigin::Socket => {
                let directory = self.0.directories.registrations();
                Err(RegistrationError::SelfRegistered { id, instance, directory })
            }
        }
    }

    pub(super) async fn leave(&self, id: &str, instance: &str) -> Result<()> {
        let Some((stops, kept, owner, origin, number)) = self.entry(id, instance, |entry| {
            let kept = Kept { replaced: entry.replaced.clone(), ..Kept::new(&entry.spec) };
            (entry.stops.clone(), kept, entry.owner, entry.origin.clone(), entry.number)
        }) else {
            return Ok(());
        };
        stop(&stops, How::Unit).await?;
        self.remove(id, instance);
        let last = !self.entries().contains_key(id);
        let event = Change::Event(events::left(id, instance, last));
        let rows = match last {
            // No row is left either of an instance that is not here.
            true => Change::DeletePlugins(id.to_owned()),
            false => Change::DeletePlugin(id.to_owned(), instance.to_owned()),
        };
        // Another driver may have the id next. A registrar removes its socket at each start, and the driver is the same one.
        let forgets = last && origin != SpecOrigin::Socket;
        let node_id = forgets.then(|| Change::DeleteNodeId(id.to_owned()));
        match self.commit([rows, event].into_iter().chain(node_id).collect()).await {
            Ok(()) if forgets => self.0.shared.node_ids.forget(id),
            Ok(()) => {}
            Err(error) => {
                // The entries that the journal still has are restored, so that the call can be repeated.
                self.add_kept(id, kept, owner, origin, number);
                return Err(error);
            }
        }
        Ok(())
    }
}
