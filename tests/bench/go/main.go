// csid-bench-go SOCKET CALLERS MILLISECONDS: callers that mount and unmount, each a volume of its own in a goroutine of its own.
// Prints p50 and p99 of a mount in microseconds, and cycles a second; a tenth of the time before does not count.
package main

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/csid-project/csid/go/csi"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run() error {
	if len(os.Args) != 4 {
		return fmt.Errorf("%s SOCKET CALLERS MILLISECONDS", os.Args[0])
	}
	callers, err := strconv.Atoi(os.Args[2])
	if err != nil {
		return err
	}
	milliseconds, err := strconv.Atoi(os.Args[3])
	if err != nil {
		return err
	}
	ctx := context.Background()
	client, err := open(ctx, os.Args[1])
	if err != nil {
		return err
	}
	defer client.Close()

	counted := time.Duration(milliseconds) * time.Millisecond
	from := time.Now().Add(counted / 10)
	to := from.Add(counted)
	all := make([][]time.Duration, callers)
	errs := make([]error, callers)
	var group sync.WaitGroup
	for n := range callers {
		group.Go(func() { all[n], errs[n] = cycle(ctx, client, n, from, to) })
	}
	group.Wait()
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	seen := slices.Concat(all...)
	if len(seen) == 0 {
		return fmt.Errorf("no mount in %v", counted)
	}
	slices.Sort(seen)
	micros := func(at int) float64 { return float64(seen[at].Nanoseconds()) / 1e3 }
	fmt.Printf("%.1f %.1f %.1f\n",
		micros(len(seen)/2), micros((len(seen)-1)*99/100), float64(len(seen))/counted.Seconds())
	return nil
}

// How long each mount took whose cycle ended while it counted.
func cycle(ctx context.Context, client csi.Client, n int, from, to time.Time) ([]time.Duration, error) {
	name := fmt.Sprintf("volume-%d", n)
	volume := csi.Volume{Namespace: "bench", ID: name, Plugin: "bench", ExternalID: name}
	var seen []time.Duration
	for {
		begun := time.Now()
		if _, err := client.Mount(ctx, volume, "consumer", csi.MountRequest{Restore: "auto"}); err != nil {
			return nil, err
		}
		took := time.Since(begun)
		if err := client.Unmount(ctx, volume, "consumer", csi.UnmountOptions{}); err != nil {
			return nil, err
		}
		switch now := time.Now(); {
		case !now.Before(to):
			return seen, nil
		case !now.Before(from):
			seen = append(seen, took)
		}
	}
}
