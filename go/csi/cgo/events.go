package cgo

// #include <csi.h>
import "C"

import (
	"cmp"
	"context"
	"errors"
	"os"
	"sync"
	"time"

	"github.com/csid-project/csid/go/csi"
	"github.com/csid-project/csid/go/internal/row"
)

// Interval at which a reader that is being opened checks whether a caller still waits for it.
const opening = time.Second

type reader struct {
	file *os.File
	mu   sync.Mutex
	// NULL once it is closed.
	handle *C.csi_events
}

// Events implements [csi.Client].
func (c *Client) Events(ctx context.Context, cursor string) (csi.Events, error) {
	if err := ctx.Err(); err != nil {
		return nil, csi.Ended(err)
	}
	a := new(arena)
	at := a.text(cursor)
	if cursor == csi.FromNow {
		at = nil
	}
	client := c.ref()
	if client == nil || a.err != nil {
		C.csi_client_unref(client)
		a.free()
		return nil, cmp.Or(a.err, error(csi.Closed()))
	}
	type opened struct {
		handle *C.csi_events
		err    error
	}
	done := make(chan opened, 1)
	go func() {
		defer a.free()
		defer C.csi_client_unref(client)
		for {
			var o opened
			var said *C.csi_error
			code := C.csi_events_open(client, at, usec(opening), &o.handle, &said)
			if code == C.CSI_E_DEADLINE && ctx.Err() == nil && !c.closed() {
				C.csi_error_free(said)
				continue
			}
			if code != C.CSI_OK {
				o.err = failure(code, said)
			}
			done <- o
			return
		}
	}()
	select {
	case o := <-done:
		if o.err != nil {
			return nil, o.err
		}
		file, err := pollable(C.csi_events_fd(o.handle))
		if err != nil {
			C.csi_events_unref(o.handle)
			return nil, err
		}
		return &reader{file: file, handle: o.handle}, nil
	case <-ctx.Done():
		go func() {
			o := <-done
			C.csi_events_unref(o.handle)
		}()
		return nil, csi.Ended(ctx.Err())
	}
}

func (r *reader) Next(ctx context.Context) (*csi.Event, error) {
	r.mu.Lock()
	handle := C.csi_events_ref(r.handle)
	r.mu.Unlock()
	if handle == nil {
		return nil, csi.Closed()
	}
	defer C.csi_events_unref(handle)
	// A deadline in the past ends a wait.
	if err := r.file.SetReadDeadline(time.Time{}); err != nil {
		return nil, csi.Closed()
	}
	defer after(ctx, func() { r.file.SetReadDeadline(time.Unix(1, 0)) })()
	var event *C.csi_event
	var said *C.csi_error
	var code C.csi_code
	err := wait(r.file, func() bool {
		code = C.csi_events_next(handle, &event, &said)
		return code != C.CSI_E_PENDING
	})
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return nil, csi.Ended(ctx.Err())
	case err != nil:
		return nil, csi.Closed()
	case code != C.CSI_OK:
		return nil, failure(code, said)
	}
	defer C.csi_event_free(event)
	fields := crow{C.csi_event_row(event)}
	made := row.Event(fields, crow{by("details", func(n *C.char) *C.csi_row { return C.csi_row_row(fields.at, n, 0) })})
	made.Gap = bool(C.csi_event_gap(event))
	made.Cursor = C.GoString(C.csi_event_cursor(event))
	return made, nil
}

func (r *reader) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	C.csi_events_unref(r.handle)
	r.handle = nil
	r.file.Close()
	return nil
}
