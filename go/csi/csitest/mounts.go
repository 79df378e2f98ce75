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
	rows := f.rows()
	f.that(len(rows) == 1 && rows[0].Source == info.Source && rows[0].Consumer == "job" && rows[0].State == "mounted",
		"%+v", rows)

	f.unmounted("v")
	is, err = f.client.HasMount(f.Context(), info.Source)
	f.ok(err)
	f.that(!is, "it is unmounted")
	f.unmounted("v")
	f.unmounted("never-there")
	f.that(f.rows() == nil, "no row is left")
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
	f.that(none == nil, "no mounter beside an error")
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
