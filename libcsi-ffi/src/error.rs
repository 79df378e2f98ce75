//! Codes, and `csi_error`: owned, all that is known of a failure.

use std::ffi::{CString, c_char};
use std::ptr;
use std::sync::Arc;

use csid_client::{Error, Kind};

use crate::border::plain;
use crate::row::{csi_row, cstring};

/// CSI_OK (0), or the reason why a call failed. Not an enum: a newer library may return codes that this header
/// does not know.
pub type csi_code = i32;

/// Success.
pub const CSI_OK: csi_code = 0;
/// An argument is wrong; the message names it. Nothing was started.
pub const CSI_E_INVALID: csi_code = 1;
/// The object does not exist: a plugin, a registered volume, a mount, or a unit to bind to.
pub const CSI_E_NOT_FOUND: csi_code = 2;
/// The same identity exists with other options, or the name or path belongs to something else.
pub const CSI_E_EXISTS: csi_code = 3;
/// Something is in use. The detail `holders` lists consumers, units, processes or paths.
pub const CSI_E_BUSY: csi_code = 4;
/// Another consumer's claim or mount is in the way, the plugin takes no more volumes on this node, or this node
/// cannot reach the volume. The detail `holders` lists who is in the way.
pub const CSI_E_CLAIM_CONFLICT: csi_code = 5;
/// The plugin did not become ready before the deadline, or it is not connected.
pub const CSI_E_PLUGIN_UNAVAILABLE: csi_code = 6;
/// The plugin, this csid or this library cannot do this, or a flag or struct member is unknown.
pub const CSI_E_UNSUPPORTED: csi_code = 7;
/// The caller is not allowed to do this, or the bus refused the call.
pub const CSI_E_DENIED: csi_code = 8;
/// The operation was cancelled, or another call ended it, as Unmount ends a Mount in progress.
pub const CSI_E_CANCELLED: csi_code = 9;
/// The deadline passed.
pub const CSI_E_DEADLINE: csi_code = 10;
/// The effect of an earlier plugin call is not known yet. Repeat the call, or undo it (unmount, release,
/// delete).
pub const CSI_E_UNCERTAIN: csi_code = 11;
/// csid cannot be reached or is stopping, or the client was closed before the answer.
pub const CSI_E_DISCONNECTED: csi_code = 12;
/// The caller has as many operations, mounts or claims as one user may have.
pub const CSI_E_RATE_LIMITED: csi_code = 13;
/// The handle was made before a fork(), and this is the child.
pub const CSI_E_FORKED: csi_code = 14;
/// The plugin answered with an error. See csi_error_rpc, csi_error_grpc_code and csi_error_plugin_message.
pub const CSI_E_PLUGIN: csi_code = 15;
/// The plugin stopped during the call, or it is stopping.
pub const CSI_E_PLUGIN_SHUTDOWN: csi_code = 16;
/// The plugin needs the volume's secrets again. Repeat the call with csi_call.secrets or csi_call.credential.
pub const CSI_E_SECRET_REQUIRED: csi_code = 17;
/// csid's journal is damaged. csid makes no change until an administrator starts a new journal.
pub const CSI_E_STATE_CORRUPT: csi_code = 18;
/// csi_op_wait: the operation is still running. csi_events_next: there is no event now. No csi_error comes with
/// it.
pub const CSI_E_PENDING: csi_code = 19;
/// This host is in a cluster, and no server of the cluster can be asked now. The same call may succeed later.
pub const CSI_E_UNAVAILABLE: csi_code = 20;
/// A defect or a lack of resources in csid or in this library, such as a panic or no free descriptor; or an error
/// of csid that this library does not know, whose name begins the message.
pub const CSI_E_INTERNAL: csi_code = 99;

/// Why a call failed. Owned: its receiver frees it with csi_error_free. The texts and rows read from it live as
/// long as it does. One thread at a time.
#[derive(Clone)]
pub struct csi_error {
    code: csi_code,
    message: CString,
    retryable: bool,
    grpc_code: i32,
    /// The contract's details.
    details: Arc<csi_row>,
}

