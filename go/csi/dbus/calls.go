package dbus

import (
	"context"
	"maps"

	"github.com/godbus/dbus/v5"

	"github.com/csid-project/csid/go/csi"
	"github.com/csid-project/csid/go/internal/row"
)

// WaitForPlugin implements [csi.Client].
func (c *Client) WaitForPlugin(ctx context.Context, id string, service csi.Service) (*csi.Plugin, error) {
	if _, err := c.call(ctx, "WaitForPlugin", csi.Volume{}, options{}, []string{"path"}, id, string(service)); err != nil {
		return nil, err
	}
	return c.Plugin(ctx, id)
}

// Plugin implements [csi.Client].
func (c *Client) Plugin(ctx context.Context, id string) (*csi.Plugin, error) {
	body, err := c.properties(ctx, pluginPath(id), plugin)
	if err != nil {
		return nil, err
	}
	return row.Plugin(body), nil
}

// ListPlugins implements [csi.Client].
func (c *Client) ListPlugins(ctx context.Context) ([]csi.PluginRow, error) {
	r := request{path: root, iface: manager, member: "ListPlugins", names: []string{"rows"}, short: true}
	body, err := c.ask(ctx, r)
	return row.Each(body.tuples("rows", "id", "state", "provider", "supervision"), row.PluginRow), err
}

// RegisterPlugin implements [csi.Client].
func (c *Client) RegisterPlugin(ctx context.Context, p csi.PluginSpec) error {
	o := options{}
	o.text("supervision", p.Supervision)
	o.text("unit", p.Unit)
	o.text("socket", p.Socket)
	o.text("instance", p.Instance)
	o.text("plugin-root", p.PluginRoot)
	o.text("plugin-view", p.PluginView)
	o.texts("argv", p.Argv)
	o.pairs("environment", p.Environment)
	o.texts("credentials", p.Credentials)
	o.text("log", p.Log)
	o.text("profile", p.Profile)
	o.text("propagation", p.Propagation)
	o.text("network", p.Network)
	_, err := c.call(ctx, "RegisterPlugin", csi.Volume{}, o, []string{"path"}, p.ID)
	return err
}

// UnregisterPlugin implements [csi.Client].
func (c *Client) UnregisterPlugin(ctx context.Context, id string, u csi.UnregisterOptions) error {
	o := options{}
	o.text("instance", u.Instance)
	o.flag("force", u.Force)
	_, err := c.call(ctx, "UnregisterPlugin", csi.Volume{}, o, nil, id)
	return err
}

// AcceptNodeID implements [csi.Client].
func (c *Client) AcceptNodeID(ctx context.Context, id, nodeID string) error {
	r := request{path: pluginPath(id), iface: plugin, member: "AcceptNodeId", args: []any{nodeID}, options: options{}}
	_, err := c.ask(ctx, r)
	return err
}

// Mount implements [csi.Client].
func (c *Client) Mount(ctx context.Context, v csi.Volume, consumer string, m csi.MountRequest) (*csi.MountInfo, error) {
	return c.mount(ctx, "Mount", v, consumer, mountOptions(v, m))
}

func mountOptions(v csi.Volume, m csi.MountRequest) options {
	o := inline(m.Usage.Of(v)).capability(csi.Capability{AccessMode: m.Usage.AccessMode, AttachmentMode: m.Usage.AttachmentMode})
	o.flag("read-only", m.Usage.ReadOnly)
	o.text("tag", m.Tag)
	o.text("mount-group", m.MountGroup)
	o.text("target", m.Target)
	o.text("propagation", m.Propagation)
	o.text("restore", m.Restore)
	o.flag("suid", m.SUID)
	o.flag("dev", m.Dev)
	o.text("bind", m.Bind)
	o.duration("grace-usec", m.Grace)
	o.duration("wait-usec", m.Wait)
	o.pairs("publish-context", m.PublishContext)
	return o
}

