package csitest

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/csid-project/csid/go/csi"
)

func mount(f *fixture) {
	info := f.mounted("v")
	f.that(!info.IsDevice, "a file system is no device")
	f.ok(os.WriteFile(filepath.Join(info.Source, "file"), []byte("kept"), 0o600))
	is, err := f.client.HasMount(f.Context(), info.Source)
	f.ok(err)
	f.that(is, "it is mounted")

	again := f.mounted("v")
	f.that(*again == *info, "the same mount again: %v, %v", again, info)
	_, err = f.client.Mount(f.Context(), f.volume("v"), "job", csi.MountRequest{Usage: csi.UsageOptions{ReadOnly: true}})
	f.is(err, csi.ErrAlreadyExists)
	_, err = f.client.Mount(f.Context(), f.volume("v"), "other", csi.MountRequest{})
	f.is(err, csi.ErrClaimConflict)
	f.that(slices.Contains(err.(*csi.Error).Holders, "job"), "it names who has it: %+v", err)
	f.that(err.(*csi.Error).Retryable, "it may be had later: %+v", err)
	rows := f.rows()
	f.that(len(rows) == 1 && rows[0].Source == info.Source && rows[0].Consumer == "job" && rows[0].State == "mounted",
		"%+v", rows)

	f.unmounted("v")
	is, err = f.client.HasMount(f.Context(), info.Source)
	f.ok(err)
	f.that(!is, "it is unmounted")
	_, err = f.client.ExpandVolume(f.Context(), f.volume("v"), csi.CapacityRange{RequiredBytes: 1 << 20}, csi.PartNode)
	f.is(err, csi.ErrNotSupported)
	plugin, err := f.client.Plugin(f.Context(), f.plugin.ID)
	f.ok(err)
	f.that(plugin.Topology == nil, "it says of no place: %v", plugin.Topology)
	at, err := f.client.ListMounts(f.Context(), csi.MountFilter{Plugin: f.plugin.ID, Target: "/no/such/target"})
	f.ok(err)
	f.that(at == nil, "nothing is bound there: %+v", at)
	f.unmounted("v")
	f.unmounted("never-there")
	f.that(f.rows() == nil, "no row is left")
	unmounting(f)
}

