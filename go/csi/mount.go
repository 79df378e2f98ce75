package csi

import "time"

// MountRequest says how a volume is mounted. The zero value mounts it to read and write, with the empty tag.
type MountRequest struct {
	// Usage is how the consumer uses the volume.
	Usage UsageOptions
	// Tag distinguishes several mounts by one consumer. It may be empty.
	Tag string
	// MountGroup is the group that the plugin gives the volume to. Empty: that of the registration, or none.
	MountGroup string
	// Target is an absolute path of the consumer, where csid binds the published volume. Empty: none. Propagation is how a mount
	// made inside it reaches the host, and back: "private" (the default), "host-to-task" or "bidirectional" (root only).
	Target, Propagation string
	// Restore is what csid does after a reboot: "auto" mounts again, "hold" keeps the row as lost until Mount or Unmount. Empty:
	// "auto" for a registered volume, "hold" for any other.
	Restore string
	// SUID and Dev honour set-user-ID programs and device nodes on the volume. Root only.
	SUID, Dev bool
	// Bind is "unit:NAME": the claim of a registered volume, and with it the mount, ends when that systemd unit ends. Empty: it
	// ends with Unmount.
	Bind string
	// Grace is how long the claim lasts after the unit's end. 0: it ends at once.
	Grace time.Duration
	// Wait is how long to wait while a claim, mount or expansion is in the way, or the plugin takes no more volumes on this node.
	// 0: not at all, the error is ErrClaimConflict.
	Wait time.Duration
	// PublishContext is what AttachVolume returned, for a volume that is given whole. Nil: none. csid knows that of a claim.
	PublishContext map[string]string
}

// MountInfo is where a volume is mounted.
type MountInfo struct {
	// Source is the published path: a directory or a device node.
	Source string
	// IsDevice says whether Source is a device node.
	IsDevice bool
}

// UnmountOptions says which mounts Unmount removes, and how.
type UnmountOptions struct {
	// Tag is the tag of the mount.
	Tag string
	// AllTags unmounts every mount of the consumer. Tag must be empty.
	AllTags bool
	// MustExist makes a missing mount ErrNotFound. Error.Tags then names the consumer's existing mounts. Error.Holders has
	// "mount PATH" for each mount of the volume that is not csid's, which csid sees only while it has the volume staged or
	// published. If csid was restarted during the call, ErrNotFound may mean that this call has unmounted it.
	MustExist bool
	// Force detaches a dead mount lazily.
	Force bool
	// ForceHung also detaches a mount whose server does not answer a probe made now. Root only.
	ForceHung bool
	// Forget is the last resort, root only: csid drops the row though the plugin never acknowledged. The error is ErrBusy while
	// any mount namespace shows a mount of it.
	Forget bool
	// NoWait ends the call after the first try, with its error if it failed. csid goes on, and the event "unmount" reports the
	// end.
	NoWait bool
}

// MountFilter selects the mounts that match all of its fields. An empty field matches any mount.
type MountFilter struct {
	// Namespace, Volume, Consumer and Tag identify mounts.
	Namespace, Volume, Consumer, Tag string
	// Plugin is a plugin's ID.
	Plugin string
	// State is a state as in MountRow.
	State string
	// Target is the exact path of a target.
	Target string
	// UID is the user that owns a mount. Nil: any.
	UID *uint32
	// ListPage is the part of the list.
	ListPage
}

// ListPage is a part of one of csid's lists. The zero value is all of it. csid needs the feature "pages".
type ListPage struct {
	// After is the Cursor of the last row of the page before, with the same filter. Empty: the first page.
	After string
	// Max is the largest number of rows. 0: no limit.
	Max uint32
}

// MountRow is a mount as ListMounts returns it.
type MountRow struct {
	// Namespace, Volume, Consumer and Tag identify the mount.
	Namespace, Volume, Consumer, Tag string
	// Plugin is the plugin's ID, ExternalID its ID of the volume.
	Plugin, ExternalID string
	// State is mounting, mounted, unmounting, uncertain, lost or waiting.
	State string
	// UID is the user who made the mount.
	UID uint32
	// Source is the published path. Staging is the staging path; empty if the plugin does not stage.
	Source, Staging string
	// Target is the consumer's path. Empty: none.
	Target string
	// IsDevice says whether Source is a device node.
	IsDevice bool
	// ReadOnly says whether the mount is read-only.
	ReadOnly bool
	// AccessMode is the access mode of the mount.
	AccessMode AccessMode
	// AttachmentMode is the attachment mode of the mount.
	AttachmentMode AttachmentMode
	// FSType is the file system that was asked for. Empty: the plugin's default.
	FSType string
	// MountGroup is the group that the plugin was given. Empty: none.
	MountGroup string
	// Restore is "auto" or "hold", as in MountRequest.
	Restore string
	// Healthy says whether the kernel shows the mount as it should be.
	Healthy bool
	// Error is the reason if the mount is not in state mounted or not healthy. Empty: none.
	Error string
	// Operation is the ID of the operation in progress. Empty: none.
	Operation string
	// Since is when the state was reached, in microseconds since 1970.
	Since uint64
	// ModifyIndex is the index of the last change of the row.
	ModifyIndex uint64
	// Cursor is where a list continues after this row. Empty: the row is not from a list, or csid has no pages.
	Cursor string
}

// AdoptedAt is where another manager has a mount.
type AdoptedAt struct {
	// Staging is where the volume is staged. Empty: its plugin does not stage.
	Staging string
	// Published is where the volume is published for the consumer.
	Published string
}
