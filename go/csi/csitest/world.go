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
)

// World is the world of tests/src/bin/csid-world.rs, in which this process runs.
type World struct {
	t     testing.TB
	mu    sync.Mutex
	conn  net.Conn
	lines *bufio.Reader
}

// Open finds the world; outside of one the test is skipped.
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

// Kill ends csid as kill -9 does, Start begins another; Pause and Resume stop one and let it go on.
func (w *World) Kill()   { w.t.Helper(); w.ask(wish{"do": "kill"}, nil) }
func (w *World) Start()  { w.t.Helper(); w.ask(wish{"do": "start"}, nil) }
func (w *World) Pause()  { w.t.Helper(); w.ask(wish{"do": "pause"}, nil) }
func (w *World) Resume() { w.t.Helper(); w.ask(wish{"do": "resume"}, nil) }

// Plugin is a plugin that runs and that csid is not told of.
type Plugin struct {
	world  *World
	ID     string
	Socket string
}

// Plugin starts one; its controller can do all.
func (w *World) Plugin(id string, controller bool) *Plugin {
	w.t.Helper()
	p := &Plugin{world: w, ID: id}
	w.ask(wish{"do": "plugin", "id": id, "controller": controller}, &p.Socket)
	return p
}

// Rule is what a plugin does when it is asked this: Act is one of tests/src/script.rs.
type Rule struct {
	RPC    string  `json:"rpc"`
	Volume *string `json:"volume"`
	From   uint64  `json:"from"`
	Times  uint64  `json:"times"`
	Act    any     `json:"act"`
}

// Always does it each time.
func Always(rpc string, act any) Rule {
	return Rule{RPC: rpc, From: 1, Times: math.MaxUint64, Act: act}
}

// Delay waits, then does as it should; a caller that goes away ends the wait.
func Delay(d time.Duration) any { return map[string]any{"Delay": d.Milliseconds()} }

// Say fails with this gRPC code and these words.
func Say(code int, words string) any { return map[string]any{"Say": []any{code, words}} }

// Rules are what it does from now on; none is as it should.
func (p *Plugin) Rules(rules ...Rule) {
	p.world.t.Helper()
	p.world.ask(wish{"do": "rules", "id": p.ID, "rules": append([]Rule{}, rules...)}, nil)
}

// Renames has it call the node otherwise, from its next start on, which is now.
func (p *Plugin) Renames(node string) {
	p.world.t.Helper()
	p.world.ask(wish{"do": "rename", "id": p.ID, "node": node}, nil)
}

// Device puts a block device behind the volume.
func (p *Plugin) Device(volume string) {
	p.world.t.Helper()
	p.world.ask(wish{"do": "device", "id": p.ID, "volume": volume}, nil)
}

// Call is a call that a plugin had.
type Call struct {
	RPC     string      `json:"rpc"`
	Volume  string      `json:"volume"`
	Secrets [][2]string `json:"secrets"`
}

// Calls are those about volumes that it had, of this RPC.
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

// Grep names the files of csid's, its log among them, in which the text is.
func (w *World) Grep(text string) string {
	w.t.Helper()
	var found string
	w.ask(wish{"do": "grep", "text": text}, &found)
	return found
}

// NothingLeft fails unless nothing of any volume is left, and no plugin saw a rule of CSI's broken.
func (w *World) NothingLeft() {
	w.t.Helper()
	w.ask(wish{"do": "nothing-left"}, nil)
}

// Eventually waits until it holds.
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
