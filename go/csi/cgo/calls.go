package cgo

// #include <csi.h>
import "C"

import (
	"context"
	"strconv"

	"github.com/csid-project/csid/go/csi"
	"github.com/csid-project/csid/go/internal/row"
)

// WaitForPlugin implements [csi.Client].
func (c *Client) WaitForPlugin(ctx context.Context, id string, service csi.Service) (*csi.Plugin, error) {
	a := newArena()
	cid, cservice := a.text(id), a.text(string(service))
	return one(c, ctx, a, csi.Volume{}, func(client *C.csi_client, s slot) C.csi_code {
		return C.csi_wait_for_plugin(client, cid, cservice, s.call, s.op, s.err)
	}, row.Plugin)
}

// Plugin implements [csi.Client].
func (c *Client) Plugin(ctx context.Context, id string) (*csi.Plugin, error) {
	a := newArena()
	cid := a.text(id)
	return one(c, ctx, a, csi.Volume{}, func(client *C.csi_client, s slot) C.csi_code {
		return C.csi_get_plugin(client, cid, s.call, s.op, s.err)
	}, row.Plugin)
}

// ListPlugins implements [csi.Client].
func (c *Client) ListPlugins(ctx context.Context) ([]csi.PluginRow, error) {
	return list(c, ctx, "plugins", nil, row.PluginRow)
}

// RegisterPlugin implements [csi.Client].
func (c *Client) RegisterPlugin(ctx context.Context, p csi.PluginSpec) error {
	a := newArena()
	plugin := &C.csi_plugin{
		struct_size: C.sizeof_csi_plugin,
		id:          a.text(p.ID),
		supervision: a.some(p.Supervision),
		socket:      a.some(p.Socket),
		instance:    a.some(p.Instance),
		plugin_root: a.some(p.PluginRoot),
		plugin_view: a.some(p.PluginView),
		argv:        a.texts(p.Argv),
		environment: a.pairs(p.Environment),
		credentials: a.texts(p.Credentials),
		log:         a.some(p.Log),
		unit:        a.some(p.Unit),
		profile:     a.some(p.Profile),
		propagation: a.some(p.Propagation),
		network:     a.some(p.Network),
	}
	return c.done(ctx, a, csi.Volume{}, func(client *C.csi_client, s slot) C.csi_code {
		return C.csi_register_plugin(client, plugin, s.call, s.op, s.err)
	})
}

// UnregisterPlugin implements [csi.Client].
func (c *Client) UnregisterPlugin(ctx context.Context, id string, u csi.UnregisterOptions) error {
	a := newArena()
	cid, instance := a.text(id), a.some(u.Instance)
	return c.done(ctx, a, csi.Volume{}, func(client *C.csi_client, s slot) C.csi_code {
		return C.csi_unregister_plugin(client, cid, instance, force(u.Force), s.call, s.op, s.err)
	})
}

// AcceptNodeID implements [csi.Client].
func (c *Client) AcceptNodeID(ctx context.Context, id, nodeID string) error {
	a := newArena()
	cid, cnode := a.text(id), a.text(nodeID)
	return c.done(ctx, a, csi.Volume{}, func(client *C.csi_client, s slot) C.csi_code {
		return C.csi_accept_node_id(client, cid, cnode, s.call, s.op, s.err)
	})
}

// Mount implements [csi.Client].
func (c *Client) Mount(ctx context.Context, v csi.Volume, consumer string, m csi.MountRequest) (*csi.MountInfo, error) {
	a := newArena()
	volume, cconsumer, options := a.volume(m.Usage.Of(v)), a.text(consumer), mountOptions(a, m)
	return one(c, ctx, a, v, func(client *C.csi_client, s slot) C.csi_code {
		return C.csi_mount_volume(client, volume, cconsumer, options, s.call, s.op, s.err)
	}, row.MountInfo)
}

func mountOptions(a *arena, m csi.MountRequest) *C.csi_mount_options {
	options := &C.csi_mount_options{
		struct_size:     C.sizeof_csi_mount_options,
		access_mode:     a.some(string(m.Usage.AccessMode)),
		attachment_mode: a.some(string(m.Usage.AttachmentMode)),
		mount_group:     a.some(m.MountGroup),
		tag:             a.some(m.Tag),
		target:          a.some(m.Target),
		propagation:     a.some(m.Propagation),
		restore:         a.some(m.Restore),
		bind:            a.some(m.Bind),
		grace_usec:      usec(m.Grace),
		publish_context: a.pairs(m.PublishContext),
		wait_usec:       usec(m.Wait),
	}
	set(&options.flags, C.CSI_READ_ONLY, m.Usage.ReadOnly)
	set(&options.flags, C.CSI_SUID, m.SUID)
	set(&options.flags, C.CSI_DEV, m.Dev)
	return options
}

