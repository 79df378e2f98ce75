package csitest

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/csid-project/csid/go/csi"
)

// A call without a deadline waits for as long as it takes.
func wait(f *fixture) {
	ctx := context.Background()
	id := f.plugin.ID + ".late"
	late := f.world.Plugin(id, false)
	came := make(chan error, 1)
	go func() {
		_, err := f.client.WaitForPlugin(ctx, id, csi.Node)
		came <- err
	}()
	// csid does not list this call. A later one with a deadline has its answer first.
	soon, end := context.WithTimeout(ctx, 200*time.Millisecond)
	defer end()
	_, err := f.client.WaitForPlugin(soon, id, csi.Node)
	f.is(err, csi.ErrTimedOut, context.DeadlineExceeded)
	select {
	case err := <-came:
		f.Fatalf("it did not wait: %v", err)
	default:
	}
	f.ok(f.client.RegisterPlugin(ctx, csi.PluginSpec{ID: id, Supervision: "external", Socket: late.Socket}))
	f.ok(<-came)
	soon, end = context.WithTimeout(ctx, 200*time.Millisecond)
	defer end()
	_, err = f.client.WaitForPlugin(soon, id, csi.Controller)
	f.is(err, csi.ErrTimedOut, context.DeadlineExceeded)

	plugins, err := f.client.ListPlugins(ctx)
	f.ok(err)
	found := false
	for _, plugin := range plugins {
		found = found || plugin == csi.PluginRow{ID: id, State: "ready", Provider: "test.csid", Supervision: "external"}
	}
	f.that(found, "%+v", plugins)
	info, err := f.client.Plugin(ctx, id)
	f.ok(err)
	f.that(info.Stages() && !info.Attaches() && info.Healthy && info.NodeID == "node-1", "%+v", info)

	late.Rules(Always("NodeStageVolume", Delay(1500*time.Millisecond)))
	volume := f.volume("v")
	volume.Plugin = id
	_, err = f.client.Mount(ctx, volume, "job", csi.MountRequest{})
	f.ok(err)
	f.is(f.client.UnregisterPlugin(ctx, id, csi.UnregisterOptions{}), csi.ErrBusy)
	f.unmounted("v")
	f.ok(f.client.UnregisterPlugin(ctx, id, csi.UnregisterOptions{}))
	f.ok(f.client.UnregisterPlugin(ctx, id, csi.UnregisterOptions{}))
	_, err = f.client.Plugin(ctx, id)
	f.is(err, csi.ErrNotFound)
}

func (f *fixture) slow() { f.plugin.Rules(Always("NodeStageVolume", Delay(time.Minute))) }

// The context ends the call here at once, and in csid.
func cancel(f *fixture) {
	f.slow()
	ctx, end := context.WithCancel(f.Context())
	ended := make(chan error, 1)
	go func() {
		_, err := f.client.Mount(ctx, f.volume("v"), "job", csi.MountRequest{})
		ended <- err
	}()
	f.begun("NodeStageVolume", 1)
	begin := time.Now()
	end()
	f.is(<-ended, csi.ErrCancelled, context.Canceled)
	f.that(time.Since(begin) < noise, "it took %v", time.Since(begin))
	f.plugin.Rules()
	Eventually(f, "csid has undone it", func() bool { return f.rows() == nil })

	// Another call may end it, too: that is no cancellation of the context's.
	f.slow()
	go func() {
		_, err := f.client.Mount(f.Context(), f.volume("u"), "job", csi.MountRequest{})
		ended <- err
	}()
	f.begun("NodeStageVolume", 2)
	f.unmounted("u")
	err := <-ended
	f.is(err, csi.ErrCancelled)
	f.that(!errors.Is(err, context.Canceled), "%+v", err)

	// So does one that goes with its client.
	f.slow()
	leaving := f.another()
	ctx, end = context.WithCancel(f.Context())
	go func() {
		_, err := leaving.Mount(ctx, f.volume("w"), "job", csi.MountRequest{})
		ended <- err
	}()
	f.begun("NodeStageVolume", 3)
	end()
	f.is(<-ended, csi.ErrCancelled, context.Canceled)
	f.ok(leaving.Close())
	f.plugin.Rules()
	Eventually(f, "csid has undone it", func() bool { return f.rows() == nil })
}

func deadline(f *fixture) {
	f.slow()
	const limit = 300 * time.Millisecond
	begin := time.Now()
	ctx, end := context.WithTimeout(f.Context(), limit)
	defer end()
	_, err := f.client.Mount(ctx, f.volume("v"), "job", csi.MountRequest{})
	f.is(err, csi.ErrTimedOut, context.DeadlineExceeded)
	f.that(time.Since(begin) >= limit && time.Since(begin) < limit+noise, "it took %v", time.Since(begin))
	f.plugin.Rules()
	Eventually(f, "csid has undone it", func() bool { return f.rows() == nil })
}

