package csi

import "time"

// ClaimOptions says how a registered volume is claimed. The zero value claims it on this node, as it is used or registered,
// without waiting.
type ClaimOptions struct {
	// Mode is "read" or "write". Empty: "read" with a reader-only access mode, else "write".
	Mode string
	// AccessMode and AttachmentMode are how the volume is used. Empty: as it is used already, else as its first capability that fits.
	AccessMode     AccessMode
	AttachmentMode AttachmentMode
	// Node is the node that claims. Empty: this one. csid refuses any other with ErrNotAuthorized.
	Node string
	// Wait is how long to wait while a claim or an expansion is in the way, or the plugin takes no more volumes on this node. 0: not
	// at all, the error is ErrClaimConflict.
	Wait time.Duration
	// Bind is "unit:NAME": the claim ends when that systemd unit ends. Empty: it ends with Release.
	Bind string
	// Grace is how long the claim lasts after the unit's end. 0: it ends at once.
	Grace time.Duration
}

// Claimed is a claimed volume, with what its node needs to use it.
type Claimed struct {
	// VolumeInfo is the volume.
	VolumeInfo
	// PublishContext is what the plugin returned for the attachment. Empty: it attaches nothing.
	PublishContext map[string]string
	// ExternalNodeID is the plugin's name of the node.
	ExternalNodeID string
	// State is the state of the claim, as in ClaimRow.
	State string
}

// ReleaseOptions says which claim Release drops, and how.
type ReleaseOptions struct {
	// Node is the node that the claim has to be on. Empty: any node.
	Node string
	// Force drops the claim as it is, because an operator knows that its consumer is gone.
	Force bool
	// Forget is the last resort, root only: csid drops the claim and the consumer's mounts though the plugin never acknowledged.
	// The error is ErrBusy while any mount namespace shows one of them.
	Forget bool
}

// ClaimFilter selects the claims that match all of its fields. An empty field matches any claim.
type ClaimFilter struct {
	// Namespace, Volume, Consumer and Node identify claims.
	Namespace, Volume, Consumer, Node string
	// Past selects claims that ended, instead of current ones.
	Past bool
	// ListPage is the part of the list.
	ListPage
}

// ClaimRow is a claim as ListClaims returns it.
type ClaimRow struct {
	// Namespace, Volume and Consumer identify the claim. Node is where the consumer runs.
	Namespace, Volume, Consumer, Node string
	// UID is the user who made the claim.
	UID uint32
	// Mode is "read" or "write".
	Mode string
	// AccessMode and AttachmentMode are how the consumer may use the volume.
	AccessMode     AccessMode
	AttachmentMode AttachmentMode
	// State is pending, taken, node-detached, controller-detached, free or parked.
	State string
	// Releasing says whether the claim is being released.
	Releasing bool
	// ByMount says whether a Mount made the claim. The last Unmount of the consumer then releases it.
	ByMount bool
	// Bind is the unit or connection that the claim ends with. Empty: it ends with Release.
	Bind string
	// Error is why the claim is not in its wanted state. Empty: none.
	Error string
	// Since is when the claim was made, in microseconds since 1970.
	Since uint64
	// ModifyIndex is the index of the last change of the volume's record.
	ModifyIndex uint64
	// Cursor is where a list continues after this row. Empty: the row is not from a list, or csid has no pages.
	Cursor string
}
