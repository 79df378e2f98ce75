//! Codes, and `csi_error`: owned, all that is known of a failure.

use std::ffi::{CString, c_char};
use std::ptr;
use std::sync::Arc;

use csid_client::{Error, Kind};

use crate::border::plain;
use crate::row::{csi_row, cstring};

/// 0, or why a call failed. Not an enum: a newer library may answer codes that this header does not know.
pub type csi_code = i32;

pub const CSI_OK: csi_code = 0;
/// An argument is wrong: the message says which. Nothing was begun.
pub const CSI_E_INVALID: csi_code = 1;
pub const CSI_E_NOT_FOUND: csi_code = 2;
/// The same identity with other options.
pub const CSI_E_EXISTS: csi_code = 3;
/// Something uses it; the detail `holders` says who.
pub const CSI_E_BUSY: csi_code = 4;
/// Another user is in the way; the detail `holders` says who.
pub const CSI_E_CLAIM_CONFLICT: csi_code = 5;
pub const CSI_E_PLUGIN_UNAVAILABLE: csi_code = 6;
/// Neither this csid nor this library, or not this plugin.
pub const CSI_E_UNSUPPORTED: csi_code = 7;
pub const CSI_E_DENIED: csi_code = 8;
pub const CSI_E_CANCELLED: csi_code = 9;
/// The deadline is over.
pub const CSI_E_DEADLINE: csi_code = 10;
/// What an earlier call of the plugin's did could not be settled: mount again, or unmount.
pub const CSI_E_UNCERTAIN: csi_code = 11;
/// csid cannot be reached, or the client was closed before the answer.
pub const CSI_E_DISCONNECTED: csi_code = 12;
pub const CSI_E_RATE_LIMITED: csi_code = 13;
/// The handle was made before a fork(), and this is the child.
pub const CSI_E_FORKED: csi_code = 14;
/// The plugin said no: csi_error_rpc, csi_error_grpc_code and csi_error_plugin_message tell how.
pub const CSI_E_PLUGIN: csi_code = 15;
/// The plugin left while it was asked.
pub const CSI_E_PLUGIN_SHUTDOWN: csi_code = 16;
/// The volume was used with secrets; give them again.
pub const CSI_E_SECRET_REQUIRED: csi_code = 17;
/// csid's journal is damaged: it changes nothing until an administrator has it begin anew.
pub const CSI_E_STATE_CORRUPT: csi_code = 18;
/// csi_op_wait: the operation goes on. csi_events_next: there is none now.
pub const CSI_E_PENDING: csi_code = 19;
pub const CSI_E_INTERNAL: csi_code = 99;

/// Why a call failed. Owned by whoever got it: csi_error_free.
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
            made.message = cstring(error.message);
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
            Error::Connect(_) | Error::NotRunning(_) | Error::Disconnected(_) => CSI_E_DISCONNECTED,
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
        _ => CSI_E_INTERNAL,
    }
}

/// The code, which the call returned too; CSI_OK of NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_error_code(error: *const csi_error) -> csi_code {
    // SAFETY: as csi.h says of every argument.
    plain("csi_error_code", CSI_E_INTERNAL, || unsafe { error.as_ref() }.map_or(CSI_OK, |error| error.code))
}

/// For people: what failed, and what to do next. Never NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_error_message(error: *const csi_error) -> *const c_char {
    plain("csi_error_message", c"".as_ptr(), || {
        // SAFETY: as csi.h says of every argument.
        unsafe { error.as_ref() }.map_or(c"".as_ptr(), |error| error.message.as_ptr())
    })
}

/// Whether the same call may succeed later without anything else being changed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_error_retryable(error: *const csi_error) -> bool {
    // SAFETY: as csi.h says of every argument.
    plain("csi_error_retryable", false, || unsafe { error.as_ref() }.is_some_and(|error| error.retryable))
}

/// What the plugin answered, as gRPC numbers it; -1: no plugin did.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_error_grpc_code(error: *const csi_error) -> i32 {
    // SAFETY: as csi.h says of every argument.
    plain("csi_error_grpc_code", -1, || unsafe { error.as_ref() }.map_or(-1, |error| error.grpc_code))
}

/// The CSI call that failed, "NodeStageVolume"; NULL: none did.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_error_rpc(error: *const csi_error) -> *const c_char {
    // SAFETY: as csi.h says of every argument.
    plain("csi_error_rpc", ptr::null(), || unsafe { detail(error, "rpc") })
}

/// The plugin's own words; NULL: there are none, or they may tell of a secret.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_error_plugin_message(error: *const csi_error) -> *const c_char {
    // SAFETY: as csi.h says of every argument.
    plain("csi_error_plugin_message", ptr::null(), || unsafe { detail(error, "plugin-message") })
}

/// Whatever else csid says of it: operation, namespace, volume, plugin, step, and holders, a list. NULL of NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_error_details(error: *const csi_error) -> *const csi_row {
    plain("csi_error_details", ptr::null(), || {
        // SAFETY: as csi.h says of every argument.
        unsafe { error.as_ref() }.map_or(ptr::null(), |error| Arc::as_ptr(&error.details))
    })
}

/// NULL is nothing.
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