// A csid that does not answer holds up nobody beyond the deadline, nor who no longer waits.
func hanging(f *fixture) {
	f.world.Pause()
	const limit = 300 * time.Millisecond
	ctx, end := context.WithTimeout(f.Context(), limit)
	defer end()
	begin := time.Now()
	_, err := f.client.Mount(ctx, f.volume("v"), "job", csi.MountRequest{})
	took := time.Since(begin)
	cancelled, end := context.WithCancel(f.Context())
	ended := make(chan error, 1)
	go func() {
		_, err := f.client.Mount(cancelled, f.volume("w"), "job", csi.MountRequest{})
		ended <- err
	}()
	end()
	err2 := <-ended
	// The bus answers without csid, however slow the machine is.
	until := limit
	if f.way.OnBus {
		until = noise
	}
	soon, end := context.WithTimeout(f.Context(), until)
	defer end()
	begin = time.Now()
	another, err3 := f.way.Open(soon)
	opening := time.Since(begin)
	f.world.Resume()
	f.is(err, csi.ErrTimedOut, context.DeadlineExceeded)
	f.that(took < limit+noise, "it took %v", took)
	f.is(err2, csi.ErrCancelled, context.Canceled)
	f.that(opening < limit+noise, "it took %v to find no csid", opening)
	if f.way.OnBus {
		f.ok(err3)
		f.ok(another.Close())
	} else {
		f.is(err3, csi.ErrTimedOut, context.DeadlineExceeded)
	}
	// What csid had on its socket it may have done by then.
	Eventually(f, "nothing comes any more", func() bool {
		f.unmounted("v")
		f.unmounted("w")
		return f.rows() == nil
	})
}

// A closed client's calls end; in csid they go on.
func closing(f *fixture) {
	f.plugin.Rules(Always("NodeStageVolume", Hold()))
	leaving := f.another()
	ended := make(chan error, 1)
	go func() {
		_, err := leaving.Mount(f.Context(), f.volume("v"), "job", csi.MountRequest{})
		ended <- err
	}()
	f.begun("NodeStageVolume", 1)
	f.ok(leaving.Close())
	f.is(<-ended, csi.ErrDisconnected)
	_, err := leaving.HasMount(f.Context(), "/")
	f.is(err, csi.ErrDisconnected)
	_, err = leaving.Events(f.Context(), csi.FromNow)
	f.is(err, csi.ErrDisconnected)
	f.ok(leaving.Close())
	f.plugin.Rules()
	Eventually(f, "csid mounts it", func() bool {
		rows := f.rows()
		return len(rows) == 1 && rows[0].State == "mounted"
	})
	f.unmounted("v")
}

// each does it to so many volumes at once.
func (f *fixture) each(count int, do func(id string) error) *sync.WaitGroup {
	var all sync.WaitGroup
	for n := range count {
		all.Go(func() {
			if err := do(fmt.Sprintf("v%d", n)); err != nil {
				f.Errorf("v%d: %v", n, err)
			}
		})
	}
	return &all
}

// restart kills csid in the middle of its calls: each ends as it should.
func restart(f *fixture) {
	const volumes = 20
	// The first volume is staged only after the last kill, so that every kill finds a call in flight.
	first, slow := "v0", Delay(300*time.Millisecond)
	held := Rule{RPC: "NodeStageVolume", Volume: &first, From: 1, Times: math.MaxUint64, Act: Delay(time.Hour)}
	f.plugin.Rules(held, Always("NodeStageVolume", slow))
	mounting := f.each(volumes, func(id string) error {
		info, err := f.client.Mount(f.Context(), f.volume(id), "job", csi.MountRequest{})
		if err == nil {
			_, err = os.Stat(info.Source)
		}
		return err
	})
	// The calls are counted while there is no csid: nothing begins between the count and the start.
	calls := 0
	for kill := range 3 {
		f.begun("NodeStageVolume", calls+1)
		f.world.Kill()
		calls = len(f.plugin.Calls("NodeStageVolume"))
		if kill == 2 {
			f.plugin.Rules(Always("NodeStageVolume", slow))
		}
		f.world.Start()
	}
	mounting.Wait()
	rows := f.rows()
	f.that(len(rows) == volumes, "%d of them are mounted", len(rows))
	for _, row := range rows {
		f.that(row.State == "mounted", "%+v", row)
	}
	f.plugin.Rules(Always("NodeUnstageVolume", slow))
	calls = len(f.plugin.Calls("NodeUnstageVolume"))
	unmounting := f.each(volumes, func(id string) error {
		return f.client.Unmount(f.Context(), csi.Volume{Namespace: namespace, ID: id}, "job", csi.UnmountOptions{})
	})
	f.begun("NodeUnstageVolume", calls+1)
	f.world.Kill()
	f.world.Start()
	unmounting.Wait()
	f.plugin.Rules()
}