// What must be there, every tag, and an answer after the first try.
func unmounting(f *fixture) {
	volume := csi.Volume{Namespace: namespace, ID: "v"}
	unmount := func(options csi.UnmountOptions) error {
		return f.client.Unmount(f.Context(), volume, "job", options)
	}
	f.is(unmount(csi.UnmountOptions{MustExist: true}), csi.ErrNotFound)
	usage := csi.UsageOptions{AccessMode: csi.SingleNodeMultiWriter}
	for _, tag := range []string{"one", "two"} {
		_, err := f.client.Mount(f.Context(), f.volume("v"), "job", csi.MountRequest{Usage: usage, Tag: tag})
		f.ok(err)
	}
	err := unmount(csi.UnmountOptions{MustExist: true})
	f.is(err, csi.ErrNotFound)
	f.that(slices.Equal(err.(*csi.Error).Tags, []string{"one", "two"}), "%+v", err)
	// Of one user: the tests run as root.
	for uid, there := range map[uint32]int{0: 2, 1: 0} {
		rows, err := f.client.ListMounts(f.Context(), csi.MountFilter{Plugin: f.plugin.ID, UID: &uid})
		f.ok(err)
		f.that(len(rows) == there, "of %d: %+v", uid, rows)
	}
	// In pages, each of which goes on behind a row that is gone or there.
	of := csi.MountFilter{Plugin: f.plugin.ID, ListPage: csi.ListPage{Max: 1}}
	for _, tag := range []string{"one", "two"} {
		rows, err := f.client.ListMounts(f.Context(), of)
		f.ok(err)
		f.that(len(rows) == 1 && rows[0].Tag == tag && rows[0].Cursor != "", "%+v", rows)
		of.After = rows[0].Cursor
		if tag == "one" {
			f.ok(unmount(csi.UnmountOptions{Tag: tag}))
		}
	}
	rows, err := f.client.ListMounts(f.Context(), of)
	f.ok(err)
	f.that(rows == nil, "%+v", rows)
	of.After = "no cursor"
	_, err = f.client.ListMounts(f.Context(), of)
	f.is(err, csi.ErrInvalidArgument)
	f.ok(unmount(csi.UnmountOptions{AllTags: true, MustExist: true}))
	f.that(f.rows() == nil, "no row is left")

	f.mounted("v")
	f.plugin.Rules(Always("NodeUnpublishVolume", Say(14, "not now")))
	err = unmount(csi.UnmountOptions{NoWait: true})
	f.that(err != nil && err.(*csi.Error).PluginMessage == "not now", "%+v", err)
	f.plugin.Rules()
	Eventually(f, "csid goes on by itself", func() bool { return f.rows() == nil })

	// What root alone may ask for reaches csid, too.
	f.mounted("v")
	err = unmount(csi.UnmountOptions{Forget: true})
	f.is(err, csi.ErrBusy)
	f.that(slices.Contains(err.(*csi.Error).Holders, "job"), "it is mounted: %+v", err)
	f.ok(unmount(csi.UnmountOptions{ForceHung: true}))
	f.ok(unmount(csi.UnmountOptions{Forget: true}))
	f.is(unmount(csi.UnmountOptions{Forget: true, MustExist: true}), csi.ErrNotFound)

	// A mount that waits has the volume when the other lets it go.
	f.mounted("v")
	done := make(chan error, 1)
	go func() {
		_, err := f.client.Mount(f.Context(), f.volume("v"), "other", csi.MountRequest{Wait: noise})
		done <- err
	}()
	f.world.Waits("v")
	select {
	case err := <-done:
		f.Fatalf("it does not wait: %v", err)
	default:
	}
	f.unmounted("v")
	f.ok(<-done)
	f.ok(f.client.Unmount(f.Context(), volume, "other", csi.UnmountOptions{}))
}

func device(f *fixture) {
	f.plugin.Device("disk")
	usage := csi.UsageOptions{AttachmentMode: csi.BlockDevice}
	info, err := f.client.Mount(f.Context(), f.volume("disk"), "job", csi.MountRequest{Usage: usage})
	f.ok(err)
	f.that(info.IsDevice, "it is a device")
	stat, err := os.Stat(info.Source)
	f.ok(err)
	f.that(stat.Mode()&os.ModeDevice != 0 && stat.Mode()&os.ModeCharDevice == 0, "%s is %v", info.Source, stat.Mode())
	f.unmounted("disk")
}