func (c *Client) mount(ctx context.Context, member string, v csi.Volume, consumer string, o options) (*csi.MountInfo, error) {
	body, err := c.call(ctx, member, v, o, []string{"source", "is-device"}, v.Namespace, v.ID, consumer)
	if err != nil {
		return nil, err
	}
	return row.MountInfo(body), nil
}

// Unmount implements [csi.Client].
func (c *Client) Unmount(ctx context.Context, v csi.Volume, consumer string, u csi.UnmountOptions) error {
	o := options{}
	o.text("tag", u.Tag)
	o.flag("all-tags", u.AllTags)
	o.flag("must-exist", u.MustExist)
	o.flag("force", u.Force)
	o.flag("force-hung", u.ForceHung)
	o.flag("forget", u.Forget)
	if u.NoWait {
		o["wait"] = dbus.MakeVariant(false)
	}
	_, err := c.call(ctx, "Unmount", v, o, nil, v.Namespace, v.ID, consumer)
	return err
}

// HasMount implements [csi.Client].
func (c *Client) HasMount(ctx context.Context, source string) (bool, error) {
	body, err := c.call(ctx, "HasMount", csi.Volume{}, nil, []string{"mounted"}, source)
	return body.Flag("mounted"), err
}

// ListMounts implements [csi.Client].
func (c *Client) ListMounts(ctx context.Context, f csi.MountFilter) ([]csi.MountRow, error) {
	o := options{}
	o.text("namespace", f.Namespace)
	o.text("volume", f.Volume)
	o.text("consumer", f.Consumer)
	o.text("tag", f.Tag)
	o.text("plugin", f.Plugin)
	o.text("state", f.State)
	o.text("target", f.Target)
	if f.UID != nil {
		o["uid"] = dbus.MakeVariant(*f.UID)
	}
	o.page(f.ListPage)
	rows, err := c.list(ctx, "ListMounts", o)
	return row.Each(rows, row.MountRow), err
}

// Claim implements [csi.Client].
func (c *Client) Claim(ctx context.Context, v csi.Volume, consumer string, claim csi.ClaimOptions) (*csi.Claimed, error) {
	o := options{}.capability(csi.Capability{AccessMode: claim.AccessMode, AttachmentMode: claim.AttachmentMode})
	o.text("mode", claim.Mode)
	o.text("node", claim.Node)
	o.duration("wait-usec", claim.Wait)
	o.text("bind", claim.Bind)
	o.duration("grace-usec", claim.Grace)
	body, err := c.call(ctx, "Claim", v, o, nil, v.Namespace, v.ID, consumer)
	if err != nil {
		return nil, err
	}
	return row.Claimed(body), nil
}

// Release implements [csi.Client].
func (c *Client) Release(ctx context.Context, v csi.Volume, consumer string, r csi.ReleaseOptions) error {
	o := options{}
	o.text("node", r.Node)
	o.flag("force", r.Force)
	o.flag("forget", r.Forget)
	_, err := c.call(ctx, "Release", v, o, nil, v.Namespace, v.ID, consumer)
	return err
}

// ListClaims implements [csi.Client].
func (c *Client) ListClaims(ctx context.Context, f csi.ClaimFilter) ([]csi.ClaimRow, error) {
	o := options{}
	o.text("namespace", f.Namespace)
	o.text("volume", f.Volume)
	o.text("consumer", f.Consumer)
	o.text("node", f.Node)
	o.flag("past", f.Past)
	o.page(f.ListPage)
	rows, err := c.list(ctx, "ListClaims", o)
	return row.Each(rows, row.ClaimRow), err
}

// RegisterVolume implements [csi.Client].
func (c *Client) RegisterVolume(ctx context.Context, v csi.Volume, s csi.VolumeSpec) (*csi.VolumeInfo, error) {
	o := spec(v, s)
	o.text("external-id", v.ExternalID)
	o.pairs("context", v.Context)
	return c.volume(ctx, "RegisterVolume", v, o)
}

