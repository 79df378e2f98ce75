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
	// Number of events that wait here for a slow reader. All others wait in csid.
	queued = 256
	page   = 256
)

// reader reads events page by page. csid's signal reports that there may be more.
type reader struct {
	client *Client
	life   context.Context
	end    context.CancelFunc
	bell   chan struct{}
	// Closed when the reader has failed.
	events chan *csi.Event
	failed error

	// Owned by pump: its journal, the last event's number, and the link over which csid named the journal.
	journal  string
	sequence uint64
	link     *link
}

// Events implements [csi.Client].
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

// pump reads as long as the reader lives, over one link after another.
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

// read reads one page. It returns whether the page had an event or a gap.
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
	isGap := body.Flag("gap")
	if isGap || l.onBus {
		// csid may have another journal, or an older copy of this one. Checked after the page, because the link to the bus outlives
		// csid: another csid may have returned the page.
		if isAnother, err := r.meet(l); err != nil || isAnother {
			return isAnother, err
		}
	}
	if isGap {
		r.deliver(&csi.Event{Gap: true})
	}
	events := body.tuples("events", "sequence", "realtime-usec", "type", "subject", "details")
	for _, event := range events {
		r.sequence = event.Number("sequence")
		details, _ := event.(values)["details"].(map[string]dbus.Variant)
		r.deliver(row.Event(event, of(details)))
	}
	return len(events) > 0, nil
}

// meet checks which journal csid has. Another journal counts its own events, and so does a copy with fewer events than were read. Such
// a journal is read from its beginning, after a gap.
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
		r.deliver(&csi.Event{Gap: true})
	}
	return isAnother, nil
}

func (r *reader) deliver(event *csi.Event) {
	event.Cursor = fmt.Sprintf("%s:%d", r.journal, r.sequence)
	select {
	case r.events <- event:
	case <-r.life.Done():
	}
}