// What a Nomad-like scheduler does, with its own two interfaces.
func theManager(f *fixture) {
	ctx := f.Context()
	manager := csi.NewManager(f.client)
	f.ok(manager.WaitForPlugin(ctx, "csi-node", f.plugin.ID))
	none, err := manager.MounterForPlugin(ctx, "no-such-plugin")
	f.is(err, csi.ErrNotFound)
	f.that(none == nil, "no mounter with an error")
	mounter, err := manager.MounterForPlugin(ctx, f.plugin.ID)
	f.ok(err)
	f.that(mounter.ExternalID() == "node-1", "%s", mounter.ExternalID())

	volume := &csi.Volume{Namespace: namespace, ID: "web", ExternalID: "vol-1"}
	flags := csi.MountOptions{MountFlags: []string{"noatime"}}
	writes := &csi.UsageOptions{AccessMode: csi.SingleNodeMultiWriter, MountOptions: flags}
	reads := &csi.UsageOptions{ReadOnly: true, AccessMode: csi.SingleNodeMultiWriter, MountOptions: flags}
	both := []*csi.UsageOptions{writes, reads}
	sources := map[string]bool{}
	for _, usage := range both {
		info, err := mounter.MountVolume(ctx, volume, "alloc-7", usage, nil)
		f.ok(err)
		is, err := mounter.HasMount(ctx, info)
		f.ok(err)
		f.that(is, "%s is mounted", info.Source)
		sources[info.Source] = true
	}
	f.that(len(sources) == 2, "one allocation has the volume in two usages: %v", sources)
	_, err = mounter.MountVolume(ctx, nil, "alloc-7", writes, nil)
	f.is(err, csi.ErrInvalidArgument)
	_, err = mounter.HasMount(ctx, nil)
	f.is(err, csi.ErrInvalidArgument)
	foreign := &csi.Volume{Namespace: namespace, ID: "web", Plugin: "another", ExternalID: "vol-1"}
	_, err = mounter.MountVolume(ctx, foreign, "alloc-7", writes, nil)
	f.is(err, csi.ErrInvalidArgument)

	// csid and the scheduler are others now; of how it was mounted nothing is left but the names.
	manager.Shutdown()
	f.world.Kill()
	f.world.Start()
	f.client = f.another()
	// Without its plugin an Unmount that does not wait is refused at once.
	f.ok(csi.NewManager(f.client).WaitForPlugin(ctx, "csi-node", f.plugin.ID))
	mounter, err = csi.NewManager(f.client).MounterForPlugin(ctx, f.plugin.ID)
	f.ok(err)
	for _, usage := range both {
		bare := &csi.UsageOptions{ReadOnly: usage.ReadOnly, AccessMode: usage.AccessMode}
		for range 2 {
			f.ok(mounter.UnmountVolume(ctx, namespace, "web", "vol-1", "alloc-7", bare))
		}
	}
	for source := range sources {
		is, err := mounter.HasMount(ctx, &csi.MountInfo{Source: source})
		f.ok(err)
		f.that(!is, "%s is unmounted", source)
	}
}

func arguments(f *fixture) {
	ctx := f.Context()
	for _, text := range []string{"a\x00b", "a\xffb"} {
		_, err := f.client.Mount(ctx, f.volume(text), "job", csi.MountRequest{})
		f.is(err, csi.ErrInvalidArgument)
		_, err = f.client.Mount(ctx, f.volume("v"), "job", csi.MountRequest{Tag: text})
		f.is(err, csi.ErrInvalidArgument)
		volume := f.volume("v")
		volume.Context = map[string]string{"key": text}
		_, err = f.client.Mount(ctx, volume, "job", csi.MountRequest{})
		f.is(err, csi.ErrInvalidArgument)
		_, err = f.client.HasMount(ctx, text)
		f.is(err, csi.ErrInvalidArgument)
		volume = f.volume("v")
		volume.Capabilities = []csi.Capability{{AccessMode: csi.AccessMode(text)}}
		_, err = f.client.Mount(ctx, volume, "job", csi.MountRequest{})
		f.is(err, csi.ErrInvalidArgument)
	}
	_, err := f.client.Mount(ctx, f.volume("v"), "job", csi.MountRequest{Usage: csi.UsageOptions{AccessMode: "any"}})
	f.is(err, csi.ErrInvalidArgument)
	_, err = f.client.ExpandVolume(ctx, f.volume("v"), csi.CapacityRange{RequiredBytes: -1}, "")
	f.is(err, csi.ErrInvalidArgument)
	_, err = f.client.WaitForPlugin(ctx, f.plugin.ID, "nodes")
	f.is(err, csi.ErrInvalidArgument)
	over, end := context.WithCancel(ctx)
	end()
	_, err = f.client.Mount(over, f.volume("v"), "job", csi.MountRequest{})
	f.is(err, csi.ErrCancelled, context.Canceled)
	f.mounted("v")
	f.unmounted("v")
	f.that(len(f.plugin.Calls("NodeStageVolume")) == 1, "nothing else reached the plugin")
}

func pluginErrors(f *fixture) {
	f.plugin.Rules(Always("NodeStageVolume", Say(9, "the shelf is empty")))
	_, err := f.client.Mount(f.Context(), f.volume("v"), "job", csi.MountRequest{})
	f.is(err, csi.ErrPlugin)
	said := err.(*csi.Error)
	f.that(said.RPC == "NodeStageVolume" && said.GRPCCode == 9 && said.PluginMessage == "the shelf is empty", "%+v", said)
	f.that(said.Volume == "v" && said.Namespace == namespace && said.Plugin == f.plugin.ID, "%+v", said)
	f.that(strings.Contains(said.Error(), "the shelf is empty"), "%v", said)
	f.plugin.Rules()
}

