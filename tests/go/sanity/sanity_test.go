// Package sanity runs the csi-sanity suite against csi-local, on real loop devices.
package sanity

import (
	"flag"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kubernetes-csi/csi-test/v5/pkg/sanity"
	"github.com/onsi/ginkgo/v2"
	"github.com/onsi/ginkgo/v2/types"
)

var (
	access = flag.String("access", "mount", "mount or block")
	attach = flag.Bool("attach", false, "serve --attach")
)

// Why a test may be skipped, by the suite's own words. Another skip fails the run, and so does one that is listed here
// and not seen: the list is what it says.
var reasons = map[string]string{
	"GetSnapshot not supported":                        "alpha; ListSnapshots reports the same",
	"SNAPSHOT_ACCESSIBILITY_CONSTRAINTS not supported": "alpha; there is one node",
	"GroupControllerService not supported":             "no snapshots of several volumes at once",
	"Modify volume not supported":                      parameters,
	"Modify Volume not supported":                      parameters,
	"ControllerModifyVolume not supported":             parameters,
	"ControllerGetVolumeHealth not supported":          health,
	"ControllerListVolumeHealth not supported":         health,
	"NodeGetVolumeHealth not supported":                health,
	"NodeGetStorageHealth not supported":               health,
}

// And with -attach, or without.
var attachReasons = map[bool]map[string]string{
	true: {"testnodevolumeattachlimit not enabled": "a node has as many volumes as it likes"},
	false: {
		"ControllerPublishVolume not supported":             controller,
		"ControllerUnpublishVolume not supported":           controller,
		"Controller Publish, UnpublishVolume not supported": controller,
	},
}

const (
	controller = "nothing is attached without --attach"
	parameters = "volumes have no parameters to modify"
	health     = "alpha; the driver does not watch health"
)

func TestSanity(t *testing.T) {
	driver := os.Getenv("CSI_LOCAL")
	if driver == "" || os.Getuid() != 0 {
		t.Fatal("needs root and CSI_LOCAL, the driver's binary; tests/go/sanity/run does that")
	}
	dir := t.TempDir()
	state, socket := filepath.Join(dir, "state"), filepath.Join(dir, "csi.sock")
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		t.Fatal(err)
	}
	maps.Copy(reasons, attachReasons[*attach])
	arguments := []string{"--state-dir", state, "serve", "--node-id", "sanity", "--endpoint", "unix://" + socket}
	if *attach {
		arguments = append(arguments, "--attach")
	}
	serve := exec.Command(driver, arguments...)
	serve.Stderr = log
	if err := serve.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			text, _ := os.ReadFile(log.Name())
			t.Logf("the driver's log:\n%s", text)
		}
	})
	for start := time.Now(); ; time.Sleep(10 * time.Millisecond) {
		if _, err := os.Stat(socket); err == nil {
			break
		}
		if time.Since(start) > 10*time.Second {
			t.Fatal("the driver does not serve")
		}
	}

	config := sanity.NewTestConfig()
	config.Address = "unix://" + socket
	config.TargetPath = filepath.Join(dir, "target")
	config.StagingPath = filepath.Join(dir, "staging")
	config.TestVolumeAccessType = *access
	config.TestVolumeSize = 64 << 20
	config.TestVolumeExpandSize = 128 << 20

	counts, skipped := map[string]int{}, map[string]int{}
	ginkgo.ReportAfterEach(func(r types.SpecReport) {
		counts[r.State.String()]++
		if r.State == types.SpecStateSkipped {
			skipped[r.Failure.Message]++
		}
	})
	sanity.Test(t, config)

	if err := serve.Process.Signal(syscall.SIGTERM); err != nil {
		t.Error(err)
	}
	if err := serve.Wait(); err != nil {
		t.Errorf("the driver's end: %v", err)
	}

	// "pending" is what the suite itself has switched off.
	fmt.Printf("\ncsi-sanity v5.6.0, %s volumes, attach %t: %v\n", *access, *attach, counts)
	for _, message := range slices.Sorted(maps.Keys(skipped)) {
		reason, known := reasons[message]
		if !known {
			t.Errorf("skipped without a reason: %s (%d)", message, skipped[message])
		}
		fmt.Printf("  skipped %d: %s: %s\n", skipped[message], message, reason)
	}
	for message := range reasons {
		if skipped[message] == 0 {
			t.Errorf("listed as skipped and not skipped: %s", message)
		}
	}
	if counts["passed"] < 68 {
		t.Errorf("only %d tests ran", counts["passed"])
	}
	for _, left := range leftovers(t, dir, state) {
		t.Errorf("left behind: %s", left)
	}
}

// leftovers are mounts, loop devices, volumes and snapshots of this run.
func leftovers(t *testing.T, dir, state string) []string {
	var left []string
	table, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(table)) {
		if strings.Contains(line, dir) {
			left = append(left, strings.TrimSpace(line))
		}
	}
	backing, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range backing {
		if name, err := os.ReadFile(file); err == nil && strings.HasPrefix(string(name), dir) {
			left = append(left, file)
		}
	}
	for _, kind := range []string{"volumes", "snapshots"} {
		entries, err := os.ReadDir(filepath.Join(state, kind))
		if err != nil {
			t.Fatal(err)
		}
		for _, entry := range entries {
			left = append(left, filepath.Join(kind, entry.Name()))
		}
	}
	slices.Sort(left)
	return left
}
