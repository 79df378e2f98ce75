package csitest

import (
	"context"
	"errors"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/csid-project/csid/go/csi"
)

// A busy machine's noise; what waits for the wrong thing waits longer by far.
const noise = 30 * time.Second

const namespace = "default"

// fixture is one test's: a plugin of its own, known to csid, and a client.
type fixture struct {
	*testing.T
	world  *World
	plugin *Plugin
	client csi.Client
	// All of them.
	clients []csi.Client
	way     Way
}

// resources are what a process has of them.
type resources struct{ goroutines, descriptors int }

func held(t *testing.T) resources {
	t.Helper()
	descriptors, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return resources{runtime.NumGoroutine(), len(descriptors)}
}

// Way is a way to connect to csid.
type Way struct {
	// Open opens a client.
	Open func(context.Context) (csi.Client, error)
	// OnBus says that the clients use the system bus, which is there without csid too.
	OnBus bool
}

// Run tests the clients of a way.
func Run(t *testing.T, way Way) {
	world := Open(t)
	// Go itself has a thread for each processor.
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(min(4, runtime.NumCPU())))
	// What a library keeps for as long as the process, it has from its first client on.
	first, err := way.Open(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	first.Close()
	for _, test := range []struct {
		name       string
		controller bool
		run        func(*fixture)
	}{
		{"mount", false, mount},
		{"device", false, device},
		{"manager", false, theManager},
		{"arguments", false, arguments},
		{"errors", false, pluginErrors},
		{"secrets", false, secrets},
		{"wait", false, wait},
		{"cancel", false, cancel},
		{"deadline", false, deadline},
		{"hanging", false, hanging},
		{"close", false, closing},
		{"restart", false, restart},
		{"away", false, away},
		{"many", false, many},
		{"events", false, events},
		{"journal", false, journal},
		{"claims", true, claims},
		{"controller", true, controller},
		{"forgotten", true, forgotten},
		{"declared", false, declared},
		{"specs", false, specs},
		{"node", true, node},
		{"adopting", false, adopting},
	} {
		well := t.Run(test.name, func(t *testing.T) {
			world.t = t
			before := held(t)
			f := &fixture{T: t, world: world, way: way}
			f.client = f.another()
			f.plugin = world.Plugin(strings.ReplaceAll(t.Name(), "/", "."), test.controller)
			f.register()
			test.run(f)
			if t.Failed() {
				return
			}
			world.NothingLeft()
			for _, client := range f.clients {
				f.ok(client.Close())
			}
			Eventually(t, "what the clients had is given back", func() bool {
				now := held(t)
				return now.goroutines <= before.goroutines && now.descriptors <= before.descriptors
			})
		})
		world.t = t
		if !well {
			t.Fatal("what it left would be in the way of the others")
		}
	}
}

// register makes the plugin known to csid, and waits until csid has reached it.
func (f *fixture) register() {
	f.Helper()
	spec := csi.PluginSpec{ID: f.plugin.ID, Supervision: "external", Socket: f.plugin.Socket}
	f.ok(f.client.RegisterPlugin(f.Context(), spec))
	_, err := f.client.WaitForPlugin(f.Context(), f.plugin.ID, csi.Node)
	f.ok(err)
}

func (f *fixture) ok(err error) {
	f.Helper()
	if err != nil {
		f.Fatalf("%+v", err)
	}
}

func (f *fixture) is(err error, all ...error) {
	f.Helper()
	for _, code := range all {
		if !errors.Is(err, code) {
			f.Fatalf("%v is not %v", err, code)
		}
	}
	var said *csi.Error
	if !errors.As(err, &said) {
		f.Fatalf("%T is no *csi.Error", err)
	}
}

func (f *fixture) that(holds bool, format string, args ...any) {
	f.Helper()
	if !holds {
		f.Fatalf(format, args...)
	}
}

// another is a client of its own, as another process would have one.
func (f *fixture) another() csi.Client {
	f.Helper()
	client, err := f.way.Open(f.Context())
	f.ok(err)
	f.clients = append(f.clients, client)
	return client
}

// volume is one of the test's plugin, given inline.
func (f *fixture) volume(id string) csi.Volume {
	return csi.Volume{Namespace: namespace, ID: id, Plugin: f.plugin.ID, ExternalID: id}
}

func (f *fixture) mounted(id string) *csi.MountInfo {
	f.Helper()
	info, err := f.client.Mount(f.Context(), f.volume(id), "job", csi.MountRequest{})
	f.ok(err)
	return info
}

func (f *fixture) unmounted(id string) {
	f.Helper()
	f.ok(f.client.Unmount(f.Context(), csi.Volume{Namespace: namespace, ID: id}, "job", csi.UnmountOptions{}))
}

// rows are those of the plugin's mounts.
func (f *fixture) rows() []csi.MountRow {
	f.Helper()
	rows, err := f.client.ListMounts(f.Context(), csi.MountFilter{Plugin: f.plugin.ID})
	f.ok(err)
	return rows
}

// begun waits until the plugin has had so many calls of this.
func (f *fixture) begun(rpc string, calls int) {
	f.Helper()
	Eventually(f, rpc, func() bool { return len(f.plugin.Calls(rpc)) >= calls })
}
