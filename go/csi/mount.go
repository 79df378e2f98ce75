package csi

import "time"

// MountRequest says how a volume is mounted.
type MountRequest struct {
	Usage UsageOptions
	// Tells several mounts of one consumer apart.
	Tag        string
	MountGroup string
	// A path of the consumer's own, where the published volume is bound too; and how a mount made inside it reaches the
	// host, and back: "private", "host-to-task", "bidirectional".
	Target, Propagation string
	// What a reboot does to it: "auto", it comes back; "hold", it is lost until Mount or Unmount is asked.
	Restore string
	// Whether set-user-ID programs, and device nodes, on it are honoured: root's alone.
	SUID, Dev bool
	// Of a registered volume: "unit:NAME", what ends its claim and with it the mount, and how long after that.
	Bind  string
	Grace time.Duration
	// What AttachVolume, or Claim, answered; nil is none.
	PublishContext map[string]string
}

// MountInfo is where a volume is mounted.
type MountInfo struct {
	// The published path: a directory, or a device node.
	Source   string
	IsDevice bool
}

type UnmountOptions struct {
	Tag string
	// A dead mount is detached lazily.
	Force bool
}

// MountFilter takes the mounts that have all of these. An empty tag is any.
type MountFilter struct {
	Namespace, Volume, Consumer, Tag string
	Plugin                           string
	State                            string
}

type MountRow struct {
	Namespace, Volume, Consumer, Tag string
	Plugin, ExternalID               string
	// mounting mounted unmounting uncertain lost waiting
	State           string
	UID             uint32
	Source, Staging string
	Target          string
	IsDevice        bool
	ReadOnly        bool
	AccessMode      AccessMode
	AttachmentMode  AttachmentMode
	FSType          string
	MountGroup      string
	Restore         string
	Healthy         bool
	Error           string
	Operation       string
	// Microseconds since 1970.
	Since       uint64
	ModifyIndex uint64
}