impl csi_error {
    pub fn new(code: csi_code, message: impl Into<String>) -> Self {
        let retryable = matches!(code, CSI_E_DISCONNECTED | CSI_E_DEADLINE);
        Self { code, message: cstring(message), retryable, grpc_code: -1, details: Arc::default() }
    }

    pub fn code(&self) -> csi_code {
        self.code
    }

    pub fn cancelled() -> Self {
        Self::new(CSI_E_CANCELLED, "the operation was cancelled")
    }

    pub fn closed() -> Self {
        Self::new(
            CSI_E_DISCONNECTED,
            "the client was closed before the answer; in csid the operation goes on",
        )
    }
}

impl From<Error> for csi_error {
    fn from(error: Error) -> Self {
        let mut made = Self::new(code_of(&error), error.to_string());
        if let Error::Csid(error) = error {
            made.message = cstring(match error.kind {
                // The code is CSI_E_INTERNAL, so the message has the name.
                Kind::Other(name) => format!("{name}: {}", error.message),
                _ => error.message,
            });
            made.retryable = error.details.retryable.unwrap_or(made.retryable);
            made.grpc_code = error.details.grpc_code.and_then(|code| code.try_into().ok()).unwrap_or(-1);
            made.details = Arc::new(csi_row::of(&error.details));
        }
        made
    }
}

fn code_of(error: &Error) -> csi_code {
    let Error::Csid(error) = error else {
        return match error {
            Error::Connect(_) | Error::NotRunning { .. } | Error::Disconnected(_) => CSI_E_DISCONNECTED,
            Error::Refused(_) => CSI_E_DENIED,
            Error::NoAnswer { .. } => CSI_E_DEADLINE,
            Error::NotServed { .. } => CSI_E_UNSUPPORTED,
            _ => CSI_E_INTERNAL,
        };
    };
    match error.kind {
        Kind::InvalidArgument => CSI_E_INVALID,
        Kind::NotFound => CSI_E_NOT_FOUND,
        Kind::AlreadyExists => CSI_E_EXISTS,
        Kind::Busy => CSI_E_BUSY,
        Kind::ClaimConflict => CSI_E_CLAIM_CONFLICT,
        Kind::PluginUnavailable => CSI_E_PLUGIN_UNAVAILABLE,
        Kind::PluginShutdown => CSI_E_PLUGIN_SHUTDOWN,
        Kind::PluginError => CSI_E_PLUGIN,
        Kind::NotSupported => CSI_E_UNSUPPORTED,
        Kind::NotAuthorized => CSI_E_DENIED,
        Kind::Cancelled => CSI_E_CANCELLED,
        Kind::TimedOut => CSI_E_DEADLINE,
        Kind::Uncertain => CSI_E_UNCERTAIN,
        Kind::RateLimited => CSI_E_RATE_LIMITED,
        Kind::SecretRequired => CSI_E_SECRET_REQUIRED,
        Kind::ShuttingDown => CSI_E_DISCONNECTED,
        Kind::StateCorrupt => CSI_E_STATE_CORRUPT,
        Kind::Unavailable => CSI_E_UNAVAILABLE,
        _ => CSI_E_INTERNAL,
    }
}

/// Returns the code of an error, which the failed call returned too.
///
/// @param error  The error. May be NULL.
/// @return The code; CSI_OK for NULL.
///
/// Threads: any thread, one at a time; never blocks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_error_code(error: *const csi_error) -> csi_code {
    // SAFETY: as csi.h says of every argument.
    plain("csi_error_code", CSI_E_INTERNAL, || unsafe { error.as_ref() }.map_or(CSI_OK, |error| error.code))
}

/// Returns a message for people: what failed and, where known, what to do next.
///
/// @param error  The error. May be NULL.
/// @return A text that lives as long as the error; empty for NULL. Never NULL.
///
/// Threads: any thread, one at a time; never blocks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_error_message(error: *const csi_error) -> *const c_char {
    plain("csi_error_message", c"".as_ptr(), || {
        // SAFETY: as csi.h says of every argument.
        unsafe { error.as_ref() }.map_or(c"".as_ptr(), |error| error.message.as_ptr())
    })
}

