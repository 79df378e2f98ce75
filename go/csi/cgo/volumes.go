package cgo

// #include <csi.h>
import "C"

import (
	"context"

	"github.com/csid-project/csid/go/csi"
	"github.com/csid-project/csid/go/internal/row"
)

// RegisterVolume implements [csi.Client].
func (c *Client) RegisterVolume(ctx context.Context, v csi.Volume, s csi.VolumeSpec) (*csi.VolumeInfo, error) {
	a := newArena()
	volume, spec := a.volume(v), a.spec(s)
	return one(c, ctx, a, v, func(client *C.csi_client, s slot) C.csi_code {
		return C.csi_register_volume(client, volume, spec, s.call, s.op, s.err)
	}, volumeInfo)
}

// DeregisterVolume implements [csi.Client].
func (c *Client) DeregisterVolume(ctx context.Context, v csi.Volume, o csi.DeregisterOptions) error {
	a := newArena()
	volume, flags := a.volume(v), force(o.Force)
	set(&flags, C.CSI_FORGET, o.Forget)
	return c.done(ctx, a, v, func(client *C.csi_client, s slot) C.csi_code {
		return C.csi_deregister_volume(client, volume, flags, s.call, s.op, s.err)
	})
}

// GetVolume implements [csi.Client].
func (c *Client) GetVolume(ctx context.Context, v csi.Volume) (*csi.VolumeInfo, error) {
	a := newArena()
	volume := a.volume(v)
	return one(c, ctx, a, v, func(client *C.csi_client, s slot) C.csi_code {
		return C.csi_get_volume(client, volume, s.call, s.op, s.err)
	}, volumeInfo)
}

// ListVolumes implements [csi.Client].
func (c *Client) ListVolumes(ctx context.Context, f csi.VolumeFilter) ([]csi.VolumeInfo, error) {
	filter := map[string]string{
		"namespace": f.Namespace,
		"plugin":    f.Plugin,
		"node":      f.Node,
		"prefix":    f.Prefix,
	}
	if f.Declared {
		filter["declared"] = "true"
	}
	page(filter, f.ListPage)
	return list(c, ctx, "volumes", filter, row.VolumeInfo)
}

// CreateVolume implements [csi.Client].
func (c *Client) CreateVolume(ctx context.Context, v csi.Volume, s csi.CreateSpec) (*csi.VolumeInfo, error) {
	if err := s.Capacity.Check(); err != nil {
		return nil, err
	}
	a := newArena()
	volume, spec := a.volume(v), a.spec(s.VolumeSpec)
	set(&spec.flags, C.CSI_CREATE_ONLY, !s.Register)
	spec.capacity_min = C.uint64_t(s.Capacity.RequiredBytes)
	spec.capacity_max = C.uint64_t(s.Capacity.LimitBytes)
	spec.clone = a.some(s.Clone)
	spec.snapshot = a.some(s.Snapshot)
	return one(c, ctx, a, v, func(client *C.csi_client, s slot) C.csi_code {
		return C.csi_create_volume(client, volume, spec, s.call, s.op, s.err)
	}, volumeInfo)
}

// DeleteVolume implements [csi.Client].
func (c *Client) DeleteVolume(ctx context.Context, v csi.Volume) error {
	a := newArena()
	volume := a.volume(v)
	return c.done(ctx, a, v, func(client *C.csi_client, s slot) C.csi_code {
		return C.csi_delete_volume(client, volume, s.call, s.op, s.err)
	})
}

// AttachVolume implements [csi.Client].
func (c *Client) AttachVolume(ctx context.Context, v csi.Volume, nodeID string, u csi.UsageOptions) (map[string]string, error) {
	a := newArena()
	volume, node, usage := a.volume(u.Of(v)), a.text(nodeID), a.usage(u)
	context := func(r row.Row) map[string]string { return r.Map("publish-context") }
	return one(c, ctx, a, v, func(client *C.csi_client, s slot) C.csi_code {
		return C.csi_attach_volume(client, volume, node, usage, s.call, s.op, s.err)
	}, context)
}

// DetachVolume implements [csi.Client].
func (c *Client) DetachVolume(ctx context.Context, v csi.Volume, nodeID string) error {
	a := newArena()
	volume, node := a.volume(v), a.text(nodeID)
	return c.done(ctx, a, v, func(client *C.csi_client, s slot) C.csi_code {
		return C.csi_detach_volume(client, volume, node, s.call, s.op, s.err)
	})
}

