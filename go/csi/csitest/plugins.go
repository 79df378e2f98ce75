package csitest

import (
	"context"
	"strings"
	"time"

	"github.com/csid-project/csid/go/csi"
)

// Each key of a spec reaches csid: it says what is wrong with it.
func specs(f *fixture) {
	for _, test := range []struct {
		spec csi.PluginSpec
		said string
	}{
		{csi.PluginSpec{Supervision: "external", Socket: "/run/s.sock", Unit: "a.service"}, "unit is for supervision"},
		{csi.PluginSpec{Supervision: "unit", Unit: "a.mount", Socket: "/run/s.sock"}, "unit is not the name of a service"},
		{csi.PluginSpec{Supervision: "unit", Unit: "a.service"}, "needs socket"},
		{csi.PluginSpec{Supervision: "unit", Socket: "/run/s.sock"}, "needs unit"},
		{csi.PluginSpec{Supervision: "managed", Argv: []string{"/bin/true"}, Profile: "node"}, "profile"},
		{csi.PluginSpec{Supervision: "managed", Argv: []string{"/bin/true"}, Network: "mine"}, "network is none of"},
		{csi.PluginSpec{Supervision: "external", Socket: "/run/s.sock", Profile: "node-fuse"}, "are for managed plugins"},
		{csi.PluginSpec{Supervision: "external", Socket: "/run/s.sock", Propagation: "private"}, "are for managed plugins"},
		{csi.PluginSpec{Supervision: "external", Socket: "/run/s.sock", Network: "none"}, "are for managed plugins"},
	} {
		test.spec.ID = f.plugin.ID + ".wrong"
		err := f.client.RegisterPlugin(f.Context(), test.spec)
		f.is(err, csi.ErrInvalidArgument)
		f.that(strings.Contains(err.Error(), test.said), "%+v: %v", test.spec, err)
	}
}

// Nothing is attached to a node that is called otherwise than before, until somebody accepts that.
func node(f *fixture) {
	ctx := f.Context()
	volume := f.created("v")
	f.plugin.Renames("node-2")
	Eventually(f, "csid has seen it", func() bool {
		plugin, err := f.client.Plugin(ctx, f.plugin.ID)
		return err == nil && plugin.NodeID == "node-2" && plugin.State == "ready"
	})
	usage := csi.UsageOptions{AccessMode: csi.SingleNodeWriter, AttachmentMode: csi.FileSystem}
	_, err := f.client.AttachVolume(ctx, volume, "node-2", usage)
	f.is(err, csi.ErrPluginUnavailable)
	f.is(f.client.AcceptNodeID(ctx, f.plugin.ID, "node-1"), csi.ErrInvalidArgument)
	f.is(f.client.AcceptNodeID(ctx, "no-such-plugin", "node-2"), csi.ErrNotFound)
	soon, end := context.WithTimeout(ctx, time.Minute)
	defer end()
	for range 2 {
		f.ok(f.client.AcceptNodeID(soon, f.plugin.ID, "node-2"))
	}
	_, err = f.client.AttachVolume(ctx, volume, "node-2", usage)
	f.ok(err)
	f.ok(f.client.DetachVolume(ctx, volume, "node-2"))
	f.ok(f.client.DeleteVolume(ctx, volume))
}
