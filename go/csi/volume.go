package csi

import (
	"fmt"
	"io"
	"log/slog"
)

// Volume is a volume. A registered one needs Namespace and ID only; any other also needs Plugin and ExternalID, and what else its
// plugin needs. Only the name is printed, because the rest may contain credentials.
type Volume struct {
	// Namespace and ID are the volume's name in csid.
	Namespace string
	ID        string

	// Plugin is the plugin's ID. Empty: the volume is registered.
	Plugin string
	// ExternalID is the plugin's ID of the volume. Empty: the volume is registered, or is to be created.
	ExternalID string
	// Context is the volume context that the plugin returned. Nil means none, which differs from empty.
	Context map[string]string
	// Capabilities are the ways in which the volume can be used.
	Capabilities []Capability
	// FSType is the file system, such as "xfs". Empty: the plugin's default.
	FSType string
	// MountFlags are mount flags for the plugin.
	MountFlags []string

	// Secrets are for this one call. They are sent in a sealed memfd.
	Secrets Secrets
	// Credential is used instead of Secrets: the name of a systemd credential, which csid can load again after a reboot.
	Credential string
}

// String returns NAMESPACE/ID.
func (v Volume) String() string { return v.Namespace + "/" + v.ID }

// Format writes String, whatever the verb is.
func (v Volume) Format(f fmt.State, _ rune) { io.WriteString(f, v.String()) }

// LogValue returns String.
func (v Volume) LogValue() slog.Value { return slog.StringValue(v.String()) }

// Secrets are names and values for a plugin. Only their number is printed. These packages zero the copies they make. Go's strings
// cannot be zeroed, so the map itself stays with the caller.
type Secrets map[string]string

// String returns the number of secrets.
func (s Secrets) String() string { return fmt.Sprintf("%d secrets", len(s)) }

// Format writes String, whatever the verb is.
func (s Secrets) Format(f fmt.State, _ rune) { io.WriteString(f, s.String()) }

// MarshalText returns String, so that encoders do not write the secrets.
func (s Secrets) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// Capability is a way in which a volume can be used.
type Capability struct {
	// AccessMode is who may use the volume at the same time. AttachmentMode is what it is used as.
	AccessMode     AccessMode
	AttachmentMode AttachmentMode
}

// VolumeSpec is what csid is to know of a volume beyond what a [Volume] says.
type VolumeSpec struct {
	// Name is a name for people; CreateVolume gives it to the plugin. Empty: none, and csid names a new volume.
	Name string
	// MountGroup is the group that the plugin gives the volume to at each mount. Empty: none.
	MountGroup string
	// Parameters are for the plugin.
	Parameters map[string]string
	// Topologies are the segments of the places where the volume can be used. Empty: anywhere.
	Topologies []map[string]string
	// Heal is what csid does after a mount died: "report" (the default) or "remount".
	Heal string
	// SUID and Dev honour set-user-ID programs and device nodes on the volume. Root only.
	SUID, Dev bool
}

// CreateSpec is what a new volume is to be. The [Volume] needs the plugin and at least one capability. Its external ID and context
// must be empty, because the plugin returns them.
type CreateSpec struct {
	// VolumeSpec is what csid is to know of the volume.
	VolumeSpec
	// Register says whether csid registers the volume. If not, the caller keeps the result.
	Register bool
	// Capacity is the size. The zero value leaves it to the plugin.
	Capacity CapacityRange
	// Clone is the ID of a volume in the same namespace, Snapshot the plugin's ID of a snapshot, whose content the new volume
	// has. Empty: neither.
	Clone, Snapshot string
}

// CapacityRange is a size in bytes.
type CapacityRange struct {
	// RequiredBytes is the least size.
	RequiredBytes int64
	// LimitBytes is the largest size. 0: no limit.
	LimitBytes int64
}

// Check returns ErrInvalidArgument if a bound is negative.
func (c CapacityRange) Check() error {
	if c.RequiredBytes < 0 || c.LimitBytes < 0 {
		return &Error{Code: ErrInvalidArgument, Message: "a capacity is negative"}
	}
	return nil
}

// Part is a part of an expansion. Empty: all parts.
type Part string

// The parts of an expansion.
const (
	// PartController is what the plugin's controller does.
	PartController Part = "controller"
	// PartNode is what the plugin does on this node.
	PartNode Part = "node"
)

