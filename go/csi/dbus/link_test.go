package dbus

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"github.com/csid-project/csid/go/csi"
	"github.com/csid-project/csid/go/csi/csitest"
)

// held returns the number of goroutines and of descriptors of this process.
func held(t *testing.T) (goroutines, descriptors int) {
	t.Helper()
	files, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return runtime.NumGoroutine(), len(files)
}

func TestOpenKeepsNothingOfACsidThatHangs(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "csid.sock")
	// The kernel completes a connection that nobody accepts.
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	t.Setenv("DBUS_SYSTEM_BUS_ADDRESS", "unix:path="+socket)
	goroutines, descriptors := held(t)
	for range 10 {
		for _, address := range []string{socket, systemBus} {
			ctx, end := context.WithTimeout(t.Context(), 20*time.Millisecond)
			_, err := Open(ctx, address)
			end()
			if !errors.Is(err, csi.ErrTimedOut) {
				t.Fatal(err)
			}
		}
	}
	csitest.Eventually(t, "the connections are closed", func() bool {
		goroutinesNow, descriptorsNow := held(t)
		return goroutinesNow <= goroutines && descriptorsNow <= descriptors
	})
}
