// Package csitest holds what every csi.Client has to do, against a real csid with plugins that follow a script.
package csitest

import (
	"bufio"
	"encoding/json"
	"fmt"
	"math"
	"net"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/csid-project/csid/go/csi"
)

// World is a csid with its own root, plugins and journal, made by tests/src/bin/csid-world.rs. This process runs in it.
type World struct {
	t     testing.TB
	mu    sync.Mutex
	conn  net.Conn
	lines *bufio.Reader
}

// Open returns the world. Outside of one it skips the test.
func Open(t testing.TB) *World {
	t.Helper()
	path := os.Getenv("CSID_WORLD")
	if path == "" {
		t.Skip("there is no csid here: tests/go/csi/run, or go test -exec …/csid-world")
	}
	conn, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return &World{t: t, conn: conn, lines: bufio.NewReader(conn)}
}

type wish map[string]any

// ask wants something of the world, and puts what it answers into answer.
func (w *World) ask(what wish, answer any) {
	w.t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	line, err := json.Marshal(what)
	if err != nil {
		w.t.Fatal(err)
	}
	if _, err := fmt.Fprintf(w.conn, "%s\n", line); err != nil {
		w.t.Fatalf("the world is gone: %v", err)
	}
	said, err := w.lines.ReadBytes('\n')
	if err != nil {
		w.t.Fatalf("the world is gone, asked for %s: %v", line, err)
	}
	if answer != nil {
		if err := json.Unmarshal(said, answer); err != nil {
			w.t.Fatalf("%s: %v", said, err)
		}
	}
}

// Kill ends csid as kill -9 does.
func (w *World) Kill() { w.t.Helper(); w.ask(wish{"do": "kill"}, nil) }

// Start starts csid.
func (w *World) Start() { w.t.Helper(); w.ask(wish{"do": "start"}, nil) }

// Pause stops csid's process.
func (w *World) Pause() { w.t.Helper(); w.ask(wish{"do": "pause"}, nil) }

// Resume continues csid's process.
func (w *World) Resume() { w.t.Helper(); w.ask(wish{"do": "resume"}, nil) }

// NewJournal kills csid, and starts it as if there had been no journal.
func (w *World) NewJournal() { w.t.Helper(); w.ask(wish{"do": "new-journal"}, nil) }

// Plugin is a plugin that runs. It is not registered with csid.
type Plugin struct {
	world *World
	// ID is the plugin's ID, Socket is where it listens.
	ID     string
	Socket string
}

// Plugin starts a plugin. Its controller, if there is one, has every capability.
func (w *World) Plugin(id string, controller bool) *Plugin {
	w.t.Helper()
	p := &Plugin{world: w, ID: id}
	w.ask(wish{"do": "plugin", "id": id, "controller": controller}, &p.Socket)
	return p
}

// Rule is what a plugin does when it is asked something.
type Rule struct {
	// RPC and Volume (nil: any) say which calls the rule is for: from the From-th on, Times of them. Act is one of
	// tests/src/script.rs.
	RPC    string  `json:"rpc"`
	Volume *string `json:"volume"`
	From   uint64  `json:"from"`
	Times  uint64  `json:"times"`
	Act    any     `json:"act"`
}

// Always returns a rule for every call of an RPC.
func Always(rpc string, act any) Rule {
	return Rule{RPC: rpc, From: 1, Times: math.MaxUint64, Act: act}
}

// Delay returns the act of waiting before a normal answer. A caller that goes away ends the wait.
func Delay(d time.Duration) any { return map[string]any{"Delay": d.Milliseconds()} }

// Hold returns the act of waiting until the plugin has other rules, before a normal answer.
func Hold() any { return "Hold" }

// Say returns the act of failing with a gRPC code and a message.
func Say(code int, words string) any { return map[string]any{"Say": []any{code, words}} }

// Rules sets the plugin's rules. Without any it behaves normally.
func (p *Plugin) Rules(rules ...Rule) {
	p.world.t.Helper()
	p.world.ask(wish{"do": "rules", "id": p.ID, "rules": append([]Rule{}, rules...)}, nil)
}

// Renames restarts the plugin with another name of the node.
func (p *Plugin) Renames(node string) {
	p.world.t.Helper()
	p.world.ask(wish{"do": "rename", "id": p.ID, "node": node}, nil)
}

// ReadyAt makes a snapshot ready at the asked-th call for it.
func (p *Plugin) ReadyAt(asked uint64) {
	p.world.t.Helper()
	p.world.ask(wish{"do": "ready-at", "id": p.ID, "asked": asked}, nil)
}

// Device gives the volume a block device.
func (p *Plugin) Device(volume string) {
	p.world.t.Helper()
	p.world.ask(wish{"do": "device", "id": p.ID, "volume": volume}, nil)
}

// Foreign stages and publishes the volume as another manager would, for several writers.
func (p *Plugin) Foreign(volume string) csi.AdoptedAt {
	p.world.t.Helper()
	var at csi.AdoptedAt
	p.world.ask(wish{"do": "foreign", "id": p.ID, "volume": volume}, &at)
	return at
}

// Call is a call that a plugin received.
type Call struct {
	// RPC, Volume and Secrets are the call's name and what it had.
	RPC     string      `json:"rpc"`
	Volume  string      `json:"volume"`
	Secrets [][2]string `json:"secrets"`
}

// Calls returns the calls of an RPC about volumes that the plugin received.
func (p *Plugin) Calls(rpc string) []Call {
	p.world.t.Helper()
	var all []struct {
		Call Call `json:"call"`
	}
	p.world.ask(wish{"do": "calls", "id": p.ID}, &all)
	var calls []Call
	for _, one := range all {
		if one.Call.RPC == rpc {
			calls = append(calls, one.Call)
		}
	}
	return calls
}

// Grep returns the names of csid's files, its log included, that contain the text.
func (w *World) Grep(text string) string {
	w.t.Helper()
	var found string
	w.ask(wish{"do": "grep", "text": text}, &found)
	return found
}

// Waits returns once an operation on the volume waits in csid.
func (w *World) Waits(volume string) {
	w.t.Helper()
	w.ask(wish{"do": "waits", "volume": volume}, nil)
}

// Declare has a file of volumes.d declare a volume whose plugin is never there, and csid read it.
func (w *World) Declare(volume string) {
	w.t.Helper()
	w.ask(wish{"do": "declare", "volume": volume}, nil)
}

// Undeclare removes the file, and has csid read that.
func (w *World) Undeclare(volume string) {
	w.t.Helper()
	w.ask(wish{"do": "undeclare", "volume": volume}, nil)
}

// NothingLeft fails the test if something of a volume is left, or a plugin saw a violation of CSI.
func (w *World) NothingLeft() {
	w.t.Helper()
	w.ask(wish{"do": "nothing-left"}, nil)
}

// Eventually waits until holds returns true, for a minute at most.
func Eventually(t testing.TB, what string, holds func() bool) {
	t.Helper()
	end := time.Now().Add(time.Minute)
	for !holds() {
		if time.Now().After(end) {
			t.Fatalf("in a minute it did not come to this: %s", what)
		}
		time.Sleep(20 * time.Millisecond)
	}
}