func secrets(f *fixture) {
	const canary = "c4n4ry-\"\\\n-ä-s3cr3t"
	volume := f.volume("v")
	volume.Secrets = csi.Secrets{"password": canary, "user": "u"}
	_, err := f.client.Mount(f.Context(), volume, "job", csi.MountRequest{})
	f.ok(err)
	want := [][2]string{{"password", canary}, {"user", "u"}}
	for _, rpc := range []string{"NodeStageVolume", "NodePublishVolume"} {
		for _, call := range f.plugin.Calls(rpc) {
			f.that(slices.Equal(call.Secrets, want), "%s had %v", rpc, call.Secrets)
		}
	}
	f.unmounted("v")
	f.plugin.Rules(Always("NodeStageVolume", Say(16, "no entry with "+canary)))
	_, err = f.client.Mount(f.Context(), volume, "job", csi.MountRequest{})
	f.that(err != nil, "the plugin refused")
	said := fmt.Sprintf("%v %+v %#v %+v", err, err, volume, volume)
	f.that(!strings.Contains(said, "c4n4ry"), "%s", said)
	f.that(f.world.Grep("c4n4ry") == "", "csid keeps a secret in %s", f.world.Grep("c4n4ry"))
	f.plugin.Rules()
}

// What another manager mounted is had without the plugin, and unmounted like any other.
func adopting(f *fixture) {
	ctx := f.Context()
	at := f.plugin.Foreign("v")
	request := csi.MountRequest{Usage: csi.UsageOptions{AccessMode: csi.SingleNodeMultiWriter}}
	adopt := func(consumer string, at csi.AdoptedAt) (*csi.MountInfo, error) {
		return f.client.AdoptMount(ctx, f.volume("v"), consumer, request, at)
	}
	_, err := adopt("job", csi.AdoptedAt{Staging: at.Staging, Published: at.Published + ".not"})
	f.is(err, csi.ErrNotFound)
	_, err = adopt("job", csi.AdoptedAt{Staging: at.Staging})
	f.is(err, csi.ErrInvalidArgument)
	f.that(f.rows() == nil, "nothing has changed")
	for range 2 {
		info, err := adopt("job", at)
		f.ok(err)
		f.that(*info == csi.MountInfo{Source: at.Published}, "%+v", info)
	}
	_, err = adopt("other", at)
	f.is(err, csi.ErrAlreadyExists)
	is, err := f.client.HasMount(ctx, at.Published)
	f.ok(err)
	f.that(is, "it is mounted")
	rows := f.rows()
	f.that(len(rows) == 1 && rows[0].Staging == at.Staging && rows[0].State == "mounted", "%+v", rows)
	f.unmounted("v")
	_, err = os.Stat(at.Published)
	f.that(os.IsNotExist(err), "the plugin took it away: %v", err)

	// The same for a scheduler with the two interfaces.
	mounter, err := csi.NewManager(f.client).MounterForPlugin(ctx, f.plugin.ID)
	f.ok(err)
	volume := &csi.Volume{Namespace: namespace, ID: "web", ExternalID: "vol-1"}
	at = f.plugin.Foreign("vol-1")
	info, err := mounter.AdoptVolume(ctx, volume, "alloc-7", &request.Usage, nil, at)
	f.ok(err)
	f.that(info.Source == at.Published, "%+v", info)
	f.ok(mounter.UnmountVolume(ctx, namespace, "web", "vol-1", "alloc-7", &request.Usage))
	f.that(f.rows() == nil, "no row is left")
	calls := len(f.plugin.Calls("NodeStageVolume")) + len(f.plugin.Calls("NodePublishVolume"))
	f.that(calls == 4, "%d: the other manager's alone", calls)
}