// DeregisterVolume implements [csi.Client].
func (c *Client) DeregisterVolume(ctx context.Context, v csi.Volume, d csi.DeregisterOptions) error {
	o := options{}
	o.flag("force", d.Force)
	o.flag("forget", d.Forget)
	_, err := c.call(ctx, "DeregisterVolume", v, o, nil, v.Namespace, v.ID)
	return err
}

// GetVolume implements [csi.Client].
func (c *Client) GetVolume(ctx context.Context, v csi.Volume) (*csi.VolumeInfo, error) {
	return c.volume(ctx, "GetVolume", v, nil)
}

// ListVolumes implements [csi.Client].
func (c *Client) ListVolumes(ctx context.Context, f csi.VolumeFilter) ([]csi.VolumeInfo, error) {
	o := options{}
	o.text("namespace", f.Namespace)
	o.text("plugin", f.Plugin)
	o.text("node", f.Node)
	o.text("prefix", f.Prefix)
	o.flag("declared", f.Declared)
	o.page(f.ListPage)
	rows, err := c.list(ctx, "ListVolumes", o)
	return row.Each(rows, row.VolumeInfo), err
}

// CreateVolume implements [csi.Client].
func (c *Client) CreateVolume(ctx context.Context, v csi.Volume, s csi.CreateSpec) (*csi.VolumeInfo, error) {
	if err := s.Capacity.Check(); err != nil {
		return nil, err
	}
	o := spec(v, s.VolumeSpec)
	o.number("capacity-min", uint64(s.Capacity.RequiredBytes))
	o.number("capacity-max", uint64(s.Capacity.LimitBytes))
	o.text("clone", s.Clone)
	o.text("snapshot", s.Snapshot)
	o["register"] = dbus.MakeVariant(s.Register)
	return c.volume(ctx, "CreateVolume", v, o)
}

// volume makes a call whose answer is one volume.
func (c *Client) volume(ctx context.Context, member string, v csi.Volume, o options) (*csi.VolumeInfo, error) {
	body, err := c.call(ctx, member, v, o, nil, v.Namespace, v.ID)
	if err != nil {
		return nil, err
	}
	info := row.VolumeInfo(body)
	return &info, nil
}

// DeleteVolume implements [csi.Client].
func (c *Client) DeleteVolume(ctx context.Context, v csi.Volume) error {
	_, err := c.call(ctx, "DeleteVolume", v, inline(v), nil, v.Namespace, v.ID)
	return err
}

// AttachVolume implements [csi.Client].
func (c *Client) AttachVolume(ctx context.Context, v csi.Volume, nodeID string, u csi.UsageOptions) (map[string]string, error) {
	o := inline(u.Of(v)).capability(csi.Capability{AccessMode: u.AccessMode, AttachmentMode: u.AttachmentMode})
	o.flag("read-only", u.ReadOnly)
	body, err := c.call(ctx, "AttachVolume", v, o, []string{"publish-context"}, v.Namespace, v.ID, nodeID)
	return body.Map("publish-context"), err
}

// DetachVolume implements [csi.Client].
func (c *Client) DetachVolume(ctx context.Context, v csi.Volume, nodeID string) error {
	_, err := c.call(ctx, "DetachVolume", v, inline(v), nil, v.Namespace, v.ID, nodeID)
	return err
}

// ValidateVolume implements [csi.Client].
func (c *Client) ValidateVolume(ctx context.Context, v csi.Volume, capabilities ...csi.Capability) (*csi.Validated, error) {
	if len(capabilities) > 0 {
		v.Capabilities = capabilities
	}
	o := inline(v)
	body, err := c.call(ctx, "ValidateVolume", v, o, []string{"confirmed", "message"}, v.Namespace, v.ID)
	if err != nil {
		return nil, err
	}
	return row.Validated(body), nil
}

