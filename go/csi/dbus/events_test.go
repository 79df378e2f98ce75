package dbus

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/godbus/dbus/v5"

	"github.com/csid-project/csid/go/csi"
)

const busConfig = `<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN"
 "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig><listen>unix:path=%s</listen><policy context="default">
<allow send_destination="*" eavesdrop="false"/><allow own="*"/><allow receive_sender="*"/></policy></busconfig>`

// startBus starts a system bus for this test alone.
func startBus(t *testing.T) {
	directory := t.TempDir()
	socket, config := filepath.Join(directory, "bus"), filepath.Join(directory, "bus.conf")
	if err := os.WriteFile(config, fmt.Appendf(nil, busConfig, socket), 0o600); err != nil {
		t.Fatal(err)
	}
	daemon := exec.Command("dbus-daemon", "--nofork", "--config-file="+config)
	if err := daemon.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		daemon.Process.Kill()
		daemon.Wait()
	})
	t.Setenv("DBUS_SYSTEM_BUS_ADDRESS", "unix:path="+socket)
}

// stored is an event as GetEvents returns it.
type stored struct {
	Sequence, Realtime uint64
	Type, Subject      string
	Details            map[string]dbus.Variant
}

// stub is a csid on the bus that has nothing but a journal.
type stub struct {
	conn    *dbus.Conn
	journal string
	last    uint64
	// Of the last GetEvents, the number of the event that it began with.
	first atomic.Uint64
}

// startStub starts a csid whose journal has the events 1 to last.
func startStub(t *testing.T, journal string, last uint64) *stub {
	conn, err := dbus.ConnectSystemBus()
	for end := time.Now().Add(time.Minute); err != nil && time.Now().Before(end); conn, err = dbus.ConnectSystemBus() {
		time.Sleep(10 * time.Millisecond)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	s := &stub{conn: conn, journal: journal, last: last}
	for _, iface := range []string{manager, "org.freedesktop.DBus.Properties"} {
		if err := conn.Export(s, root, iface); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := conn.RequestName(name, dbus.NameFlagDoNotQueue); err != nil {
		t.Fatal(err)
	}
	return s
}

// stop ends this csid when a client has read all of its events and waits for more.
func (s *stub) stop(t *testing.T, client *Client) {
	t.Helper()
	for end := time.Now().Add(time.Minute); s.first.Load() != s.last+1; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the events are not read")
		}
	}
	// The answer of GetEvents has come before these.
	for range 10 {
		if _, err := client.properties(t.Context(), root, manager); err != nil {
			t.Fatal(err)
		}
	}
	s.conn.Close()
}

// GetAll returns the properties of csid.
func (s *stub) GetAll(string) (map[string]dbus.Variant, *dbus.Error) {
	sequence := dbus.MakeVariant(s.last)
	return map[string]dbus.Variant{"JournalId": dbus.MakeVariant(s.journal), "EventSequence": sequence}, nil
}

// GetEvents returns the events after since.
func (s *stub) GetEvents(since uint64, _ uint32) ([]stored, bool, *dbus.Error) {
	s.first.Store(since + 1)
	events := []stored{}
	for sequence := since + 1; sequence <= s.last; sequence++ {
		events = append(events, stored{Sequence: sequence, Type: "mount", Details: map[string]dbus.Variant{}})
	}
	return events, since > s.last, nil
}

func TestANewJournalOnTheBusIsAGap(t *testing.T) {
	startBus(t)
	csid := startStub(t, "first", 2)
	ctx, end := context.WithTimeout(t.Context(), time.Minute)
	defer end()
	client, err := Open(ctx, "system-bus")
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	reader, err := client.Events(ctx, csi.FromFirst)
	if err != nil {
		t.Fatal(err)
	}
	defer reader.Close()
	expect := func(isGap bool, cursor string) {
		t.Helper()
		event, err := reader.Next(ctx)
		if err != nil || event.Gap != isGap || event.Cursor != cursor {
			t.Fatalf("%+v, %v: not the event at %s", event, err, cursor)
		}
	}
	expect(false, "first:1")
	expect(false, "first:2")
	// The connection to the bus outlives csid. The new journal has more events than were read, and as many.
	for _, journal := range []string{"more", "same"} {
		csid.stop(t, client)
		csid = startStub(t, journal, csid.last+map[string]uint64{"more": 2}[journal])
		if err := csid.conn.Emit(root, manager+".Event"); err != nil {
			t.Fatal(err)
		}
		expect(true, journal+":0")
		for sequence := range csid.last {
			expect(false, fmt.Sprintf("%s:%d", journal, sequence+1))
		}
	}
}

// No event of the new csid comes by signal: csid was not on the bus yet.
func TestEventsOfACsidThatStartsOnTheBusAreRead(t *testing.T) {
	startBus(t)
	csid := startStub(t, "first", 2)
	ctx, end := context.WithTimeout(t.Context(), 10*time.Second)
	defer end()
	client, err := Open(ctx, "system-bus")
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	reader, err := client.Events(ctx, csi.FromNow)
	if err != nil {
		t.Fatal(err)
	}
	defer reader.Close()
	csid.stop(t, client)
	startStub(t, "first", 3)
	if event, err := reader.Next(ctx); err != nil || event.Cursor != "first:3" {
		t.Fatalf("%+v, %v", event, err)
	}
}
