package dbus

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/godbus/dbus/v5"

	"github.com/csid-project/csid/go/csi"
	"github.com/csid-project/csid/go/internal/row"
)

const (
	// Pauses between two tries to reach csid while it is away.
	firstPause, lastPause = 20 * time.Millisecond, time.Second
	// Limit of connections that end during one call. The call is not repeated then: it may be the cause.
	enough = 5
	// Time that a call waits beyond its deadline. csid answers at the deadline, unless it hangs.
	grace = time.Second
	// Interval and time limit of repeated cancellations: the call itself may not have reached csid yet.
	tellAgain, tellUntil = 200 * time.Millisecond, 30 * time.Second
)

// request is one call of the contract.
type request struct {
	path, iface, member string
	args                []any
	// The last argument. nil: there is none, or it has no common keys.
	options options
	volume  csi.Volume
	// The deadline among the options. Zero: none.
	deadline time.Time
	// Names of the answer's arguments.
	names []string
	// The call reads memory or the journal only. Every other call may wait for a plugin or a kernel that hangs.
	short bool
	// Returns why its caller withdrew it, or nil while it is wanted. A nil function: it cannot be withdrawn.
	unwanted func() error
}

type answer struct {
	body values
	err  error
}

// ask makes one call, and repeats it whenever csid went away before its answer.
func (c *Client) ask(ctx context.Context, r request) (values, error) {
	if err := ctx.Err(); err != nil {
		return nil, csi.Ended(err)
	}
	if err := check(r); err != nil {
		return nil, err
	}
	operation := ""
	if r.options != nil {
		operation = c.operation()
		r.options["operation-id"] = dbus.MakeVariant(operation)
		r.options.text("credential", r.volume.Credential)
		r.deadline, _ = ctx.Deadline()
	}
	if c.life.Err() != nil {
		return nil, csi.Closed()
	}
	r.unwanted = ctx.Err
	asking, stop := context.WithCancel(c.life)
	answers := make(chan answer, 1)
	go func() {
		defer stop()
		body, err := c.asking(asking, r)
		answers <- answer{body, callerError(err)}
	}()
	var late <-chan time.Time
	ended := ctx.Done()
	for {
		select {
		case answer := <-answers:
			return answer.body, answer.err
		case <-c.life.Done():
			return nil, csi.Closed()
		case <-ended:
			ended = nil
			if errors.Is(ctx.Err(), context.DeadlineExceeded) {
				late = time.After(grace)
				continue
			}
		case <-late:
		}
		// A call that is not sent yet is never sent.
		stop()
		if operation != "" {
			c.withdraw(operation, answers)
		}
		return nil, csi.Ended(ctx.Err())
	}
}

// asking returns at an answer or at the end of ctx. A call in progress is waited for in either case, for the bus daemon still counts it.
func (c *Client) asking(ctx context.Context, r request) (values, error) {
	// A call without options takes no secrets.
	if r.options != nil && r.volume.Secrets != nil {
		file, err := seal(r.volume.Secrets)
		if err != nil {
			return nil, &csi.Error{Code: csi.ErrInternal, Message: "the secrets have no place: " + err.Error()}
		}
		defer file.Close()
		r.options["secrets"] = dbus.MakeVariant(dbus.UnixFD(file.Fd()))
		defer runtime.KeepAlive(file)
	}
	pause := firstPause
	for asked := 0; ; {
		link, err := c.use(ctx)
		if err == nil {
			var body values
			body, err = c.once(ctx, link, r)
			isLost := wasLost(err)
			c.done(link, isLost)
			if !isLost || asked == enough {
				return body, err
			}
			if !err.(gone).unasked {
				asked++
			}
		}
		if sleep(ctx, pause); ctx.Err() != nil {
			return nil, err
		}
		pause = min(2*pause, lastPause)
	}
}

