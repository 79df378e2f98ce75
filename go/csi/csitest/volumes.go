package csitest

import (
	"slices"

	"github.com/csid-project/csid/go/csi"
)

var writer = []csi.Capability{{AccessMode: csi.SingleNodeWriter, AttachmentMode: csi.FileSystem}}

// created has the plugin make a volume that csid does not keep.
func (f *fixture) created(id string) csi.Volume {
	f.Helper()
	volume := csi.Volume{Namespace: namespace, ID: id, Plugin: f.plugin.ID, Capabilities: writer}
	info, err := f.client.CreateVolume(f.Context(), volume, csi.CreateSpec{Capacity: csi.CapacityRange{RequiredBytes: 1 << 20}})
	f.ok(err)
	f.that(info.ExternalID != "" && info.Capacity >= 1<<20, "%+v", info)
	volume.ExternalID, volume.Context = info.ExternalID, info.Context
	return volume
}

func claims(f *fixture) {
	ctx := f.Context()
	volume := f.created("v")
	info, err := f.client.RegisterVolume(ctx, volume, csi.VolumeSpec{Name: "for people"})
	f.ok(err)
	f.that(info.Name == "for people" && info.Plugin == f.plugin.ID && slices.Equal(info.Capabilities, writer), "%+v", info)
	named := csi.Volume{Namespace: namespace, ID: "v"}

	claimed, err := f.client.Claim(ctx, named, "a", csi.ClaimOptions{Mode: "write"})
	f.ok(err)
	f.that(claimed.ID == "v" && claimed.State == "taken" && claimed.ExternalNodeID == "node-1", "%+v", claimed)
	f.that(claimed.PublishContext != nil, "the plugin attaches: %+v", claimed)
	_, err = f.client.Claim(ctx, named, "b", csi.ClaimOptions{Mode: "write"})
	f.that(err != nil, "the volume has one writer")
	said := err.(*csi.Error)
	f.that(said.Code == csi.ErrBusy || said.Code == csi.ErrClaimConflict, "%+v", said)
	f.that(slices.Contains(said.Holders, "a"), "it names who has it: %+v", said)

	rows, err := f.client.ListClaims(ctx, csi.ClaimFilter{Namespace: namespace, Volume: "v"})
	f.ok(err)
	f.that(len(rows) == 1 && rows[0].Consumer == "a" && rows[0].Mode == "write", "%+v", rows)
	mounted, err := f.client.Mount(ctx, named, "a", csi.MountRequest{})
	f.ok(err)
	is, err := f.client.HasMount(ctx, mounted.Source)
	f.ok(err)
	f.that(is, "a has it mounted")
	// The call takes no secrets, and a volume may have some.
	secret := named
	secret.Secrets = map[string]string{"password": "s"}
	info, err = f.client.GetVolume(ctx, secret)
	f.ok(err)
	f.that(slices.Equal(info.WriteClaims, []string{"a"}) && info.AccessMode == csi.SingleNodeWriter, "%+v", info)
	f.that(info.Context != nil, "%+v", info)
	volumes, err := f.client.ListVolumes(ctx, csi.VolumeFilter{Plugin: f.plugin.ID})
	f.ok(err)
	f.that(len(volumes) == 1 && volumes[0].ID == "v" && volumes[0].Standing == "registered", "%+v", volumes)
	f.pages(named)
	f.is(f.client.DeregisterVolume(ctx, named, csi.DeregisterOptions{}), csi.ErrBusy)
	f.is(f.client.Release(ctx, named, "a", csi.ReleaseOptions{Forget: true}), csi.ErrBusy)

	for range 2 {
		f.ok(f.client.Release(ctx, named, "a", csi.ReleaseOptions{}))
	}
	_, err = f.client.Claim(ctx, named, "b", csi.ClaimOptions{Mode: "write"})
	f.ok(err)
	f.ok(f.client.Release(ctx, named, "b", csi.ReleaseOptions{}))
	past, err := f.client.ListClaims(ctx, csi.ClaimFilter{Namespace: namespace, Volume: "v", Past: true})
	f.ok(err)
	f.that(len(past) > 0, "there were claims")
	f.ok(f.client.DeregisterVolume(ctx, named, csi.DeregisterOptions{}))
	_, err = f.client.GetVolume(ctx, named)
	f.is(err, csi.ErrNotFound)
	_, err = f.client.Claim(ctx, named, "a", csi.ClaimOptions{})
	f.is(err, csi.ErrNotFound)
	f.ok(f.client.DeleteVolume(ctx, volume))
}