// While there is no csid a call waits for one, until its deadline or its cancellation.
func away(f *fixture) {
	f.world.Kill()
	const limit = 1500 * time.Millisecond
	begin := time.Now()
	soon, end := context.WithTimeout(f.Context(), limit)
	defer end()
	_, err := f.client.Mount(soon, f.volume("v"), "job", csi.MountRequest{})
	f.is(err, csi.ErrTimedOut, context.DeadlineExceeded)
	f.that(time.Since(begin) >= limit && time.Since(begin) < limit+noise, "it took %v", time.Since(begin))
	cancelled, end := context.WithCancel(f.Context())
	ended := make(chan error, 2)
	go func() { ended <- f.client.Unmount(cancelled, f.volume("v"), "job", csi.UnmountOptions{}) }()
	end()
	f.is(<-ended, csi.ErrCancelled, context.Canceled)
	if !f.way.OnBus {
		_, err = f.way.Open(f.Context())
		f.is(err, csi.ErrDisconnected)
	}
	go func() {
		_, err := f.client.Mount(f.Context(), f.volume("w"), "job", csi.MountRequest{})
		ended <- err
	}()
	go func() {
		_, err := f.client.HasMount(f.Context(), "/nowhere")
		ended <- err
	}()
	f.world.Start()
	f.ok(<-ended)
	f.ok(<-ended)
	f.that(len(f.rows()) == 1, "what was withdrawn is not done: %+v", f.rows())
	f.unmounted("w")
}

// threads are those of this process.
func threads(f *fixture) int {
	status, err := os.ReadFile("/proc/self/status")
	f.ok(err)
	for line := range strings.Lines(string(status)) {
		if count, is := strings.CutPrefix(line, "Threads:"); is {
			threads, err := strconv.Atoi(strings.TrimSpace(count))
			f.ok(err)
			return threads
		}
	}
	f.Fatal("no count of threads")
	return 0
}

// Calls that wait hold no threads.
func many(f *fixture) {
	// A client has at most atOnce calls under way. Of these csid asks the plugin at most asked at once, its default.
	const volumes, atOnce, asked = 200, 112, 32
	f.plugin.Rules(Always("NodeStageVolume", Hold()))
	mounting := f.each(volumes, func(id string) error {
		_, err := f.client.Mount(f.Context(), f.volume(id), "job", csi.MountRequest{})
		return err
	})
	f.begun("NodeStageVolume", asked)
	most := threads(f)
	f.Logf("%d mounts, %d threads", volumes, most)
	f.plugin.Rules()
	mounting.Wait()
	most = max(most, threads(f))
	// Go adds threads on a machine with many processors, or with little time for this process, and never ends one.
	f.that(most < atOnce, "%d threads for %d calls", most, atOnce)
	f.each(volumes, func(id string) error {
		return f.client.Unmount(f.Context(), csi.Volume{Namespace: namespace, ID: id}, "job", csi.UnmountOptions{})
	}).Wait()

	// They are cancelled as they were begun: at once. Those that wait for their turn go first, and so no turn comes free for them.
	before := len(f.plugin.Calls("NodeStageVolume"))
	f.slow()
	mount := func(ctx context.Context, prefix string, count int) *sync.WaitGroup {
		return f.each(count, func(id string) error {
			_, err := f.client.Mount(ctx, f.volume(prefix+id), "job", csi.MountRequest{})
			if !errors.Is(err, context.Canceled) {
				return fmt.Errorf("it was not cancelled: %w", err)
			}
			return nil
		})
	}
	sent, endSent := context.WithCancel(f.Context())
	waiting, endWaiting := context.WithCancel(f.Context())
	underWay := mount(sent, "sent-", atOnce)
	f.begun("NodeStageVolume", before+asked)
	behind := mount(waiting, "waiting-", volumes-atOnce)
	// A client does not say how many of its calls wait for their turn.
	time.Sleep(100 * time.Millisecond)
	begin := time.Now()
	endWaiting()
	behind.Wait()
	endSent()
	underWay.Wait()
	f.that(time.Since(begin) < noise, "it took %v", time.Since(begin))
	Eventually(f, "csid has undone them", func() bool { return f.rows() == nil })
	// What waited for its turn is never asked for: csid might be done with it before it hears that nobody waits.
	for _, call := range f.plugin.Calls("NodeStageVolume")[before:] {
		f.that(strings.HasPrefix(call.Volume, "sent-"), "%s reached the plugin", call.Volume)
	}
	f.plugin.Rules()
}