// ExpandVolume implements [csi.Client].
func (c *Client) ExpandVolume(ctx context.Context, v csi.Volume, capacity csi.CapacityRange, part csi.Part) (*csi.Expanded, error) {
	if err := capacity.Check(); err != nil {
		return nil, err
	}
	o := inline(v)
	o.text("part", string(part))
	names := []string{"capacity-bytes", "node-expansion-required"}
	required, limit := uint64(capacity.RequiredBytes), uint64(capacity.LimitBytes)
	body, err := c.call(ctx, "ExpandVolume", v, o, names, v.Namespace, v.ID, required, limit)
	if err != nil {
		return nil, err
	}
	return row.Expanded(body), nil
}

// CreateSnapshot implements [csi.Client].
func (c *Client) CreateSnapshot(ctx context.Context, v csi.Volume, name string, parameters map[string]string) (*csi.Snapshot, error) {
	return c.snapshot(ctx, v, name, parameters, options{})
}

// BeginSnapshot implements [csi.Client].
func (c *Client) BeginSnapshot(ctx context.Context, v csi.Volume, name string, parameters map[string]string) (*csi.Snapshot, error) {
	return c.snapshot(ctx, v, name, parameters, options{"wait": dbus.MakeVariant(false)})
}

func (c *Client) snapshot(ctx context.Context, v csi.Volume, name string, parameters map[string]string, how options) (*csi.Snapshot, error) {
	o := inline(v)
	maps.Copy(o, how)
	o.pairs("parameters", parameters)
	body, err := c.call(ctx, "CreateSnapshot", v, o, nil, v.Namespace, v.ID, name)
	if err != nil {
		return nil, err
	}
	return row.Snapshot(body), nil
}

// ListExternalVolumes implements [csi.Client].
func (c *Client) ListExternalVolumes(ctx context.Context, id string, page csi.Page) (*csi.ExternalVolumes, error) {
	r := request{path: pluginPath(id), iface: plugin, member: "ListExternalVolumes", args: []any{page.Token, page.Max}}
	r.names = []string{"volumes", "next-token"}
	body, err := c.ask(ctx, r)
	if err != nil {
		return nil, err
	}
	return row.ExternalVolumes(body), nil
}

// ListSnapshots implements [csi.Client].
func (c *Client) ListSnapshots(ctx context.Context, id string, f csi.SnapshotFilter, page csi.Page) (*csi.Snapshots, error) {
	o := options{}
	o.text("snapshot", f.Snapshot)
	o.text("volume", f.ExternalID)
	o.text("token", page.Token)
	if page.Max != 0 {
		o["max"] = dbus.MakeVariant(page.Max)
	}
	r := request{path: pluginPath(id), iface: plugin, member: "ListSnapshots", options: o}
	r.names, r.volume = []string{"snapshots", "next-token"}, csi.Volume{Secrets: f.Secrets}
	body, err := c.ask(ctx, r)
	if err != nil {
		return nil, err
	}
	return row.Snapshots(body), nil
}

// DeleteSnapshot implements [csi.Client].
func (c *Client) DeleteSnapshot(ctx context.Context, id, snapshot string, secrets csi.Secrets) error {
	r := request{path: pluginPath(id), iface: plugin, member: "DeleteSnapshot", args: []any{snapshot}, options: options{}}
	r.volume = csi.Volume{Secrets: secrets}
	_, err := c.ask(ctx, r)
	return err
}

// AdoptMount implements [csi.Client].
func (c *Client) AdoptMount(ctx context.Context, v csi.Volume, consumer string, m csi.MountRequest, at csi.AdoptedAt) (*csi.MountInfo, error) {
	o := mountOptions(v, m)
	o.text("staging-path", at.Staging)
	o.text("published-path", at.Published)
	return c.mount(ctx, "AdoptMount", v, consumer, o)
}
