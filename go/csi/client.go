// Package csi is csid as a scheduler's volume manager.
//
// A [Client] is a connection to csid that outlives csid's restarts: package dbus has one in pure Go, package cgo one
// over libcsi, and both do the same. [NewManager] makes a Nomad-like scheduler's volume manager of either.
//
// What always holds:
//   - A context that is cancelled ends its call at once, and what csid does for it: a mount, a claim or an attachment that
//     is under way is undone. A context's deadline goes to csid, which answers then and says what it waited for; a csid that
//     hangs is waited for a second longer. Without a deadline a call waits for as long as it takes.
//   - A call whose answer was lost because csid went away is asked again, under the same name: what was done is not done twice.
//   - What is not there is unmounted, released, detached and deleted already.
//   - Every error of a call is an [*Error].
//   - Everything may be used by many goroutines at once, but for an [Events].
package csi

import "context"

// Client is csid, as it is asked. Of a [Volume] that is registered with csid the namespace and the id are enough; any other
// is given whole.
type Client interface {
	// WaitForPlugin waits until the plugin serves this, and has told csid all about itself.
	WaitForPlugin(ctx context.Context, id string, service Service) (*Plugin, error)
	Plugin(ctx context.Context, id string) (*Plugin, error)
	ListPlugins(ctx context.Context) ([]PluginRow, error)
	// RegisterPlugin tells csid of a plugin, or of another instance of one. The same again changes nothing.
	RegisterPlugin(ctx context.Context, plugin PluginSpec) error
	// UnregisterPlugin lets csid forget a plugin; it is Busy while it has mounts.
	UnregisterPlugin(ctx context.Context, id string, options UnregisterOptions) error
	// AcceptNodeID has volumes attached under the name that the plugin has for this node now, which nodeID says; csid attaches
	// nothing to a node that is called otherwise than before.
	AcceptNodeID(ctx context.Context, id, nodeID string) error

	// Mount answers when the volume is mounted for the consumer. The same again finds the same mount; with other options it
	// is AlreadyExists.
	Mount(ctx context.Context, volume Volume, consumer string, request MountRequest) (*MountInfo, error)
	// Unmount answers when the mount is gone. The volume's namespace and id are looked at alone.
	Unmount(ctx context.Context, volume Volume, consumer string, options UnmountOptions) error
	// HasMount says whether a published path is mounted. One that is missing is not.
	HasMount(ctx context.Context, source string) (bool, error)
	ListMounts(ctx context.Context, filter MountFilter) ([]MountRow, error)

	// Claim answers when the consumer has a registered volume. While others have it, it is Busy or a ClaimConflict,
	// and the error names them.
	Claim(ctx context.Context, volume Volume, consumer string, options ClaimOptions) (*Claimed, error)
	// Release unmounts and detaches what the claim stood for, and lets it go.
	Release(ctx context.Context, volume Volume, consumer string, options ReleaseOptions) error
	ListClaims(ctx context.Context, filter ClaimFilter) ([]ClaimRow, error)

	// RegisterVolume lets csid know a volume that its plugin has.
	RegisterVolume(ctx context.Context, volume Volume, spec VolumeSpec) (*VolumeInfo, error)
	DeregisterVolume(ctx context.Context, volume Volume, options DeregisterOptions) error
	GetVolume(ctx context.Context, volume Volume) (*VolumeInfo, error)
	// ListVolumes gives registered volumes, without context and parameters.
	ListVolumes(ctx context.Context, filter VolumeFilter) ([]VolumeInfo, error)

	// CreateVolume has the plugin make a volume. Asking again what was not answered makes no second one.
	CreateVolume(ctx context.Context, volume Volume, spec CreateSpec) (*VolumeInfo, error)
	// DeleteVolume has the plugin delete a volume, and what is on it.
	DeleteVolume(ctx context.Context, volume Volume) error
	// AttachVolume is for a scheduler that keeps its own claims. nodeID is the plugin's name of the node, [Plugin.NodeID]
	// there; the answer is what a mount there needs as its publish context.
	AttachVolume(ctx context.Context, volume Volume, nodeID string, usage UsageOptions) (map[string]string, error)
	// DetachVolume is Busy while the volume is staged on this node.
	DetachVolume(ctx context.Context, volume Volume, nodeID string) error
	// ValidateVolume asks the plugin whether the volume can be used so.
	ValidateVolume(ctx context.Context, volume Volume, capability Capability) (*Validated, error)
	ExpandVolume(ctx context.Context, volume Volume, capacity CapacityRange, part Part) (*Expanded, error)
	// CreateSnapshot answers when the snapshot can be used.
	CreateSnapshot(ctx context.Context, volume Volume, name string, parameters map[string]string) (*Snapshot, error)

	// Events reads csid's events in order, through csid's restarts. cursor is the [Event.Cursor] of the last one that was
	// dealt with, by this process or an earlier one, through whichever implementation.
	Events(ctx context.Context, cursor string) (Events, error)

	// Close ends the calls that go on, here alone: csid goes on with them, and nothing is unmounted.
	Close() error
}

// Where Client.Events begins without a cursor.
const (
	FromNow   = "now"
	FromFirst = ""
)

// Events is a reader of csid's events, for one goroutine.
type Events interface {
	// Next waits for the next event. A context that ends loses none. Any other error ends the reader: read on with another
	// one, from the last cursor.
	Next(ctx context.Context) (*Event, error)
	Close() error
}
