package csi

import (
	"context"
	"errors"
)

// Code says what kind of an error it is. Each is an error itself: errors.Is(err, csi.ErrBusy).
type Code string

const (
	// An argument is wrong; nothing was begun.
	ErrInvalidArgument Code = "InvalidArgument"
	ErrNotFound        Code = "NotFound"
	// The same identity with other options.
	ErrAlreadyExists Code = "AlreadyExists"
	// Something uses it: Error.Holders.
	ErrBusy Code = "Busy"
	// Somebody else's claim is in the way: Error.Holders.
	ErrClaimConflict     Code = "ClaimConflict"
	ErrPluginUnavailable Code = "PluginUnavailable"
	// The plugin left while it was asked.
	ErrPluginShutdown Code = "PluginShutdown"
	// The plugin said no: Error.RPC, Error.GRPCCode, Error.PluginMessage.
	ErrPlugin        Code = "PluginError"
	ErrNotSupported  Code = "NotSupported"
	ErrNotAuthorized Code = "NotAuthorized"
	// The context was cancelled, or another call ended this one, as Unmount does a Mount that is under way.
	ErrCancelled Code = "Cancelled"
	// The context's deadline is over.
	ErrTimedOut Code = "TimedOut"
	// What an earlier call of the plugin's did could not be settled: mount again, or unmount.
	ErrUncertain   Code = "Uncertain"
	ErrRateLimited Code = "RateLimited"
	// The volume was used with secrets; give them again.
	ErrSecretRequired Code = "SecretRequired"
	// csid's journal is damaged: it changes nothing until an administrator has it begin anew.
	ErrStateCorrupt Code = "StateCorrupt"
	// csid cannot be reached, or the client was closed before the answer.
	ErrDisconnected Code = "Disconnected"
	ErrInternal     Code = "Internal"
)

func (c Code) Error() string { return "csi: " + string(c) }

// Error is why a call failed.
type Error struct {
	Code Code
	// For people: what failed, and what to do next.
	Message string
	// Whether the same call may succeed later without anything else being changed.
	Retryable bool

	// The CSI call that failed, NodeStageVolume, or empty; the code that the plugin answered as gRPC numbers it, or 0; and
	// its own words.
	RPC           string
	GRPCCode      uint32
	PluginMessage string

	// Who is in the way: consumers, units or processes.
	Holders []string

	// What csid was doing, and of what, as far as it applies.
	Step, Operation, Namespace, Volume, Plugin string

	// The context's own error, when it ended the call.
	Err error
}

func (e *Error) Error() string { return string(e.Code) + ": " + e.Message }

func (e *Error) Unwrap() error { return e.Err }

// Is makes a [Code] of the error. csid's TimedOut is the deadline of the context that it was given.
func (e *Error) Is(target error) bool {
	code, is := target.(Code)
	return is && code == e.Code || e.Code == ErrTimedOut && target == context.DeadlineExceeded
}

// Ended is the error of a call that its context ended.
func Ended(cause error) *Error {
	if errors.Is(cause, context.DeadlineExceeded) {
		return &Error{Code: ErrTimedOut, Message: "no answer from csid before the deadline", Retryable: true, Err: cause}
	}
	return &Error{Code: ErrCancelled, Message: "the call was cancelled", Err: cause}
}

// Closed is the error of a call whose client was closed.
func Closed() *Error {
	return &Error{
		Code:      ErrDisconnected,
		Message:   "the client was closed before the answer; in csid the operation goes on",
		Retryable: true,
	}
}