// forgotten gives up a creation that never ends.
func forgotten(f *fixture) {
	ctx := f.Context()
	f.plugin.Rules(Always("CreateVolume", Say(13, "not now")))
	named := csi.Volume{Namespace: namespace, ID: "v"}
	done := make(chan error, 1)
	go func() {
		volume := csi.Volume{Namespace: namespace, ID: "v", Plugin: f.plugin.ID, Capabilities: writer}
		_, err := f.client.CreateVolume(ctx, volume, csi.CreateSpec{Register: true})
		done <- err
	}()
	f.begun("CreateVolume", 1)
	info, err := f.client.GetVolume(ctx, named)
	f.ok(err)
	f.that(info.Standing == "creating", "%+v", info)
	f.is(f.client.DeregisterVolume(ctx, named, csi.DeregisterOptions{}), csi.ErrBusy)
	f.ok(f.client.DeregisterVolume(ctx, named, csi.DeregisterOptions{Forget: true}))
	f.is(<-done, csi.ErrCancelled)
	_, err = f.client.GetVolume(ctx, named)
	f.is(err, csi.ErrNotFound)
	f.plugin.Rules()
	volumes, err := f.client.ListVolumes(ctx, csi.VolumeFilter{Plugin: f.plugin.ID})
	f.ok(err)
	f.that(volumes == nil, "nothing comes back: %+v", volumes)
}

// declared lists a volume whose file waits for its plugin.
func declared(f *fixture) {
	ctx := f.Context()
	f.world.Declare("d")
	volumes, err := f.client.ListVolumes(ctx, csi.VolumeFilter{})
	f.ok(err)
	f.that(volumes == nil, "it is not registered: %+v", volumes)
	volumes, err = f.client.ListVolumes(ctx, csi.VolumeFilter{Declared: true})
	f.ok(err)
	f.that(len(volumes) == 1 && volumes[0].ID == "d" && volumes[0].Standing == "declared", "%+v", volumes)
	f.world.Undeclare("d")
	volumes, err = f.client.ListVolumes(ctx, csi.VolumeFilter{Declared: true})
	f.ok(err)
	f.that(volumes == nil, "%+v", volumes)
}

// pages goes on behind the one claim of the volume, and behind the one volume.
func (f *fixture) pages(volume csi.Volume) {
	f.Helper()
	ctx := f.Context()
	claims, err := f.client.ListClaims(ctx, csi.ClaimFilter{Volume: volume.ID, ListPage: csi.ListPage{Max: 1}})
	f.ok(err)
	f.that(len(claims) == 1, "%+v", claims)
	behind := csi.ListPage{After: claims[0].Cursor}
	claims, err = f.client.ListClaims(ctx, csi.ClaimFilter{Volume: volume.ID, ListPage: behind})
	f.ok(err)
	f.that(claims == nil, "%+v", claims)
	volumes, err := f.client.ListVolumes(ctx, csi.VolumeFilter{Plugin: f.plugin.ID, ListPage: csi.ListPage{Max: 1}})
	f.ok(err)
	f.that(len(volumes) == 1, "%+v", volumes)
	behind = csi.ListPage{After: volumes[0].Cursor}
	volumes, err = f.client.ListVolumes(ctx, csi.VolumeFilter{Plugin: f.plugin.ID, ListPage: behind})
	f.ok(err)
	f.that(volumes == nil, "%+v", volumes)
}

