// Package cgo implements [csi.Client] over libcsi, the C library. A call that waits holds no thread: Go's own poller waits for
// the operation's descriptor.
//
// It is built with the flags of pkg-config for the package csi.
package cgo

// #cgo pkg-config: csi
// #include <csi.h>
import "C"

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csid-project/csid/go/csi"
	"github.com/csid-project/csid/go/internal/row"
)

// Client is a connection to csid that outlives csid's restarts.
type Client struct {
	mu sync.RWMutex
	// NULL once it is closed.
	handle *C.csi_client
}

var _ csi.Client = (*Client)(nil)

// Open connects to csid. Later calls wait for a csid that restarts. address is the path of csid's private socket or "system-bus".
// Empty: $CSID_SOCKET, else the socket at its usual place, else the system bus. The error is csi.ErrDisconnected if csid cannot be
// reached now, and csi.ErrInvalidArgument if address is none of these.
func Open(ctx context.Context, address string) (*Client, error) {
	if err := ctx.Err(); err != nil {
		return nil, csi.Ended(err)
	}
	options := &C.csi_client_options{struct_size: C.sizeof_csi_client_options}
	if deadline, bounded := ctx.Deadline(); bounded {
		options.timeout_usec = max(usec(time.Until(deadline)), 1)
	}
	type opened struct {
		client *Client
		err    error
	}
	done := make(chan opened, 1)
	a := new(arena)
	options.address = a.some(address)
	if a.err != nil {
		a.free()
		return nil, a.err
	}
	go func() {
		defer a.free()
		c, said := new(Client), (*C.csi_error)(nil)
		if code := C.csi_client_open(options, &c.handle, &said); code != C.CSI_OK {
			done <- opened{nil, failure(code, said)}
			return
		}
		done <- opened{c, nil}
	}()
	select {
	case o := <-done:
		return o.client, o.err
	case <-ctx.Done():
		go func() {
			if o := <-done; o.client != nil {
				o.client.Close()
			}
		}()
		return nil, csi.Ended(ctx.Err())
	}
}

// Close closes the connection. Running calls end here with csi.ErrDisconnected and go on in csid. It may take a second, while
// cancellations are sent.
func (c *Client) Close() error {
	c.mu.Lock()
	handle := c.handle
	c.handle = nil
	c.mu.Unlock()
	C.csi_client_unref(handle)
	return nil
}

// ref returns a reference of the client. NULL: the client is closed.
func (c *Client) ref() *C.csi_client {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return C.csi_client_ref(c.handle)
}

func (c *Client) closed() bool {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.handle == nil
}

// slot has the options of a call of libcsi, and the places for its operation or its error.
type slot struct {
	call *C.csi_call
	op   **C.csi_op
	err  **C.csi_error
}

type start func(client *C.csi_client, s slot) C.csi_code

// all makes one call, with its arguments in the arena, for a volume that may have secrets. It returns the rows of the answer.
func all[T any](c *Client, ctx context.Context, a *arena, v csi.Volume, start start, read func(row.Row) T) (rows []T, err error) {
	op, err := c.begin(ctx, a, v, start)
	if err != nil {
		return nil, err
	}
	defer inC(func() { C.csi_op_unref(op) })
	if err := await(ctx, op); err != nil {
		return nil, err
	}
	inC(func() {
		for n := range C.csi_op_rows(op) {
			rows = append(rows, read(crow{C.csi_op_row(op, n)}))
		}
	})
	return rows, nil
}

// one makes a call whose answer is one row.
func one[T any](c *Client, ctx context.Context, a *arena, v csi.Volume, start start, read func(row.Row) T) (none T, err error) {
	rows, err := all(c, ctx, a, v, start, read)
	if err != nil {
		return none, err
	}
	if len(rows) != 1 {
		return none, &csi.Error{Code: csi.ErrInternal, Message: fmt.Sprintf("libcsi answered %d rows in place of one", len(rows))}
	}
	return rows[0], nil
}

// done makes a call without rows in its answer.
func (c *Client) done(ctx context.Context, a *arena, v csi.Volume, start start) error {
	_, err := all(c, ctx, a, v, start, func(row.Row) struct{} { return struct{}{} })
	return err
}

func (c *Client) begin(ctx context.Context, a *arena, v csi.Volume, start start) (*C.csi_op, error) {
	defer a.free()
	if err := ctx.Err(); err != nil {
		return nil, csi.Ended(err)
	}
	call := &C.csi_call{struct_size: C.sizeof_csi_call, secrets: a.pairs(v.Secrets), credential: a.some(v.Credential)}
	if deadline, bounded := ctx.Deadline(); bounded {
		call.deadline_usec = max(usec(time.Until(deadline)), 1)
	}
	if a.err != nil {
		return nil, a.err
	}
	c.mu.RLock()
	defer c.mu.RUnlock()
	if c.handle == nil {
		return nil, csi.Closed()
	}
	var op *C.csi_op
	var said *C.csi_error
	if code := start(c.handle, slot{call, &op, &said}); code != C.CSI_OK {
		return nil, failure(code, said)
	}
	return op, nil
}

// await waits for the operation's end, without a thread. At its deadline the operation ends by itself.
func await(ctx context.Context, op *C.csi_op) error {
	cancel := func() { inC(func() { C.csi_op_cancel(op) }) }
	var fd C.int32_t
	inC(func() { fd = C.csi_op_fd(op) })
	file, err := pollable(fd)
	if err != nil {
		cancel()
		return err
	}
	defer file.Close()
	defer after(ctx, func() {
		if errors.Is(ctx.Err(), context.Canceled) {
			cancel()
		}
	})()
	var failed *csi.Error
	err = wait(file, func() (over bool) {
		inC(func() {
			var said *C.csi_error
			switch code := C.csi_op_wait(op, 0, &said); code {
			case C.CSI_E_PENDING:
				return
			case C.CSI_OK:
			default:
				failed = failure(code, said)
			}
			over = true
		})
		return
	})
	switch {
	case err != nil:
		cancel()
		return internal("an operation cannot be awaited", err)
	case failed == nil:
		return nil
	case failed.Code == csi.ErrCancelled && ctx.Err() != nil:
		return csi.Ended(ctx.Err())
	}
	return failed
}

// pollable duplicates a descriptor of libcsi for Go's poller, which closes its own.
func pollable(fd C.int32_t) (*os.File, error) {
	own, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, internal("no descriptor to wait with", err)
	}
	return os.NewFile(uintptr(own), "libcsi"), nil
}

// wait calls over, and calls it again whenever the file is readable, until it returns true.
func wait(file *os.File, over func() bool) error {
	raw, err := file.SyscallConn()
	if err != nil {
		return err
	}
	return raw.Read(func(uintptr) bool { return over() })
}

// after calls do when the context ends. The returned function stops that, and waits for a do in progress.
func after(ctx context.Context, do func()) (end func()) {
	done := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(done)
		do()
	})
	return func() {
		if !stop() {
			<-done
		}
	}
}
