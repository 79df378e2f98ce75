package csi

import (
	"fmt"
	"io"
	"log/slog"
	"slices"
)

// AccessMode says who may use a volume at once, and how.
type AccessMode string

const (
	SingleNodeWriter       AccessMode = "single-node-writer"
	SingleNodeReaderOnly   AccessMode = "single-node-reader-only"
	SingleNodeSingleWriter AccessMode = "single-node-single-writer"
	SingleNodeMultiWriter  AccessMode = "single-node-multi-writer"
	MultiNodeReaderOnly    AccessMode = "multi-node-reader-only"
	MultiNodeSingleWriter  AccessMode = "multi-node-single-writer"
	MultiNodeMultiWriter   AccessMode = "multi-node-multi-writer"
)

// AttachmentMode says as what a volume is used.
type AttachmentMode string

const (
	FileSystem  AttachmentMode = "file-system"
	BlockDevice AttachmentMode = "block-device"
)

// UsageOptions says how a consumer uses a volume. An empty mode is a single node's writer of a file system.
type UsageOptions struct {
	ReadOnly       bool
	AttachmentMode AttachmentMode
	AccessMode     AccessMode
	// What is given here stands before what the volume has.
	MountOptions MountOptions
}

// MountOptions are a file system's. They may hold credentials, and print as their number alone.
type MountOptions struct {
	FSType     string
	MountFlags []string
}

func (m MountOptions) String() string {
	return fmt.Sprintf("%s with %d mount flags", m.FSType, len(m.MountFlags))
}

func (m MountOptions) Format(f fmt.State, _ rune) { io.WriteString(f, m.String()) }

func (m MountOptions) LogValue() slog.Value { return slog.StringValue(m.String()) }

// ToFS names the usage as a file could be named: {ro|rw}-{attachment}-{access}. It tells a consumer's mounts of one volume
// apart, and does not depend on mount options.
func (u UsageOptions) ToFS() string {
	mode := "rw"
	if u.ReadOnly {
		mode = "ro"
	}
	capability := u.capability()
	return mode + "-" + string(capability.AttachmentMode) + "-" + string(capability.AccessMode)
}

// Equal compares values: two usages that were built apart are one.
func (u UsageOptions) Equal(other UsageOptions) bool {
	return u.ToFS() == other.ToFS() && u.MountOptions.FSType == other.MountOptions.FSType &&
		slices.Equal(u.MountOptions.MountFlags, other.MountOptions.MountFlags)
}

// Of is the volume as it is used so, with the mount options that stand before its own.
func (u UsageOptions) Of(volume Volume) Volume {
	if u.MountOptions.FSType != "" {
		volume.FSType = u.MountOptions.FSType
	}
	if u.MountOptions.MountFlags != nil {
		volume.MountFlags = u.MountOptions.MountFlags
	}
	return volume
}

func (u UsageOptions) capability() Capability {
	capability := Capability{u.AccessMode, u.AttachmentMode}
	if capability.AccessMode == "" {
		capability.AccessMode = SingleNodeWriter
	}
	if capability.AttachmentMode == "" {
		capability.AttachmentMode = FileSystem
	}
	return capability
}
