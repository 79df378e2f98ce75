package dbus

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/godbus/dbus/v5"

	"github.com/csid-project/csid/go/csi"
	"github.com/csid-project/csid/go/internal/row"
)

const (
	// Events that wait for a slow reader here; all others wait in csid.
	queued = 256
	page   = 256
)

// reader reads events page by page; csid's signal says when there may be more.
type reader struct {
	client *Client
	life   context.Context
	end    context.CancelFunc
	bell   chan struct{}
	// Closed when the reader has failed.
	events chan *csi.Event
	failed error

	// These are the pump's: in which journal it is, and after which event; and the link that journal was asked over.
	journal  string
	sequence uint64
	link     *link
}

func (c *Client) Events(ctx context.Context, cursor string) (csi.Events, error) {
	r := &reader{client: c, bell: make(chan struct{}, 1), events: make(chan *csi.Event, queued)}
	if cursor != csi.FromFirst && cursor != csi.FromNow {
		at := strings.LastIndexByte(cursor, ':')
		sequence, err := strconv.ParseUint(cursor[at+1:], 10, 64)
		if at < 0 || err != nil {
			return nil, &csi.Error{Code: csi.ErrInvalidArgument, Message: "the cursor is none of Event.Cursor's"}
		}
		r.journal, r.sequence = cursor[:at], sequence
	}
	state, err := c.properties(ctx, root, manager)
	if err != nil {
		return nil, err
	}
	if cursor == csi.FromNow {
		r.journal, r.sequence = state.Text("journal-id"), state.Number("event-sequence")
	}
	r.life, r.end = context.WithCancel(c.life)
	c.mu.Lock()
	c.readers[r] = true
	c.mu.Unlock()
	go r.pump()
	return r, nil
}

func (r *reader) Next(ctx context.Context) (*csi.Event, error) {
	if r.life.Err() != nil {
		return nil, csi.Closed()
	}
	select {
	case event, is := <-r.events:
		if !is {
			return nil, r.failed
		}
		return event, nil
	case <-ctx.Done():
		return nil, csi.Ended(ctx.Err())
	case <-r.life.Done():
		return nil, csi.Closed()
	}
}

func (r *reader) Close() error {
	r.end()
	r.client.mu.Lock()
	defer r.client.mu.Unlock()
	delete(r.client.readers, r)
	return nil
}

func (r *reader) wake() {
	select {
	case r.bell <- struct{}{}:
	default:
	}
}

// pump reads for as long as the reader lives, over one link after the other.
func (r *reader) pump() {
	pause := firstPause
	for r.life.Err() == nil {
		link, err := r.client.use(r.life)
		if err == nil {
			var some bool
			some, err = r.read(link)
			if err == nil && !some {
				select {
				case <-r.bell:
				case <-link.conn.Context().Done():
				case <-r.life.Done():
				}
			}
			r.client.done(link, wasLost(err))
		}
		switch {
		case err == nil:
			pause = firstPause
		case wasLost(err):
			sleep(r.life, pause)
			pause = min(2*pause, lastPause)
		default:
			r.failed = err
			close(r.events)
			return
		}
	}
}

// read is one page; whether there was any.
func (r *reader) read(l *link) (bool, error) {
	if l != r.link {
		if _, err := r.meet(l); err != nil {
			return false, err
		}
		r.link = l
	}
	get := request{path: root, iface: manager, member: "GetEvents", short: true}
	get.args = []any{r.sequence, uint32(page)}
	get.names = []string{"events", "gap"}
	body, err := r.client.once(r.life, l, get)
	if err != nil {
		return false, err
	}
	if body.Flag("gap") {
		// It may be another journal, or this one from before what was read.
		if isAnother, err := r.meet(l); err != nil || isAnother {
			return isAnother, err
		}
		r.tell(&csi.Event{Gap: true})
	}
	told := body.tuples("events", "sequence", "realtime-usec", "type", "subject", "details")
	for _, event := range told {
		r.sequence = event.Number("sequence")
		details, _ := event.(values)["details"].(map[string]dbus.Variant)
		r.tell(row.Event(event, of(details)))
	}
	return len(told) > 0, nil
}

// meet looks at which journal csid has. Another one counts its own events, and so does one that has given out less than was read: it is
// read from its beginning, after a gap.
func (r *reader) meet(l *link) (isAnother bool, err error) {
	state, err := r.client.once(r.life, l, getAll(root, manager))
	if err != nil {
		return false, err
	}
	state = properties(state)
	journal := state.Text("journal-id")
	isAnother = r.journal != "" && r.journal != journal || r.sequence > state.Number("event-sequence")
	r.journal = journal
	if isAnother {
		r.sequence = 0
		r.tell(&csi.Event{Gap: true})
	}
	return isAnother, nil
}

func (r *reader) tell(event *csi.Event) {
	event.Cursor = fmt.Sprintf("%s:%d", r.journal, r.sequence)
	select {
	case r.events <- event:
	case <-r.life.Done():
	}
}