// ValidateVolume implements [csi.Client].
func (c *Client) ValidateVolume(ctx context.Context, v csi.Volume, capabilities ...csi.Capability) (*csi.Validated, error) {
	if len(capabilities) > 0 {
		v.Capabilities = capabilities
	}
	a := newArena()
	volume := a.volume(v)
	return one(c, ctx, a, v, func(client *C.csi_client, s slot) C.csi_code {
		return C.csi_validate_volume(client, volume, nil, s.call, s.op, s.err)
	}, row.Validated)
}

// ExpandVolume implements [csi.Client].
func (c *Client) ExpandVolume(ctx context.Context, v csi.Volume, capacity csi.CapacityRange, part csi.Part) (*csi.Expanded, error) {
	if err := capacity.Check(); err != nil {
		return nil, err
	}
	a := newArena()
	volume, cpart := a.volume(v), a.some(string(part))
	required, limit := C.uint64_t(capacity.RequiredBytes), C.uint64_t(capacity.LimitBytes)
	return one(c, ctx, a, v, func(client *C.csi_client, s slot) C.csi_code {
		return C.csi_expand_volume(client, volume, required, limit, cpart, s.call, s.op, s.err)
	}, row.Expanded)
}

// CreateSnapshot implements [csi.Client].
func (c *Client) CreateSnapshot(ctx context.Context, v csi.Volume, name string, parameters map[string]string) (*csi.Snapshot, error) {
	a := newArena()
	volume, cname, cparameters := a.volume(v), a.text(name), a.pairs(parameters)
	return one(c, ctx, a, v, func(client *C.csi_client, s slot) C.csi_code {
		return C.csi_create_snapshot(client, volume, cname, cparameters, s.call, s.op, s.err)
	}, row.Snapshot)
}

// BeginSnapshot implements [csi.Client].
func (c *Client) BeginSnapshot(ctx context.Context, v csi.Volume, name string, parameters map[string]string) (*csi.Snapshot, error) {
	a := newArena()
	volume, cname, cparameters := a.volume(v), a.text(name), a.pairs(parameters)
	return one(c, ctx, a, v, func(client *C.csi_client, s slot) C.csi_code {
		return C.csi_begin_snapshot(client, volume, cname, cparameters, s.call, s.op, s.err)
	}, row.Snapshot)
}

// ListExternalVolumes implements [csi.Client].
func (c *Client) ListExternalVolumes(ctx context.Context, id string, page csi.Page) (*csi.ExternalVolumes, error) {
	a := newArena()
	plugin, token, most := a.text(id), a.some(page.Token), C.uint32_t(page.Max)
	return one(c, ctx, a, csi.Volume{}, func(client *C.csi_client, s slot) C.csi_code {
		return C.csi_list_external_volumes(client, plugin, token, most, s.call, s.op, s.err)
	}, row.ExternalVolumes)
}

// ListSnapshots implements [csi.Client].
func (c *Client) ListSnapshots(ctx context.Context, id string, f csi.SnapshotFilter, page csi.Page) (*csi.Snapshots, error) {
	a := newArena()
	plugin, snapshot, volume := a.text(id), a.some(f.Snapshot), a.some(f.ExternalID)
	token, most := a.some(page.Token), C.uint32_t(page.Max)
	return one(c, ctx, a, csi.Volume{Secrets: f.Secrets}, func(client *C.csi_client, s slot) C.csi_code {
		return C.csi_list_snapshots(client, plugin, snapshot, volume, token, most, s.call, s.op, s.err)
	}, row.Snapshots)
}

// DeleteSnapshot implements [csi.Client].
func (c *Client) DeleteSnapshot(ctx context.Context, id, snapshot string, secrets csi.Secrets) error {
	a := newArena()
	plugin, csnapshot := a.text(id), a.text(snapshot)
	return c.done(ctx, a, csi.Volume{Secrets: secrets}, func(client *C.csi_client, s slot) C.csi_code {
		return C.csi_delete_snapshot(client, plugin, csnapshot, s.call, s.op, s.err)
	})
}

func volumeInfo(r row.Row) *csi.VolumeInfo {
	info := row.VolumeInfo(r)
	return &info
}