// VolumeInfo is what csid knows of a volume.
type VolumeInfo struct {
	// Namespace and ID are the volume's name in csid, Name is for people, ExternalID is the plugin's ID of the volume.
	Namespace, ID, Name, ExternalID string
	// Plugin is the plugin's ID. Provider and ProviderVersion are the plugin's own name and version.
	Plugin, Provider, ProviderVersion string
	// Context is the volume context, Parameters are those of the registration. Both are missing in a list.
	Context, Parameters map[string]string
	// Capabilities are the ways in which the volume can be used.
	Capabilities []Capability
	// Topologies are the segments of the places where the volume can be used.
	Topologies []map[string]string
	// Credential is the name of the systemd credential with the volume's secrets. Empty: none.
	Credential string
	// FSType is the file system. Empty: the plugin's default.
	FSType string
	// MountGroup is the group that the plugin gives the volume to. Empty: none.
	MountGroup string
	// Heal is "report" or "remount", as in VolumeSpec.
	Heal string
	// Standing is "creating", "registered" or "deleting", or "declared" in a list with VolumeFilter.Declared.
	Standing string
	// ControllerRequired says whether the plugin has to attach the volume.
	ControllerRequired bool
	// Schedulable says whether the plugin offers the services that the volume needs.
	Schedulable bool
	// Capacity is the size in bytes. 0: not known.
	Capacity uint64
	// AccessMode and AttachmentMode are those of the claims. Empty: there are none.
	AccessMode     AccessMode
	AttachmentMode AttachmentMode
	// ReadClaims, WriteClaims and PastClaims are the consumers of the volume's claims.
	ReadClaims, WriteClaims, PastClaims []string
	// UID is the user who registered or created the volume. 0 is also the answer of a csid that does not say it.
	UID uint32
	// PendingExpand is the size in bytes to which a node still has to expand the volume. 0: none.
	PendingExpand uint64
	// ModifyIndex is the index of the last change of the volume's record.
	ModifyIndex uint64
	// Cursor is where a list continues after this row. Empty: the row is not from a list, or csid has no pages.
	Cursor string
}

// VolumeFilter selects the volumes that match all of its fields. An empty field matches any volume.
type VolumeFilter struct {
	// Namespace is the volumes' namespace.
	Namespace string
	// Plugin is the plugin's ID.
	Plugin string
	// Node is a node that has claimed the volume.
	Node string
	// Prefix is what the ID begins with.
	Prefix string
	// Declared also selects volumes that files of volumes.d declare and that are not registered yet.
	Declared bool
	// ListPage is the part of the list.
	ListPage
}

// DeregisterOptions says how DeregisterVolume deregisters a volume.
type DeregisterOptions struct {
	// Force deregisters also a volume that is claimed, and drops its claims as they are.
	Force bool
	// Forget gives up a creation or deletion that never ends. Root only.
	Forget bool
}

// Validated is the result of ValidateVolume.
type Validated struct {
	// Confirmed says whether the volume can be used so.
	Confirmed bool
	// Message says why not, in the plugin's words.
	Message string
}

// Expanded is the result of ExpandVolume.
type Expanded struct {
	// CapacityBytes is the size of the volume.
	CapacityBytes int64
	// NodeExpansionRequired says whether a node still has to expand the volume when it mounts it next.
	NodeExpansionRequired bool
}

// Page is a part of a list. The zero value is the first page, with as many entries as the plugin chooses.
type Page struct {
	// Token is NextToken of the page before. Empty: the first page.
	Token string
	// Max is the largest number of entries. 0: the plugin's choice.
	Max uint32
}

// ExternalVolume is a volume as its plugin knows it, registered with csid or not.
type ExternalVolume struct {
	// ExternalID is the plugin's ID of the volume.
	ExternalID string
	// Capacity is the size in bytes. 0: the plugin does not say.
	Capacity uint64
	// PublishedNodeIDs are the plugin's names of the nodes to which the volume is attached.
	PublishedNodeIDs []string
	// Abnormal says whether the plugin reports the volume as abnormal. Message is the plugin's explanation.
	Abnormal bool
	Message  string
}

// ExternalVolumes are a page of a plugin's volumes. The pages are not one consistent view.
type ExternalVolumes struct {
	// Volumes are the volumes of the page.
	Volumes []ExternalVolume
	// NextToken is the token of the next page. Empty: this is the last one.
	NextToken string
}

// SnapshotFilter selects the snapshots that match all of its fields. An empty field matches any snapshot.
type SnapshotFilter struct {
	// Snapshot is the plugin's ID of the snapshot, ExternalID that of its volume.
	Snapshot, ExternalID string
	// Secrets are for a plugin that needs them to list.
	Secrets Secrets
}

// Snapshots are a page of a plugin's snapshots. The pages are not one consistent view.
type Snapshots struct {
	// Snapshots are the snapshots of the page.
	Snapshots []Snapshot
	// NextToken is the token of the next page. Empty: this is the last one.
	NextToken string
}

// Snapshot is a snapshot of a volume.
type Snapshot struct {
	// ID is the plugin's ID of the snapshot, ExternalID that of its volume.
	ID, ExternalID string
	// Size is the size in bytes. 0: the plugin does not say.
	Size uint64
	// Created is when the snapshot was made, in microseconds since 1970. 0: the plugin does not say.
	Created uint64
	// Ready says whether the snapshot can be used.
	Ready bool
}