/// Returns whether the same call may succeed later without any other change.
///
/// @param error  The error. May be NULL.
/// @return false for NULL.
///
/// Threads: any thread, one at a time; never blocks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_error_retryable(error: *const csi_error) -> bool {
    // SAFETY: as csi.h says of every argument.
    plain("csi_error_retryable", false, || unsafe { error.as_ref() }.is_some_and(|error| error.retryable))
}

/// Returns the gRPC status code that the plugin answered.
///
/// @param error  The error. May be NULL.
/// @return The code as gRPC numbers it; -1 if no plugin answered, and for NULL.
///
/// Threads: any thread, one at a time; never blocks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_error_grpc_code(error: *const csi_error) -> i32 {
    // SAFETY: as csi.h says of every argument.
    plain("csi_error_grpc_code", -1, || unsafe { error.as_ref() }.map_or(-1, |error| error.grpc_code))
}

/// Returns the name of the CSI call that failed, such as "NodeStageVolume".
///
/// @param error  The error. May be NULL.
/// @return A text that lives as long as the error; NULL if no CSI call failed, and for NULL.
///
/// Threads: any thread, one at a time; never blocks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_error_rpc(error: *const csi_error) -> *const c_char {
    // SAFETY: as csi.h says of every argument.
    plain("csi_error_rpc", ptr::null(), || unsafe { detail(error, "rpc") })
}

/// Returns the plugin's own error message.
///
/// @param error  The error. May be NULL.
/// @return A text that lives as long as the error; NULL if there is none or csid withholds it because it may
///   contain a secret, and for NULL.
///
/// Threads: any thread, one at a time; never blocks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_error_plugin_message(error: *const csi_error) -> *const c_char {
    // SAFETY: as csi.h says of every argument.
    plain("csi_error_plugin_message", ptr::null(), || unsafe { detail(error, "plugin-message") })
}

/// Returns all other facts of an error: the names rpc, grpc-code, plugin-message, retryable, operation,
/// namespace, volume, plugin, step, obstacle, and the lists holders and tags, as far as they apply.
///
/// @param error  The error. May be NULL.
/// @return A row that lives as long as the error; NULL for NULL.
///
/// Threads: any thread, one at a time; never blocks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_error_details(error: *const csi_error) -> *const csi_row {
    plain("csi_error_details", ptr::null(), || {
        // SAFETY: as csi.h says of every argument.
        unsafe { error.as_ref() }.map_or(ptr::null(), |error| Arc::as_ptr(&error.details))
    })
}

/// Frees an error and everything that was read from it.
///
/// @param error  The error. NULL does nothing.
///
/// Threads: any thread, one at a time; never blocks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_error_free(error: *mut csi_error) {
    plain("csi_error_free", (), || {
        if !error.is_null() {
            // SAFETY: it was given out by `border::entry`, and the caller frees it once.
            drop(unsafe { Box::from_raw(error) });
        }
    });
}

/// # Safety
/// As csi.h says of every argument.
unsafe fn detail(error: *const csi_error, key: &str) -> *const c_char {
    // SAFETY: the caller's promise.
    unsafe { error.as_ref() }
        .and_then(|error| error.details.text(key))
        .map_or(ptr::null(), |text| text.as_ptr())
}

#[cfg(test)]
mod tests {
    use csid_client::{CsidError, Details};

    use super::*;

    #[test]
    fn unknown_error_name_is_internal_with_the_name() {
        let error = |kind| {
            let details = Details { retryable: Some(true), ..Details::default() };
            csi_error::from(Error::Csid(Box::new(CsidError { kind, message: "words".to_owned(), details })))
        };
        let unknown = error(Kind::Other("Novel".to_owned()));
        assert_eq!((unknown.code, unknown.message.to_str().unwrap()), (CSI_E_INTERNAL, "Novel: words"));
        assert!(unknown.retryable);
        assert_eq!(error(Kind::Busy).message.to_str().unwrap(), "words");
    }
}
