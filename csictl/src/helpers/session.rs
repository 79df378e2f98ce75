//! A helper's connection to csid, and the facts that its hints need.

use std::{
    os::fd::OwnedFd,
    time::{Duration, Instant},
};

use csid_client::{
    Client, Descriptor, MountFilter, MountRow, Session, Target, UnmountOptions, Via, operation_id,
};
use rustix::fs::{CWD, Mode, OFlags, openat};

use super::{failure::HelperFailure, mount_table::MountTable, options::DEADLINE};
use crate::{hints::Tried, shell::quoted};

/// What one run of a helper asks csid about.
pub struct Asking {
    pub session: Session,
    pub tried: Tried,
    pub deadline: Instant,
    pub id: String,
}

impl Asking {
    /// Connects to csid: over its private socket, else over the system bus. `command`: the one of csictl that does the same.
    pub async fn open(command: &'static str, time: Duration) -> Result<Self, HelperFailure> {
        let id = new_id()?;
        let tried = Tried { command, operation: Some(id.clone()), ..Tried::default() };
        let deadline = Instant::now() + time;
        let connecting = async {
            let session = Session::open(Target::Auto).await?;
            let client = session.client().await?;
            // The bus may have no csid and be unable to start one. A session would ask for one until its deadline.
            if *client.via() == Via::SystemBus {
                client.manager().await?;
            }
            Ok(session)
        };
        let connected = tokio::time::timeout(time, connecting).await;
        match connected.unwrap_or(Err(csid_client::Error::NoAnswer { last: None })) {
            Ok(session) => Ok(Self { session, tried, deadline, id }),
            Err(error) => Err(HelperFailure::csid(error, tried)),
        }
    }

    pub fn failed(&self, error: csid_client::Error) -> HelperFailure {
        HelperFailure::csid(error, self.tried.clone())
    }

    /// Stores the names of the mount for a hint.
    pub fn about(&mut self, namespace: &str, volume: &str, consumer: &str, tag: &str) {
        let words = [namespace, volume, consumer].map(quoted);
        let tag = if tag.is_empty() { String::new() } else { format!(" --tag {}", quoted(tag)) };
        self.tried.mount = Some(words.join(" ") + &tag);
        self.tried.volume = Some(words[..2].join(" "));
    }

    /// Returns the row with this target. `None`: csid has none.
    pub async fn row(&self, target: &str) -> Result<Option<MountRow>, HelperFailure> {
        let filter = MountFilter { target: Some(target.to_owned()), ..MountFilter::default() };
        let asked = self.session.ask(Some(self.deadline), |client, _| {
            let filter = filter.clone();
            async move { client.list_mounts(filter).await }
        });
        Ok(asked.await.map_err(|error| self.failed(error))?.pop())
    }

    /// Unmounts a mount and releases its claim, within a time of its own.
    pub async fn unmount(
        &self,
        (namespace, volume, consumer): (&str, &str, &str),
        options: UnmountOptions,
    ) -> Result<(), HelperFailure> {
        let id = new_id()?;
        let asked = self.session.ask(Some(Instant::now() + DEADLINE), |client, left| {
            let options =
                UnmountOptions { deadline_usec: left, operation_id: Some(id.clone()), ..options.clone() };
            async move { client.unmount(namespace, volume, consumer, options).await }
        });
        asked.await.map_err(|error| self.failed(error))
    }
}

fn new_id() -> Result<String, HelperFailure> {
    operation_id("csictl").map_err(|error| HelperFailure::Failed(format!("no operation ID: {error}")))
}

pub fn mount_table() -> Result<MountTable, HelperFailure> {
    MountTable::read()
        .map_err(|error| HelperFailure::Failed(format!("cannot read /proc/self/mountinfo: {error}")))
}

/// Opens a target without a walk into an automount there. A process of the automount's daemon does not wait for it.
pub fn open_target(target: &str) -> Result<OwnedFd, HelperFailure> {
    openat(CWD, target, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())
        .map_err(|error| HelperFailure::Failed(format!("cannot open {target}: {error}")))
}

/// Returns the descriptor for a call over this connection. `None`: csid takes none over the bus.
pub fn for_client(fd: &Descriptor, client: &Client) -> Option<Descriptor> {
    matches!(client.via(), Via::Socket(_)).then(|| fd.clone())
}
