package csi

import (
	"context"
	"strings"
)

// Manager is a scheduler's volume manager on a node.
type Manager interface {
	// WaitForPlugin waits until the plugin serves pluginType: "node" or "controller", with or without "csi-" in front. The error is
	// [ErrTimedOut] if it does not become ready in time.
	WaitForPlugin(ctx context.Context, pluginType, pluginID string) error
	// MounterForPlugin returns the mounter of a plugin. The error is [ErrNotFound] if no such plugin is registered.
	MounterForPlugin(ctx context.Context, pluginID string) (VolumeMounter, error)
	// Shutdown closes the client. It unmounts nothing.
	Shutdown()
}

// VolumeMounter mounts the volumes of one plugin. A mount belongs to an allocation in one usage. csid keeps it, so another
// process finds it by the same names after any restart.
type VolumeMounter interface {
	// MountVolume mounts the volume for the allocation and returns where. The same call again returns the same mount. The errors
	// are those of Client.Mount, and [ErrInvalidArgument] if volume or usage is nil or the volume is another plugin's.
	MountVolume(ctx context.Context, volume *Volume, allocID string, usage *UsageOptions, publishContext map[string]string) (*MountInfo, error)
	// UnmountVolume unmounts the volume from the allocation. It needs no earlier mount in this process, no mount options and no
	// secrets. It returns after the first try, with the plugin's error if there was one; csid goes on by itself. A missing mount is
	// success. The errors are those of Client.Unmount.
	UnmountVolume(ctx context.Context, namespace, volumeID, externalID, allocID string, usage *UsageOptions) error
	// HasMount asks the kernel whether the mount exists.
	HasMount(ctx context.Context, mount *MountInfo) (bool, error)
	// ExpandVolume does the node's part of an expansion and returns the volume's size in bytes. The errors are those of
	// Client.ExpandVolume.
	ExpandVolume(ctx context.Context, namespace, volumeID, externalID, allocID string, usage *UsageOptions, capacity CapacityRange) (int64, error)
	// ExternalID returns the plugin's name of this node.
	ExternalID() string
	// AdoptVolume takes over what the scheduler's earlier manager mounted with these arguments, while the allocation runs. Root only.
	// UnmountVolume unmounts it like any other. See Client.AdoptMount, also for the errors.
	AdoptVolume(ctx context.Context, volume *Volume, allocID string, usage *UsageOptions, publishContext map[string]string, at AdoptedAt) (*MountInfo, error)
}

// NewManager returns a manager that uses client and closes it with Shutdown.
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
	whole, request, err := m.wanted(volume, usage, publishContext)
	if err != nil {
		return nil, err
	}
	return m.client.Mount(ctx, whole, allocID, request)
}

func (m mounter) AdoptVolume(ctx context.Context, volume *Volume, allocID string, usage *UsageOptions, publishContext map[string]string, at AdoptedAt) (*MountInfo, error) {
	whole, request, err := m.wanted(volume, usage, publishContext)
	if err != nil {
		return nil, err
	}
	return m.client.AdoptMount(ctx, whole, allocID, request, at)
}

// wanted is the volume as this plugin's, and its mount in this usage.
func (m mounter) wanted(volume *Volume, usage *UsageOptions, publishContext map[string]string) (Volume, MountRequest, error) {
	if volume == nil || usage == nil {
		return Volume{}, MountRequest{}, missing("a volume and a usage")
	}
	if volume.Plugin != "" && volume.Plugin != m.plugin.ID {
		message := volume.String() + " is plugin " + volume.Plugin + "'s; this mounter is " + m.plugin.ID + "'s"
		return Volume{}, MountRequest{}, &Error{Code: ErrInvalidArgument, Message: message}
	}
	whole := *volume
	if whole.ExternalID == "" {
		// csid knows what a registered volume's plugin has answered, and refuses another word of it.
		return whole, MountRequest{Usage: *usage, Tag: usage.ToFS()}, nil
	}
	whole.Plugin = m.plugin.ID
	return whole, MountRequest{Usage: *usage, Tag: usage.ToFS(), PublishContext: publishContext}, nil
}

func (m mounter) UnmountVolume(ctx context.Context, namespace, volumeID, externalID, allocID string, usage *UsageOptions) error {
	if usage == nil {
		return missing("a usage")
	}
	volume := Volume{Namespace: namespace, ID: volumeID}
	return m.client.Unmount(ctx, volume, allocID, UnmountOptions{Tag: usage.ToFS(), NoWait: true})
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