// inventory looks at what the plugin has: the volume and its snapshot, which are given up again but for the volume.
func (f *fixture) inventory(volume csi.Volume, snapshot *csi.Snapshot) {
	f.Helper()
	ctx := f.Context()
	has, err := f.client.ListExternalVolumes(ctx, f.plugin.ID, csi.Page{Max: 1})
	f.ok(err)
	f.that(len(has.Volumes) == 1 && has.Volumes[0].ExternalID == volume.ExternalID && has.NextToken == "", "%+v", has)
	f.plugin.ReadyAt(3)
	begun, err := f.client.BeginSnapshot(ctx, volume, "later", nil)
	f.ok(err)
	f.that(begun.ID != "" && !begun.Ready, "it is not ready: %+v", begun)
	later, err := f.client.CreateSnapshot(ctx, volume, "later", nil)
	f.ok(err)
	f.that(later.ID == begun.ID && later.Ready, "%+v", later)

	var ids []string
	for page := (csi.Page{Max: 1}); ; {
		some, err := f.client.ListSnapshots(ctx, f.plugin.ID, csi.SnapshotFilter{ExternalID: volume.ExternalID}, page)
		f.ok(err)
		for _, one := range some.Snapshots {
			ids = append(ids, one.ID)
		}
		if page.Token = some.NextToken; page.Token == "" {
			break
		}
	}
	want := []string{snapshot.ID, later.ID}
	slices.Sort(ids)
	slices.Sort(want)
	f.that(slices.Equal(ids, want), "%v", ids)
	for _, id := range append(want, want...) {
		f.ok(f.client.DeleteSnapshot(ctx, f.plugin.ID, id, nil))
	}
	none, err := f.client.ListSnapshots(ctx, f.plugin.ID, csi.SnapshotFilter{Snapshot: snapshot.ID}, csi.Page{})
	f.ok(err)
	f.that(len(none.Snapshots) == 0, "%+v", none)
}

// A scheduler that keeps its own claims: csid only asks the controller.
func controller(f *fixture) {
	ctx := f.Context()
	plugin, err := f.client.WaitForPlugin(ctx, f.plugin.ID, csi.Controller)
	f.ok(err)
	f.that(plugin.Attaches() && slices.Contains(plugin.Services, csi.Controller), "%+v", plugin)
	volume := f.created("v")
	volumes, err := f.client.ListVolumes(ctx, csi.VolumeFilter{Plugin: f.plugin.ID})
	f.ok(err)
	f.that(volumes == nil, "it is not registered: %+v", volumes)
	f.that(f.created("v").ExternalID == volume.ExternalID, "the same volume again")

	valid, err := f.client.ValidateVolume(ctx, volume, writer[0])
	f.ok(err)
	f.that(valid.Confirmed, "%+v", valid)
	both := []csi.Capability{writer[0], {AccessMode: csi.SingleNodeReaderOnly, AttachmentMode: csi.FileSystem}}
	_, err = f.client.ValidateVolume(ctx, volume, both...)
	f.ok(err)
	asked := f.plugin.Calls("ValidateVolumeCapabilities")
	f.that(len(asked) == 2, "each is one question: %+v", asked)
	f.that(plugin.Socket == f.plugin.Socket && slices.Equal(plugin.Instances, []string{"default"}), "%+v", plugin)
	usage := csi.UsageOptions{AccessMode: csi.SingleNodeWriter, AttachmentMode: csi.FileSystem}
	context, err := f.client.AttachVolume(ctx, volume, plugin.NodeID, usage)
	f.ok(err)
	f.that(context != nil, "a publish context")

	mounter, err := csi.NewManager(f.client).MounterForPlugin(ctx, f.plugin.ID)
	f.ok(err)
	_, err = mounter.MountVolume(ctx, &volume, "alloc", &usage, context)
	f.ok(err)
	f.is(f.client.DetachVolume(ctx, volume, plugin.NodeID), csi.ErrBusy)
	size := csi.CapacityRange{RequiredBytes: 8 << 20}
	expanded, err := f.client.ExpandVolume(ctx, volume, size, csi.PartController)
	f.ok(err)
	f.that(expanded.CapacityBytes >= size.RequiredBytes && expanded.NodeExpansionRequired, "%+v", expanded)
	bytes, err := mounter.ExpandVolume(ctx, namespace, "v", volume.ExternalID, "alloc", &usage, size)
	f.ok(err)
	f.that(bytes >= size.RequiredBytes, "%d", bytes)
	snapshot, err := f.client.CreateSnapshot(ctx, volume, "before", map[string]string{})
	f.ok(err)
	f.that(snapshot.ID != "" && snapshot.ExternalID == volume.ExternalID && snapshot.Ready, "%+v", snapshot)
	f.inventory(volume, snapshot)

	f.ok(mounter.UnmountVolume(ctx, namespace, "v", volume.ExternalID, "alloc", &usage))
	for range 2 {
		f.ok(f.client.DetachVolume(ctx, volume, plugin.NodeID))
	}
	for range 2 {
		f.ok(f.client.DeleteVolume(ctx, volume))
	}
}
