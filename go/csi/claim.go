package csi

import "time"

// ClaimOptions says how a registered volume is claimed. The zero value is to write, on this node, without waiting.
type ClaimOptions struct {
	// "read", "write"
	Mode           string
	AccessMode     AccessMode
	AttachmentMode AttachmentMode
	// Empty: this one.
	Node string
	// How long to wait for the claims that are in the way.
	Wait time.Duration
	// "unit:NAME": what ends the claim in place of Release, and how long after that.
	Bind  string
	Grace time.Duration
}

// Claimed is the volume, and what a node needs to use it.
type Claimed struct {
	VolumeInfo
	// Empty: the plugin attaches nothing.
	PublishContext map[string]string
	ExternalNodeID string
	State          string
}

type ReleaseOptions struct {
	// Empty: this one.
	Node string
	// An operator knows that it is gone: the claim is dropped as it is.
	Force bool
}

// ClaimFilter takes the claims that have all of these.
type ClaimFilter struct {
	Namespace, Volume, Consumer, Node string
	// Those that ended, instead of those that are.
	Past bool
}

type ClaimRow struct {
	Namespace, Volume, Consumer, Node string
	UID                               uint32
	Mode                              string
	AccessMode                        AccessMode
	AttachmentMode                    AttachmentMode
	// pending taken node-detached controller-detached free parked
	State string
	// It is let go.
	Releasing bool
	// A Mount took it, and the last Unmount gives it back.
	ByMount bool
	Bind    string
	Error   string
	// Microseconds since 1970.
	Since       uint64
	ModifyIndex uint64
}
