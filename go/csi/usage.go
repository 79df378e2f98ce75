package csi

import (
	"fmt"
	"io"
	"log/slog"
	"slices"
)

// AccessMode is who may use a volume at the same time, and how.
type AccessMode string

// The access modes.
const (
	// SingleNodeWriter is one consumer, which reads and writes.
	SingleNodeWriter AccessMode = "single-node-writer"
	// SingleNodeReaderOnly is one consumer, which reads.
	SingleNodeReaderOnly AccessMode = "single-node-reader-only"
	// SingleNodeSingleWriter is one consumer, which reads and writes.
	SingleNodeSingleWriter AccessMode = "single-node-single-writer"
	// SingleNodeMultiWriter is any number of consumers on one node.
	SingleNodeMultiWriter AccessMode = "single-node-multi-writer"
	// MultiNodeReaderOnly is any number of consumers, which read.
	MultiNodeReaderOnly AccessMode = "multi-node-reader-only"
	// MultiNodeSingleWriter is one consumer that writes, and any number that read.
	MultiNodeSingleWriter AccessMode = "multi-node-single-writer"
	// MultiNodeMultiWriter is any number of consumers, which read and write.
	MultiNodeMultiWriter AccessMode = "multi-node-multi-writer"
)

// AttachmentMode is what a volume is used as.
type AttachmentMode string

// The attachment modes.
const (
	// FileSystem mounts the volume's file system.
	FileSystem AttachmentMode = "file-system"
	// BlockDevice gives the volume as a device node.
	BlockDevice AttachmentMode = "block-device"
)

// UsageOptions says how a consumer uses a volume. An empty mode of a registered volume is the one in which it is used, else its
// first capability that fits. For any other volume, and in ToFS and Equal, it is SingleNodeWriter and FileSystem.
type UsageOptions struct {
	// ReadOnly mounts or attaches read-only.
	ReadOnly bool
	// AttachmentMode is what the volume is used as.
	AttachmentMode AttachmentMode
	// AccessMode is who may use the volume at the same time.
	AccessMode AccessMode
	// MountOptions take precedence over those of the volume.
	MountOptions MountOptions
}

// MountOptions are how a file system is mounted. They may contain credentials, so only their number is printed.
type MountOptions struct {
	// FSType is the file system, such as "xfs". Empty: that of the volume.
	FSType string
	// MountFlags are the flags for the plugin. Nil: those of the volume.
	MountFlags []string
}

// String returns the file system and the number of mount flags.
func (m MountOptions) String() string {
	return fmt.Sprintf("%s with %d mount flags", m.FSType, len(m.MountFlags))
}

// Format writes String, whatever the verb is.
func (m MountOptions) Format(f fmt.State, _ rune) { io.WriteString(f, m.String()) }

// LogValue returns String.
func (m MountOptions) LogValue() slog.Value { return slog.StringValue(m.String()) }

// ToFS returns a name of the usage that can be a file name: {ro|rw}-{attachment}-{access}. It distinguishes a consumer's mounts of
// one volume, and does not depend on mount options.
func (u UsageOptions) ToFS() string {
	mode := "rw"
	if u.ReadOnly {
		mode = "ro"
	}
	capability := u.capability()
	return mode + "-" + string(capability.AttachmentMode) + "-" + string(capability.AccessMode)
}

// Equal reports whether two usages have the same values.
func (u UsageOptions) Equal(other UsageOptions) bool {
	return u.ToFS() == other.ToFS() && u.MountOptions.FSType == other.MountOptions.FSType &&
		slices.Equal(u.MountOptions.MountFlags, other.MountOptions.MountFlags)
}

// Of returns the volume with the usage's mount options in place of its own.
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
