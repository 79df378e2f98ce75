//! Errors and rows for the tests of hints.

use csid_client::{CsidError, Details, Error, Explanation, Kind, MountRow};

use super::common::Tried;
use super::explained::{explained, phase};
use super::hint;

pub(super) fn said(kind: Kind, details: Details, tried: &Tried) -> String {
    let error = CsidError { kind, message: "m".into(), details };
    hint(&Error::Csid(Box::new(error)), tried).unwrap()
}

pub(super) fn failed(kind: Kind, message: &str, details: Details, tried: &Tried) -> String {
    let error = CsidError { kind, message: message.into(), details };
    hint(&Error::Csid(Box::new(error)), tried).unwrap()
}

pub(super) fn tried(command: &'static str) -> Tried {
    Tried { command, volume: Some("ns v".into()), mount: Some("ns v job".into()), ..Tried::default() }
}

pub(super) fn mount(state: &str, error: &str) -> MountRow {
    MountRow { consumer: "my job".into(), state: state.into(), error: error.into(), ..MountRow::default() }
}

/// Returns the hint of explain for a mount with this row.
pub(super) fn ends(row: &MountRow) -> String {
    let waiting_for = format!("the mount of {}, which is {}", row.consumer, phase(row));
    let explanation = Explanation { waiting_for, ..Explanation::default() };
    explained(&explanation, std::slice::from_ref(row), &tried("explain"))
}

pub(super) const HANGS: &str =
    "the kernel did not answer in time for /p; what serves its file system does not answer";

pub(super) const IS_HELD: &str =
    "the volume is unmounted, but its block device loop0 is still in use: by an overlay on it";
