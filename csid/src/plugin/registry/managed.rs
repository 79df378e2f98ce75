//! Calls about the units that plugins run in.

use std::os::fd::OwnedFd;

use crate::error::{Error, Result};
use crate::host::log::Lines;
use crate::plugin::errors::process::ProcessError;
use crate::plugin::errors::registry::RegistrationError;
use crate::plugin::registry::plugins::{Plugins, stop};
use crate::plugin::spec::Supervision;
use crate::plugin::task::How;

impl Plugins {
    /// Stop the units of a plugin's instances, which their tasks start again. A second call joins the first.
    pub async fn restart(&self, id: &str) -> Result<()> {
        self.open()?;
        let supervised: Vec<_> = {
            let entries = self.entries();
            let entries = entries.get(id).ok_or_else(|| RegistrationError::unknown(id))?;
            let supervised = entries.iter().filter(|entry| entry.spec.supervision != Supervision::External);
            supervised.map(|entry| (entry.stops.clone(), entry.state.clone())).collect()
        };
        if supervised.is_empty() {
            return Err(ProcessError::NotRun { id: id.to_owned() }.into());
        }
        // The registry stays as it is, so nobody who changes it waits for this unit.
        for (stops, state) in supervised {
            if state.borrow().view.state != "stopping" {
                stop(&stops, How::Restart).await?;
            }
        }
        Ok(())
    }

    /// When each instance that csid restarts of the plugin is ready, or gone.
    pub async fn ready_again(&self, id: &str) -> Result<()> {
        let states: Vec<_> = {
            let entries = self.entries();
            let entries = entries.get(id).into_iter().flatten();
            let supervised = entries.filter(|entry| entry.spec.supervision != Supervision::External);
            supervised.map(|entry| entry.state.clone()).collect()
        };
        for mut state in states {
            if state.wait_for(|seen| seen.ready.is_some()).await.is_err() {
                self.open()?;
            }
        }
        Ok(())
    }

    /// The deadline of a Restart has passed: the process was stopped, and its next one is not ready.
    pub fn not_back(&self, id: &str) -> Error {
        ProcessError::NotBack { id: id.to_owned(), awaited: self.awaited(id) }.into()
    }

    /// Returns a pipe with the log that the plugin's instances write to the journal.
    pub async fn log(&self, id: &str, lines: Lines) -> Result<OwnedFd> {
        let units: Vec<String> = {
            let entries = self.entries();
            let views = entries.get(id).ok_or_else(|| RegistrationError::unknown(id))?.iter();
            let views = views.map(|entry| entry.state.borrow().view.clone());
            views.filter(|view| view.log == "journal").map(|view| view.unit.clone()).collect()
        };
        if units.is_empty() {
            return Err(ProcessError::NoLog { id: id.to_owned() }.into());
        }
        match self.0.shared.units.log(&units, lines).await {
            Ok(Some(log)) => Ok(log),
            Ok(None) => Err(ProcessError::ManyLogs.into()),
            Err(source) => Err(ProcessError::LogUnreadable { id: id.to_owned(), source }.into()),
        }
    }
}
