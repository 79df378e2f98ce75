package main

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/csid-project/csid/go/csi"
	"github.com/csid-project/csid/go/csi/csitest"
)

const plugin = "shelf"

// The test's own program is the scheduler, too.
func TestMain(m *testing.M) {
	if os.Getenv("SCHEDULER") != "" {
		os.Args = []string{"scheduler", plugin}
		main()
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// scheduler is one that runs.
type scheduler struct {
	*exec.Cmd
	stdin io.Closer
	lines *bufio.Scanner
}

func start(t *testing.T) *scheduler {
	t.Helper()
	command := exec.Command("/proc/self/exe")
	command.Env = append(os.Environ(), "SCHEDULER=1")
	var complaint bytes.Buffer
	command.Stderr = &complaint
	stdin, err := command.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := command.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		command.Process.Kill()
		command.Wait()
		if t.Failed() {
			t.Log(complaint.String())
		}
	})
	return &scheduler{command, stdin, bufio.NewScanner(stdout)}
}

// says reads so many lines, by what they begin with.
func (s *scheduler) says(t *testing.T, count int) map[string]string {
	t.Helper()
	said := map[string]string{}
	for range count {
		if !s.lines.Scan() {
			t.Fatalf("it ended after %d lines: %v", len(said), s.Wait())
		}
		job, what, _ := strings.Cut(s.lines.Text(), " ")
		said[job] = what
	}
	return said
}

func TestKilledItFindsItsMountsAgain(t *testing.T) {
	world := csitest.Open(t)
	shelf := world.Plugin(plugin, false)
	client, err := open(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	spec := csi.PluginSpec{ID: plugin, Supervision: "external", Socket: shelf.Socket}
	if err := client.RegisterPlugin(t.Context(), spec); err != nil {
		t.Fatal(err)
	}
	staged := func() int { return len(shelf.Calls("NodeStageVolume")) }

	// csid is killed while it places the jobs.
	shelf.Rules(csitest.Always("NodeStageVolume", csitest.Delay(500*time.Millisecond)))
	first := start(t)
	csitest.Eventually(t, "it mounts", func() bool { return staged() > jobs/2 })
	world.Kill()
	world.Start()
	if said := first.says(t, 1)["node"]; said != "node-1 has 0 mounts" {
		t.Fatal(said)
	}
	placed := first.says(t, jobs)
	if len(placed) != jobs {
		t.Fatalf("%d jobs were placed", len(placed))
	}
	for job, source := range placed {
		if stat, err := os.Stat(source); err != nil || !stat.IsDir() {
			t.Fatalf("%s: %s: %v", job, source, err)
		}
	}
	first.Process.Kill()
	first.Wait()

	before := staged()
	second := start(t)
	if said, want := second.says(t, 1)["node"], fmt.Sprintf("node-1 has %d mounts", jobs); said != want {
		t.Fatal(said)
	}
	for job, source := range second.says(t, jobs) {
		if placed[job] != source {
			t.Errorf("%s is at %s, and was at %s", job, source, placed[job])
		}
	}
	if staged() != before {
		t.Error("it was mounted again")
	}
	second.stdin.Close()
	for job, what := range second.says(t, jobs) {
		if what != "stopped" {
			t.Errorf("%s: %s", job, what)
		}
	}
	if err := second.Wait(); err != nil {
		t.Fatal(err)
	}
	world.NothingLeft()
}