// once makes the call over one link.
func (c *Client) once(ctx context.Context, l *link, r request) (values, error) {
	bound := l.waiting
	if r.short {
		bound = l.short
	}
	select {
	case bound <- struct{}{}:
	case <-ctx.Done():
		return nil, csi.Ended(ctx.Err())
	}
	defer func() { <-bound }()
	if ctx.Err() != nil {
		return nil, csi.Ended(ctx.Err())
	}
	// The caller's context ends for all its calls at one moment: the turn that the first of them returns must not go to the next.
	if r.unwanted != nil && r.unwanted() != nil {
		return nil, csi.Ended(r.unwanted())
	}
	args := r.args
	if !r.deadline.IsZero() {
		// The rest of the deadline after the wait for the turn.
		left := max(time.Until(r.deadline).Microseconds(), 1)
		r.options["deadline-usec"] = dbus.MakeVariant(uint64(left))
	}
	if r.options != nil {
		args = append(args[:len(args):len(args)], map[string]dbus.Variant(r.options))
	}
	call := l.conn.Object(name, dbus.ObjectPath(r.path)).Go(r.iface+"."+r.member, 0, make(chan *dbus.Call, 1), args...)
	// The end of a connection answers all its calls.
	<-call.Done
	if call.Err != nil {
		return nil, failure(r.member, call.Err)
	}
	return named(call.Body, r.names), nil
}

// withdraw cancels the operation in csid, and repeats that until the operation has ended. Close waits for it, up to a limit.
func (c *Client) withdraw(operation string, answers <-chan answer) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.life.Err() != nil {
		return
	}
	c.talking.Add(1)
	go func() {
		defer c.talking.Done()
		ctx, stop := context.WithTimeout(c.afterlife, tellUntil)
		defer stop()
		cancel := request{path: root, iface: manager, member: "CancelOperation", args: []any{operation}, short: true}
		for {
			said := make(chan struct{})
			go func() {
				defer close(said)
				if link, err := c.use(ctx); err == nil {
					_, err = c.once(ctx, link, cancel)
					c.done(link, wasLost(err))
				}
				sleep(ctx, tellAgain)
			}()
			select {
			case <-answers:
				return
			case <-ctx.Done():
				return
			case <-said:
			}
		}
	}()
}

// sleep waits for the pause, or until the context ends.
func sleep(ctx context.Context, pause time.Duration) {
	select {
	case <-time.After(pause):
	case <-ctx.Done():
	}
}

// check returns an error for arguments that D-Bus cannot carry: they would end the connection.
func check(r request) error {
	for _, arg := range r.args {
		if text, is := arg.(string); is && !carried(text) {
			return &csi.Error{Code: csi.ErrInvalidArgument, Message: r.member + ": " + errText}
		}
	}
	for key, value := range r.options {
		if !carriedAll(value.Value()) {
			return &csi.Error{Code: csi.ErrInvalidArgument, Message: r.member + ": " + key + ": " + errText}
		}
	}
	for name, value := range r.volume.Secrets {
		if !utf8.ValidString(name) || !utf8.ValidString(value) {
			return &csi.Error{Code: csi.ErrInvalidArgument, Message: r.member + ": a secret is not UTF-8"}
		}
	}
	return nil
}

const errText = "a text is not UTF-8, or has a NUL in it"

func carried(text string) bool { return utf8.ValidString(text) && !strings.Contains(text, "\x00") }

func carriedAll(value any) bool {
	switch value := value.(type) {
	case string:
		return carried(value)
	case []string:
		for _, text := range value {
			if !carried(text) {
				return false
			}
		}
	case map[string]string:
		for key, text := range value {
			if !carried(key) || !carried(text) {
				return false
			}
		}
	case []map[string]dbus.Variant:
		for _, row := range value {
			for _, field := range row {
				if !carriedAll(field.Value()) {
					return false
				}
			}
		}
	case []map[string]string:
		for _, pairs := range value {
			if !carriedAll(pairs) {
				return false
			}
		}
	}
	return true
}

// gone is an error of a csid that went away. The call can be repeated to the next csid.
type gone struct {
	err *csi.Error
	// No csid is on the bus now, or csid stops: the call is not the cause.
	unasked bool
}

func (g gone) Error() string { return g.err.Error() }

func lost(message string) error {
	return gone{err: &csi.Error{Code: csi.ErrDisconnected, Message: message, Retryable: true}}
}

