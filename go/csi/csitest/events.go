package csitest

import (
	"context"
	"strings"
	"time"

	"github.com/csid-project/csid/go/csi"
)

// next is the next event of this type.
func (f *fixture) next(reader csi.Events, kind string) *csi.Event {
	f.Helper()
	ctx, end := context.WithTimeout(f.Context(), time.Minute)
	defer end()
	for {
		event, err := reader.Next(ctx)
		f.ok(err)
		f.that(event != nil, "no event and no error")
		if event.Type == kind || kind == "gap" && event.Gap {
			return event
		}
	}
}

func events(f *fixture) {
	ctx := f.Context()
	reader, err := f.client.Events(ctx, csi.FromNow)
	f.ok(err)
	f.mounted("v")
	mounted := f.next(reader, "mount")
	f.that(mounted.Success && mounted.Subject == namespace+"/v" && mounted.Consumer == "job" && mounted.Sequence > 0, "%+v", mounted)
	f.that(time.Since(time.UnixMicro(int64(mounted.Realtime))) < time.Minute, "%+v", mounted)

	// A wait that is given up loses nothing.
	soon, end := context.WithTimeout(ctx, 50*time.Millisecond)
	defer end()
	for err == nil {
		_, err = reader.Next(soon)
	}
	f.is(err, csi.ErrTimedOut, context.DeadlineExceeded)

	f.world.Kill()
	f.world.Start()
	f.unmounted("v")
	unmounted := f.next(reader, "unmount")
	f.that(unmounted.Subject == namespace+"/v" && unmounted.Sequence > mounted.Sequence, "%+v", unmounted)
	f.ok(reader.Close())
	_, err = reader.Next(ctx)
	f.is(err, csi.ErrDisconnected)

	// Another process goes on where this one was.
	later, err := f.another().Events(ctx, mounted.Cursor)
	f.ok(err)
	again := f.next(later, "unmount")
	f.that(*again == *unmounted, "%+v is not %+v", again, unmounted)
	f.ok(later.Close())

	all, err := f.client.Events(ctx, csi.FromFirst)
	f.ok(err)
	last := uint64(0)
	for last < unmounted.Sequence {
		event, err := all.Next(ctx)
		f.ok(err)
		f.that(!event.Gap && event.Sequence > last, "%+v after %d", event, last)
		last = event.Sequence
	}
	f.ok(all.Close())

	void, err := f.client.Events(ctx, "another-journal:5")
	f.ok(err)
	f.next(void, "gap")
	f.next(void, "unmount")
	f.ok(void.Close())
	beyond, err := f.client.Events(ctx, mounted.Cursor+"0000000")
	f.ok(err)
	f.next(beyond, "gap")
	f.next(beyond, "unmount")
	f.ok(beyond.Close())
	_, err = f.client.Events(ctx, "no cursor")
	f.is(err, csi.ErrInvalidArgument)
}

// journal begins a new journal. Over the bus the connection stays.
func journal(f *fixture) {
	ctx := f.Context()
	reader, err := f.client.Events(ctx, csi.FromNow)
	f.ok(err)
	for range 5 {
		f.mounted("v")
		f.unmounted("v")
		f.next(reader, "unmount")
	}
	// All is read, and the reader waits for a signal.
	for err == nil {
		soon, end := context.WithTimeout(ctx, 500*time.Millisecond)
		_, err = reader.Next(soon)
		end()
	}
	f.is(err, csi.ErrTimedOut)
	f.world.NewJournal()
	gap := f.next(reader, "gap")
	f.register()
	f.mounted("v")
	mounted := f.next(reader, "mount")
	id, _ := strings.CutSuffix(gap.Cursor, ":0")
	f.that(id != gap.Cursor && strings.HasPrefix(mounted.Cursor, id+":"), "%+v after %+v", mounted, gap)
	f.unmounted("v")
	f.ok(reader.Close())
}
