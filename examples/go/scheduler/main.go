// A scheduler's volume manager: fifty jobs with a volume each are placed at once, run until standard input ends, and are stopped
// at once. csid may be restarted meanwhile, and so may this program.
//
//	for n in $(seq 0 49); do csi-local create job-$n --size 16M; done   # the volumes, for PLUGIN local
//	go build && ./scheduler PLUGIN                  # over libcsi, with libcsi-dev installed
//	CGO_ENABLED=0 go build && ./scheduler PLUGIN    # in pure Go
//
// It keeps no state of its own. Started again after a kill it finds its mounts, because csid keeps them.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/csid-project/csid/go/csi"
)

const (
	// Volumes of different namespaces may share a name: a scheduler uses its tenants' namespaces, or its own.
	namespace = "scheduler"
	jobs      = 50
)

// Every mount of an allocation has a usage. Another usage would be another mount, by its ToFS.
var usage = &csi.UsageOptions{AccessMode: csi.SingleNodeWriter, AttachmentMode: csi.FileSystem}

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "scheduler PLUGIN")
		os.Exit(2)
	}
	// A cancelled call ends in csid too: an interrupted start leaves nothing half mounted.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(ctx context.Context, plugin string) error {
	// $CSID_SOCKET, else csid's socket, else the system bus. It fails only where csid is not there now; a csid that goes away
	// later is waited for, by every call for as long as its context lets it.
	client, err := open(ctx)
	if err != nil {
		return err
	}
	// This replaces the scheduler's own volume manager. Shutdown unmounts nothing.
	manager := csi.NewManager(client)
	defer manager.Shutdown()

	// The plugin may start after us. The deadline goes to csid, whose answer then names the step that it waited for.
	minute, enough := context.WithTimeout(ctx, time.Minute)
	defer enough()
	if err := manager.WaitForPlugin(minute, "csi-node", plugin); err != nil {
		return err
	}
	mounter, err := manager.MounterForPlugin(minute, plugin)
	if err != nil {
		return err
	}

	// Mounts of an earlier process are still there. A real scheduler would unmount here those that no job needs.
	mounts, err := client.ListMounts(ctx, csi.MountFilter{Namespace: namespace, Plugin: plugin})
	if err != nil {
		return err
	}
	fmt.Printf("node %s has %d mounts\n", mounter.ExternalID(), len(mounts))

	// Events report every change. A stored cursor lets the next process continue from here.
	events, err := client.Events(ctx, csi.FromNow)
	if err != nil {
		return err
	}
	defer events.Close()
	go watch(ctx, events)

	// All at once: a call that waits holds a goroutine, and no thread. Mounting again finds the existing mount.
	if err := each(func(job string) error {
		volume := &csi.Volume{Namespace: namespace, ID: job, Plugin: plugin, ExternalID: job}
		info, err := mounter.MountVolume(ctx, volume, job, usage, nil)
		if err != nil {
			return explained(job, err)
		}
		fmt.Println(job, info.Source)
		return nil
	}); err != nil {
		return err
	}

	// The jobs run.
	ended := make(chan struct{})
	go func() {
		io.Copy(io.Discard, os.Stdin)
		close(ended)
	}()
	select {
	case <-ended:
	case <-ctx.Done():
		// Jobs outlive a scheduler that is stopped: their volumes stay mounted.
		return nil
	}

	// The names are enough. It returns when the mount is gone; a missing mount is no error.
	return each(func(job string) error {
		if err := mounter.UnmountVolume(ctx, namespace, job, job, job, usage); err != nil {
			return explained(job, err)
		}
		fmt.Println(job, "stopped")
		return nil
	})
}

// each calls do for all jobs at once, and returns all errors.
func each(do func(job string) error) error {
	failed := make([]error, jobs)
	var all sync.WaitGroup
	for n := range jobs {
		all.Go(func() { failed[n] = do(fmt.Sprintf("job-%d", n)) })
	}
	all.Wait()
	return errors.Join(failed...)
}

// explained shows how a scheduler would handle an error.
func explained(job string, err error) error {
	var said *csi.Error
	switch {
	case errors.Is(err, csi.ErrClaimConflict), errors.Is(err, csi.ErrBusy):
		// Other consumers have the volume: place the job on their node, or wait for their end.
		errors.As(err, &said)
		return fmt.Errorf("%s: in the way is %v: %w", job, said.Holders, err)
	case errors.Is(err, csi.ErrPlugin):
		// The storage refused, with a message of its own.
		errors.As(err, &said)
		return fmt.Errorf("%s: %s of the plugin: %s: %w", job, said.RPC, said.PluginMessage, err)
	case errors.As(err, &said) && said.Retryable:
		return fmt.Errorf("%s: worth another try: %w", job, err)
	}
	return fmt.Errorf("%s: %w", job, err)
}

// watch prints failing plugins and dead mounts.
func watch(ctx context.Context, events csi.Events) {
	for {
		event, err := events.Next(ctx)
		switch {
		case err != nil:
			return
		case event.Gap:
			// csid no longer has some of them: read all lists again.
			fmt.Fprintln(os.Stderr, "events are lost")
		default:
			fmt.Fprintln(os.Stderr, event.Type, event.Subject, event.Consumer)
		}
	}
}
