package csi

import (
	"context"
	"strings"
)

// Manager is a scheduler's volume manager on a node.
type Manager interface {
	// WaitForPlugin waits until the plugin serves this: "node" or "controller", "csi-" before it or not.
	WaitForPlugin(ctx context.Context, pluginType, pluginID string) error
	// MounterForPlugin is NotFound where csid does not know the plugin.
	MounterForPlugin(ctx context.Context, pluginID string) (VolumeMounter, error)
	// Shutdown closes the client. It unmounts nothing.
	Shutdown()
}

// VolumeMounter mounts the volumes of one plugin. A mount is the allocation's, in one usage: csid keeps it, so that another
// process, after any restart, finds it by the same names.
type VolumeMounter interface {
	MountVolume(ctx context.Context, volume *Volume, allocID string, usage *UsageOptions, publishContext map[string]string) (*MountInfo, error)
	// UnmountVolume needs no earlier mount in this process, no mount options and no secrets.
	UnmountVolume(ctx context.Context, namespace, volumeID, externalID, allocID string, usage *UsageOptions) error
	HasMount(ctx context.Context, mount *MountInfo) (bool, error)
	// ExpandVolume does the node's part of an expansion, and answers the volume's size in bytes.
	ExpandVolume(ctx context.Context, namespace, volumeID, externalID, allocID string, usage *UsageOptions, capacity CapacityRange) (int64, error)
	// ExternalID is what the plugin calls this node.
	ExternalID() string
}

// NewManager takes the client over.
func NewManager(client Client) Manager { return manager{client} }

type manager struct{ client Client }

func (m manager) WaitForPlugin(ctx context.Context, pluginType, pluginID string) error {
	_, err := m.client.WaitForPlugin(ctx, pluginID, Service(strings.TrimPrefix(pluginType, "csi-")))
	return err
}

func (m manager) MounterForPlugin(ctx context.Context, pluginID string) (VolumeMounter, error) {
	plugin, err := m.client.Plugin(ctx, pluginID)
	if err != nil {
		return nil, err
	}
	return mounter{m.client, *plugin}, nil
}

func (m manager) Shutdown() { m.client.Close() }

type mounter struct {
	client Client
	plugin Plugin
}

func (m mounter) ExternalID() string { return m.plugin.NodeID }

func (m mounter) MountVolume(ctx context.Context, volume *Volume, allocID string, usage *UsageOptions, publishContext map[string]string) (*MountInfo, error) {
	if volume == nil || usage == nil {
		return nil, missing("a volume and a usage")
	}
	if volume.Plugin != "" && volume.Plugin != m.plugin.ID {
		message := volume.String() + " is plugin " + volume.Plugin + "'s; this mounter is " + m.plugin.ID + "'s"
		return nil, &Error{Code: ErrInvalidArgument, Message: message}
	}
	whole := *volume
	if whole.ExternalID != "" {
		whole.Plugin = m.plugin.ID
	}
	request := MountRequest{Usage: *usage, Tag: usage.ToFS(), PublishContext: publishContext}
	return m.client.Mount(ctx, whole, allocID, request)
}

func (m mounter) UnmountVolume(ctx context.Context, namespace, volumeID, externalID, allocID string, usage *UsageOptions) error {
	if usage == nil {
		return missing("a usage")
	}
	volume := Volume{Namespace: namespace, ID: volumeID}
	return m.client.Unmount(ctx, volume, allocID, UnmountOptions{Tag: usage.ToFS()})
}

func (m mounter) HasMount(ctx context.Context, mount *MountInfo) (bool, error) {
	if mount == nil {
		return false, missing("a mount")
	}
	return m.client.HasMount(ctx, mount.Source)
}

func (m mounter) ExpandVolume(ctx context.Context, namespace, volumeID, externalID, allocID string, usage *UsageOptions, capacity CapacityRange) (int64, error) {
	volume := Volume{Namespace: namespace, ID: volumeID, ExternalID: externalID}
	if externalID != "" {
		volume.Plugin = m.plugin.ID
	}
	expanded, err := m.client.ExpandVolume(ctx, volume, capacity, PartNode)
	if err != nil {
		return 0, err
	}
	return expanded.CapacityBytes, nil
}

func missing(what string) *Error {
	return &Error{Code: ErrInvalidArgument, Message: what + " must be given"}
}
