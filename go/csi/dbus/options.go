package dbus

import (
	"time"

	"github.com/godbus/dbus/v5"

	"github.com/csid-project/csid/go/csi"
)

// options is an a{sv}. An empty value is left out, except a map or a list that is empty and not nil.
type options map[string]dbus.Variant

func (o options) text(key, value string) {
	if value != "" {
		o[key] = dbus.MakeVariant(value)
	}
}

func (o options) flag(key string, value bool) {
	if value {
		o[key] = dbus.MakeVariant(true)
	}
}

func (o options) number(key string, value uint64) {
	if value != 0 {
		o[key] = dbus.MakeVariant(value)
	}
}

func (o options) page(p csi.ListPage) {
	o.text("after", p.After)
	if p.Max != 0 {
		o["max"] = dbus.MakeVariant(p.Max)
	}
}

func (o options) duration(key string, value time.Duration) {
	o.number(key, uint64(max(value, 0).Microseconds()))
}

func (o options) texts(key string, value []string) {
	if value != nil {
		o[key] = dbus.MakeVariant(value)
	}
}

func (o options) pairs(key string, value map[string]string) {
	if value != nil {
		o[key] = dbus.MakeVariant(value)
	}
}

func (o options) capability(c csi.Capability) options {
	o.text("access-mode", string(c.AccessMode))
	o.text("attachment-mode", string(c.AttachmentMode))
	return o
}

func (o options) capabilities(list []csi.Capability) {
	if list == nil {
		return
	}
	value := []map[string]dbus.Variant{}
	for _, c := range list {
		if c.AccessMode == "" {
			c.AccessMode = csi.SingleNodeWriter
		}
		if c.AttachmentMode == "" {
			c.AttachmentMode = csi.FileSystem
		}
		value = append(value, options{}.capability(c))
	}
	o["capabilities"] = dbus.MakeVariant(value)
}

// inline returns the options of a volume that is not registered.
func inline(v csi.Volume) options {
	o := options{}
	o.text("plugin", v.Plugin)
	o.text("external-id", v.ExternalID)
	o.pairs("volume-context", v.Context)
	o.capabilities(v.Capabilities)
	o.text("fs-type", v.FSType)
	o.texts("mount-flags", v.MountFlags)
	return o
}

// spec returns the options that describe a volume.
func spec(v csi.Volume, s csi.VolumeSpec) options {
	o := options{}
	o.text("plugin", v.Plugin)
	o.capabilities(v.Capabilities)
	o.text("fs-type", v.FSType)
	o.texts("mount-flags", v.MountFlags)
	o.text("name", s.Name)
	o.text("mount-group", s.MountGroup)
	o.pairs("parameters", s.Parameters)
	if s.Topologies != nil {
		o["topologies"] = dbus.MakeVariant(s.Topologies)
	}
	o.text("heal", s.Heal)
	o.flag("suid", s.SUID)
	o.flag("dev", s.Dev)
	return o
}