// Unmount implements [csi.Client].
func (c *Client) Unmount(ctx context.Context, v csi.Volume, consumer string, u csi.UnmountOptions) error {
	a := newArena()
	volume, cconsumer, tag := a.volume(v), a.text(consumer), a.some(u.Tag)
	flags := force(u.Force)
	set(&flags, C.CSI_ALL_TAGS, u.AllTags)
	set(&flags, C.CSI_MUST_EXIST, u.MustExist)
	set(&flags, C.CSI_NO_WAIT, u.NoWait)
	set(&flags, C.CSI_FORCE_HUNG, u.ForceHung)
	set(&flags, C.CSI_FORGET, u.Forget)
	return c.done(ctx, a, v, func(client *C.csi_client, s slot) C.csi_code {
		return C.csi_unmount_volume(client, volume, cconsumer, tag, flags, s.call, s.op, s.err)
	})
}

// HasMount implements [csi.Client].
func (c *Client) HasMount(ctx context.Context, source string) (bool, error) {
	a := newArena()
	csource := a.text(source)
	mounted := func(r row.Row) bool { return r.Flag("mounted") }
	return one(c, ctx, a, csi.Volume{}, func(client *C.csi_client, s slot) C.csi_code {
		return C.csi_has_mount(client, csource, s.call, s.op, s.err)
	}, mounted)
}

// ListMounts implements [csi.Client].
func (c *Client) ListMounts(ctx context.Context, f csi.MountFilter) ([]csi.MountRow, error) {
	filter := map[string]string{
		"namespace": f.Namespace,
		"volume":    f.Volume,
		"consumer":  f.Consumer,
		"tag":       f.Tag,
		"plugin":    f.Plugin,
		"state":     f.State,
		"target":    f.Target,
	}
	if f.UID != nil {
		filter["uid"] = strconv.FormatUint(uint64(*f.UID), 10)
	}
	page(filter, f.ListPage)
	return list(c, ctx, "mounts", filter, row.MountRow)
}

// Claim implements [csi.Client].
func (c *Client) Claim(ctx context.Context, v csi.Volume, consumer string, o csi.ClaimOptions) (*csi.Claimed, error) {
	a := newArena()
	volume, cconsumer := a.volume(v), a.text(consumer)
	options := &C.csi_claim_options{
		struct_size:     C.sizeof_csi_claim_options,
		mode:            a.some(o.Mode),
		access_mode:     a.some(string(o.AccessMode)),
		attachment_mode: a.some(string(o.AttachmentMode)),
		node:            a.some(o.Node),
		wait_usec:       usec(o.Wait),
		bind:            a.some(o.Bind),
		grace_usec:      usec(o.Grace),
	}
	return one(c, ctx, a, v, func(client *C.csi_client, s slot) C.csi_code {
		return C.csi_claim(client, volume, cconsumer, options, s.call, s.op, s.err)
	}, row.Claimed)
}

// Release implements [csi.Client].
func (c *Client) Release(ctx context.Context, v csi.Volume, consumer string, o csi.ReleaseOptions) error {
	a := newArena()
	volume, cconsumer, node := a.volume(v), a.text(consumer), a.some(o.Node)
	flags := force(o.Force)
	set(&flags, C.CSI_FORGET, o.Forget)
	return c.done(ctx, a, v, func(client *C.csi_client, s slot) C.csi_code {
		return C.csi_release(client, volume, cconsumer, node, flags, s.call, s.op, s.err)
	})
}

// ListClaims implements [csi.Client].
func (c *Client) ListClaims(ctx context.Context, f csi.ClaimFilter) ([]csi.ClaimRow, error) {
	filter := map[string]string{
		"namespace": f.Namespace,
		"volume":    f.Volume,
		"consumer":  f.Consumer,
		"node":      f.Node,
	}
	if f.Past {
		filter["past"] = "true"
	}
	page(filter, f.ListPage)
	return list(c, ctx, "claims", filter, row.ClaimRow)
}

// page adds a page to the filter.
func page(filter map[string]string, p csi.ListPage) {
	filter["after"] = p.After
	if p.Max != 0 {
		filter["max"] = strconv.FormatUint(uint64(p.Max), 10)
	}
}

// list returns the rows that match every entry of the filter. An empty entry matches all rows.
func list[T any](c *Client, ctx context.Context, kind string, filter map[string]string, read func(row.Row) T) ([]T, error) {
	a := newArena()
	given := map[string]string{}
	for key, value := range filter {
		if value != "" {
			given[key] = value
		}
	}
	ckind, cfilter := a.text(kind), a.pairs(given)
	return all(c, ctx, a, csi.Volume{}, func(client *C.csi_client, s slot) C.csi_code {
		return C.csi_list(client, ckind, cfilter, s.call, s.op, s.err)
	}, read)
}

func force(is bool) (flags C.uint64_t) {
	set(&flags, C.CSI_FORCE, is)
	return
}

// AdoptMount implements [csi.Client].
func (c *Client) AdoptMount(ctx context.Context, v csi.Volume, consumer string, m csi.MountRequest, at csi.AdoptedAt) (*csi.MountInfo, error) {
	a := newArena()
	volume, cconsumer, options := a.volume(m.Usage.Of(v)), a.text(consumer), mountOptions(a, m)
	staging, published := a.some(at.Staging), a.text(at.Published)
	return one(c, ctx, a, v, func(client *C.csi_client, s slot) C.csi_code {
		return C.csi_adopt_mount(client, volume, cconsumer, options, staging, published, s.call, s.op, s.err)
	}, row.MountInfo)
}
