//! How a helper ends, with the exit codes of mount(8).

use csid_client::{Error, Kind};

use crate::hints::{Tried, of_helper};

pub enum HelperFailure {
    /// The arguments or fstab are wrong. Nothing was done.
    Usage(String),
    /// csid refused or could not be reached, with the facts for a hint.
    Csid(Box<(Error, Tried)>),
    Failed(String),
    /// A signal ended a mount, with what became of it.
    Cancelled(String),
}

impl HelperFailure {
    pub fn csid(error: Error, tried: Tried) -> Self {
        Self::Csid(Box::new((error, tried)))
    }

    pub fn code(&self) -> u8 {
        const USAGE: u8 = 1;
        const SYSTEM: u8 = 2;
        const INTERRUPTED: u8 = 8;
        const FAILED: u8 = 32;
        match self {
            Self::Usage(_) => USAGE,
            Self::Cancelled(_) => INTERRUPTED,
            Self::Failed(_) => FAILED,
            Self::Csid(of) => match of.0.csid().map(|error| &error.kind) {
                Some(Kind::InvalidArgument | Kind::NotAuthorized) => USAGE,
                None | Some(Kind::ShuttingDown | Kind::StateCorrupt | Kind::Internal) => SYSTEM,
                Some(_) => FAILED,
            },
        }
    }

    pub fn is_busy(&self) -> bool {
        self.is_of(&[Kind::Busy])
    }

    /// Returns whether a row with other options, or of another volume, is in the way.
    pub fn is_conflict(&self) -> bool {
        self.is_of(&[Kind::AlreadyExists, Kind::ClaimConflict])
    }

    fn is_of(&self, kinds: &[Kind]) -> bool {
        matches!(self, Self::Csid(of) if of.0.csid().is_some_and(|error| kinds.contains(&error.kind)))
    }

    /// Returns the text for standard error, without the helper's name.
    pub fn text(&self) -> String {
        match self {
            Self::Usage(text) | Self::Failed(text) | Self::Cancelled(text) => text.clone(),
            Self::Csid(of) => {
                let (error, tried) = &**of;
                let mut text = match error {
                    Error::Connect(ways) => format!("csid cannot be reached: {ways}"),
                    error => error.to_string(),
                };
                let holders = error.csid().map(|error| error.details.holders.join(", ")).unwrap_or_default();
                if !holders.is_empty() {
                    text += &format!("\nHeld by: {holders}");
                }
                if let Some(hint) = of_helper(error, tried) {
                    text += &format!("\n{hint}");
                }
                text
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use csid_client::{Connecting, CsidError, Details};

    use super::*;

    fn of(kind: Kind) -> HelperFailure {
        let error = CsidError { kind, message: "m".into(), details: Details::default() };
        HelperFailure::csid(Error::Csid(Box::new(error)), Tried { command: "mount", ..Tried::default() })
    }

    #[test]
    fn codes_are_those_of_mount() {
        let unreachable = Error::Connect(Connecting { socket: None, bus: None });
        for (failure, code) in [
            (HelperFailure::Usage(String::new()), 1),
            (HelperFailure::Cancelled(String::new()), 8),
            (HelperFailure::Failed(String::new()), 32),
            (HelperFailure::csid(unreachable, Tried::default()), 2),
            (HelperFailure::csid(Error::NoAnswer { last: None }, Tried::default()), 2),
            (of(Kind::InvalidArgument), 1),
            (of(Kind::NotAuthorized), 1),
            (of(Kind::ShuttingDown), 2),
            (of(Kind::StateCorrupt), 2),
            (of(Kind::Internal), 2),
            (of(Kind::ClaimConflict), 32),
            (of(Kind::AlreadyExists), 32),
            (of(Kind::Busy), 32),
            (of(Kind::TimedOut), 32),
            (of(Kind::PluginUnavailable), 32),
            (of(Kind::Unavailable), 32),
            (of(Kind::Other("Later".into())), 32),
        ] {
            assert_eq!(failure.code(), code, "{}", failure.text());
        }
    }

    #[test]
    fn text_has_the_holders_and_a_hint() {
        let details = Details { holders: vec!["backup".into()], ..Details::default() };
        let error = CsidError { kind: Kind::ClaimConflict, message: "m".into(), details };
        let text = HelperFailure::csid(Error::Csid(Box::new(error)), Tried::default()).text();
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[..2], ["ClaimConflict: m", "Held by: backup"]);
        assert!(lines[2].contains("`csictl claims`"), "{text}");
    }
}