func notRunning(message string) error {
	message = "csid is not running: " + message
	return gone{err: &csi.Error{Code: csi.ErrDisconnected, Message: message, Retryable: true}, unasked: true}
}

// callerError returns the error in the form for the caller.
func callerError(err error) error {
	if gone, is := err.(gone); is {
		return gone.err
	}
	return err
}

func wasLost(err error) bool {
	_, is := err.(gone)
	return is
}

// known are csid's names of errors that have a [csi.Code].
var known = map[csi.Code]bool{
	csi.ErrInvalidArgument: true, csi.ErrNotFound: true, csi.ErrAlreadyExists: true, csi.ErrBusy: true,
	csi.ErrClaimConflict: true, csi.ErrPluginUnavailable: true, csi.ErrPluginShutdown: true, csi.ErrPlugin: true,
	csi.ErrNotSupported: true, csi.ErrNotAuthorized: true, csi.ErrCancelled: true, csi.ErrTimedOut: true,
	csi.ErrUncertain: true, csi.ErrRateLimited: true, csi.ErrSecretRequired: true, csi.ErrStateCorrupt: true,
	csi.ErrUnavailable: true, csi.ErrInternal: true,
}

// failure converts an error of csid, the bus or the connection.
func failure(member string, err error) error {
	var said dbus.Error
	if !errors.As(err, &said) {
		if unsent(err) {
			return &csi.Error{Code: csi.ErrInvalidArgument, Message: member + ": " + err.Error()}
		}
		return lost("the connection to csid ended before its answer: " + err.Error())
	}
	message := said.Error()
	if code, is := strings.CutPrefix(said.Name, "org.csid1.Error."); is {
		made := &csi.Error{Code: csi.Code(code), Message: message}
		if code != "ShuttingDown" && !known[made.Code] {
			// As in libcsi. Callers have no other code to compare with, so the message has the name.
			made.Code, made.Message = csi.ErrInternal, code+": "+message
		}
		if len(said.Body) > 1 {
			details, _ := said.Body[1].(map[string]dbus.Variant)
			facts := of(details)
			row.Details(made, facts)
			made.GRPCCode = uint32(facts.Number("grpc-code"))
			made.Retryable = facts.Flag("retryable")
		}
		if code == "ShuttingDown" {
			made.Code = csi.ErrDisconnected
			return gone{err: made, unasked: true}
		}
		return made
	}
	made := func(code csi.Code, message string) error { return &csi.Error{Code: code, Message: message} }
	switch strings.TrimPrefix(said.Name, "org.freedesktop.DBus.Error.") {
	case "ServiceUnknown", "NameHasNoOwner", "Spawn.ChildExited", "Spawn.Failed", "TimedOut", "Timeout":
		return notRunning(message)
	case "NoReply", "Disconnected":
		return lost("the connection to csid ended before its answer: " + message)
	case "AccessDenied", "AuthFailed", "LimitsExceeded":
		return made(csi.ErrNotAuthorized, "the bus refused the call: "+message)
	case "UnknownMethod", "UnknownInterface", "UnknownProperty":
		return made(csi.ErrNotSupported, fmt.Sprintf("this csid does not serve %s: %s", member, message))
	case "UnknownObject":
		// Only a plugin's object may be missing.
		return made(csi.ErrNotFound, message)
	case "InvalidArgs":
		return made(csi.ErrInvalidArgument, message)
	}
	// The bus asked systemd to start csid: UnitMasked, NoSuchUnit.
	if strings.HasPrefix(said.Name, "org.freedesktop.systemd1.") {
		return notRunning(message)
	}
	return made(csi.ErrInternal, fmt.Sprintf("%s failed on D-Bus: %s: %s", member, said.Name, message))
}

// unsent returns whether the call could not be encoded as a message.
func unsent(err error) bool {
	var format dbus.FormatError
	var invalid dbus.InvalidMessageError
	var kind dbus.InvalidTypeError
	return errors.As(err, &format) || errors.As(err, &invalid) || errors.As(err, &kind)
}
