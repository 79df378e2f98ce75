package csi

import (
	"context"
	"errors"
)

// Code is the kind of an error. Each is an error itself: errors.Is(err, csi.ErrBusy).
type Code string

// The kinds of errors.
const (
	// ErrInvalidArgument: an argument is wrong. Nothing was started.
	ErrInvalidArgument Code = "InvalidArgument"
	// ErrNotFound: the object does not exist.
	ErrNotFound Code = "NotFound"
	// ErrAlreadyExists: the same identity exists with other options, or the name or path belongs to something else.
	ErrAlreadyExists Code = "AlreadyExists"
	// ErrBusy: something is in use; Error.Holders lists the users.
	ErrBusy Code = "Busy"
	// ErrClaimConflict: another consumer's claim or mount is in the way (Error.Holders), the plugin takes no more volumes on this
	// node, or this node cannot reach the volume.
	ErrClaimConflict Code = "ClaimConflict"
	// ErrPluginUnavailable: the plugin did not become ready before the deadline, or it is not connected.
	ErrPluginUnavailable Code = "PluginUnavailable"
	// ErrPluginShutdown: the plugin stopped during the call, or it is stopping.
	ErrPluginShutdown Code = "PluginShutdown"
	// ErrPlugin: the plugin answered with an error; see Error.RPC, Error.GRPCCode and Error.PluginMessage.
	ErrPlugin Code = "PluginError"
	// ErrNotSupported: the plugin, this csid or this client cannot do this.
	ErrNotSupported Code = "NotSupported"
	// ErrNotAuthorized: the caller is not allowed to do this.
	ErrNotAuthorized Code = "NotAuthorized"
	// ErrCancelled: the context was cancelled, or another call ended this one, as Unmount ends a Mount in progress.
	ErrCancelled Code = "Cancelled"
	// ErrTimedOut: the deadline passed, that of the context or csid's own.
	ErrTimedOut Code = "TimedOut"
	// ErrUncertain: the effect of an earlier plugin call is not known yet. Repeat the call, or undo it.
	ErrUncertain Code = "Uncertain"
	// ErrRateLimited: the caller has as many operations, mounts or claims as one user may have.
	ErrRateLimited Code = "RateLimited"
	// ErrSecretRequired: the plugin needs the volume's secrets again.
	ErrSecretRequired Code = "SecretRequired"
	// ErrStateCorrupt: csid's journal is damaged. csid makes no change until an administrator starts a new journal.
	ErrStateCorrupt Code = "StateCorrupt"
	// ErrUnavailable: this host is in a cluster, and no server of the cluster can be asked now. The same call may succeed later.
	ErrUnavailable Code = "Unavailable"
	// ErrDisconnected: csid cannot be reached or is stopping, or the client was closed before the answer.
	ErrDisconnected Code = "Disconnected"
	// ErrInternal: a defect or a lack of resources in csid or in the client; or an error of csid that the client does not know,
	// whose name begins the message.
	ErrInternal Code = "Internal"
)

// Error returns the code as text.
func (c Code) Error() string { return "csi: " + string(c) }

// Error is why a call failed.
type Error struct {
	// Code is the kind of the error.
	Code Code
	// Message says to people what failed.
	Message string
	// Retryable says whether the same call may succeed later without any other change.
	Retryable bool

	// RPC is the CSI call that failed, such as NodeStageVolume, or empty. GRPCCode is the plugin's gRPC code, or 0. PluginMessage
	// is the plugin's own message, or empty.
	RPC           string
	GRPCCode      uint32
	PluginMessage string

	// Holders are the consumers, units, processes or paths in the way.
	Holders []string

	// Tags are those of the consumer's existing mounts, if the one that was asked for does not exist.
	Tags []string

	// Obstacle names what is in the way, where the code and the step do not: a word of the contract, such as
	// unknown-plugin. Or it is empty.
	Obstacle string

	// Step, Operation, Namespace, Volume and Plugin say what csid was doing, as far as they apply.
	Step, Operation, Namespace, Volume, Plugin string

	// Err is the context's own error, if it ended the call.
	Err error
}

// Error returns the code and the message.
func (e *Error) Error() string { return string(e.Code) + ": " + e.Message }

// Unwrap returns the context's own error, if it ended the call.
func (e *Error) Unwrap() error { return e.Err }

// Is reports whether target is the error's [Code]. ErrTimedOut is also context.DeadlineExceeded.
func (e *Error) Is(target error) bool {
	code, is := target.(Code)
	return is && code == e.Code || e.Code == ErrTimedOut && target == context.DeadlineExceeded
}

// Ended returns the error of a call that its context ended. It is for implementations of [Client].
func Ended(cause error) *Error {
	if errors.Is(cause, context.DeadlineExceeded) {
		return &Error{Code: ErrTimedOut, Message: "no answer from csid before the deadline", Retryable: true, Err: cause}
	}
	return &Error{Code: ErrCancelled, Message: "the call was cancelled", Err: cause}
}

// Closed returns the error of a call whose client was closed. It is for implementations of [Client].
func Closed() *Error {
	return &Error{
		Code:      ErrDisconnected,
		Message:   "the client was closed before the answer; in csid the operation goes on",
		Retryable: true,
	}
}
