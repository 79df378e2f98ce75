// Package csi is the client side of csid for schedulers: the interface [Client], its types and its errors.
//
// A [Client] is a connection to csid that outlives csid's restarts. Package dbus implements it in pure Go, package cgo over
// libcsi; both behave alike. [NewManager] makes the volume manager of a Nomad-like scheduler from either.
//
// Contexts: a cancelled context ends its call at once, and csid rolls back a mount, a claim or an attachment in progress. A
// context's deadline is sent to csid, which answers then and says what it waited for. If csid does not answer, the call ends a
// second later. Without a deadline csid tries an operation as long as its configuration says ([deadlines] operation of
// csid.toml, by default two minutes).
//
// Restarts: a call whose answer was lost because csid went away is repeated under the same name. csid does nothing twice.
//
// Missing objects: unmounting, releasing, detaching or deleting what does not exist succeeds.
//
// Errors: every error of a call is an [*Error]. Compare it with a [Code] by [errors.Is]. Every call may return
// [ErrInvalidArgument], [ErrNotAuthorized], [ErrRateLimited], [ErrTimedOut], [ErrCancelled], [ErrDisconnected],
// [ErrNotSupported] (this csid does not serve the call), [ErrUnavailable] (this host is in a cluster, and no server of the
// cluster can be asked now) and [ErrInternal]. A call that changes something may return [ErrStateCorrupt]. A call that asks a
// plugin may return [ErrPlugin], [ErrPluginUnavailable], [ErrPluginShutdown], [ErrUncertain] and [ErrSecretRequired]. The
// methods list the others.
//
// Goroutines: everything may be used by several goroutines at once, except an [Events].
package csi

import "context"

// Client is a connection to csid that outlives csid's restarts. Open of package dbus or cgo makes one. A [Volume] that is
// registered with csid needs only its namespace and ID; any other is given whole.
type Client interface {
	// WaitForPlugin waits until the plugin serves the service, also if it is not registered yet, and returns its properties.
	// The error is [ErrTimedOut] if it does not become ready in time.
	WaitForPlugin(ctx context.Context, id string, service Service) (*Plugin, error)
	// Plugin returns the properties of a plugin. The error is [ErrNotFound] if no such plugin is registered.
	Plugin(ctx context.Context, id string) (*Plugin, error)
	// ListPlugins returns the registered plugins.
	ListPlugins(ctx context.Context) ([]PluginRow, error)
	// RegisterPlugin registers a plugin, or another instance of one. The same call again changes nothing. The error is
	// [ErrAlreadyExists] if the instance has another specification, or the socket belongs to another plugin.
	RegisterPlugin(ctx context.Context, plugin PluginSpec) error
	// UnregisterPlugin unregisters a plugin or one instance of it. The error is [ErrBusy] while volumes of the plugin are mounted,
	// claimed or attached here, unless options.Force is set, and [ErrNotSupported] if a file in plugins.d defines the plugin.
	UnregisterPlugin(ctx context.Context, id string, options UnregisterOptions) error
	// AcceptNodeID accepts a changed node ID of the plugin. csid attaches nothing to this node until then. Existing attachments
	// keep the ID they were made with. The error is [ErrInvalidArgument] if nodeID is not the current one,
	// [ErrPluginUnavailable] if that is not known, and [ErrNotFound] if no such plugin is registered.
	AcceptNodeID(ctx context.Context, id, nodeID string) error

	// Mount mounts the volume for the consumer and returns the published path. A registered volume is claimed too. The same
	// call again returns the same mount. The error is [ErrNotFound] if the volume or its plugin is unknown, [ErrAlreadyExists] if
	// the consumer has the mount with other options, [ErrClaimConflict] if others' claims or mounts are in the way, and
	// [ErrBusy] if the volume is being created or deleted or, in a cluster, the host drains. If ctx is cancelled,
	// csid rolls the mount back; one that was complete stays, so unmount it.
	Mount(ctx context.Context, volume Volume, consumer string, request MountRequest) (*MountInfo, error)
	// Unmount unmounts the volume from the consumer and returns when the mount is gone, unless options.NoWait is set. Only the
	// namespace and ID of the volume are used. The error is [ErrBusy] while processes or other mount namespaces use the mount,
	// and [ErrNotFound] only if options.MustExist is set. If ctx is cancelled, csid goes on.
	Unmount(ctx context.Context, volume Volume, consumer string, options UnmountOptions) error
	// HasMount asks the kernel whether a published path is mounted. A missing path is not.
	HasMount(ctx context.Context, source string) (bool, error)
	// ListMounts returns the mounts that match the filter.
	ListMounts(ctx context.Context, filter MountFilter) ([]MountRow, error)

	// Claim claims a registered volume for the consumer, and attaches it where its plugin attaches. The same call again
	// returns the same claim. The error is [ErrNotFound] if the volume is not registered, [ErrAlreadyExists] if the consumer has
	// claimed it with other options, [ErrClaimConflict] if others' claims are in the way, and [ErrBusy] if the volume is being
	// created or deleted or, in a cluster, the host drains. If ctx is cancelled,
	// csid rolls the claim back; one that was complete stays, so release it.
	Claim(ctx context.Context, volume Volume, consumer string, options ClaimOptions) (*Claimed, error)
	// Release unmounts what the consumer has mounted here, detaches the volume and drops the claim. The error is [ErrBusy] while
	// processes use a mount, and [ErrSecretRequired] if the plugin needs secrets to detach. If ctx is cancelled, csid goes on.
	Release(ctx context.Context, volume Volume, consumer string, options ReleaseOptions) error
	// ListClaims returns the claims that match the filter.
	ListClaims(ctx context.Context, filter ClaimFilter) ([]ClaimRow, error)

	// RegisterVolume registers a volume that its plugin has, or changes the registration. The error is [ErrInvalidArgument] if
	// the plugin does not confirm the volume, [ErrNotFound] if the plugin or the volume is unknown, [ErrAlreadyExists] if the
	// name belongs to another volume or the volume to another name, and [ErrBusy] if the volume is in use and that prevents the
	// change.
	RegisterVolume(ctx context.Context, volume Volume, spec VolumeSpec) (*VolumeInfo, error)
	// DeregisterVolume deregisters a volume; the plugin keeps it. The error is [ErrBusy] while the volume is mounted, or claimed
	// unless options.Force is set, and [ErrNotSupported] if a file in volumes.d declares it.
	DeregisterVolume(ctx context.Context, volume Volume, options DeregisterOptions) error
	// GetVolume returns a registered volume. The error is [ErrNotFound] if it is not registered.
	GetVolume(ctx context.Context, volume Volume) (*VolumeInfo, error)
	// ListVolumes returns the registered volumes that match the filter, without context and parameters.
	ListVolumes(ctx context.Context, filter VolumeFilter) ([]VolumeInfo, error)

	// CreateVolume has the plugin create a volume. Repeating a call whose answer was lost creates no second one. The error is
	// [ErrAlreadyExists] if the volume exists with other options, [ErrNotFound] if the plugin or the volume to clone is unknown,
	// and [ErrNotSupported] if the plugin cannot create volumes so.
	CreateVolume(ctx context.Context, volume Volume, spec CreateSpec) (*VolumeInfo, error)
	// DeleteVolume has the plugin delete a volume with its content. The error is [ErrBusy] while the volume is mounted, claimed,
	// attached or being created, and [ErrNotSupported] if a file in volumes.d declares it. If ctx is cancelled, csid goes on.
	DeleteVolume(ctx context.Context, volume Volume) error
	// AttachVolume attaches a volume to a node, for a scheduler that keeps its own claims, and returns the publish context that a
	// mount on that node needs. nodeID is the plugin's name of the node, [Plugin.NodeID] there. The error is
	// [ErrClaimConflict] if the volume is claimed, [ErrAlreadyExists] if it is attached with other options, and
	// [ErrNotSupported] if the plugin attaches nothing. If ctx is cancelled,
	// csid rolls the attachment back; one that was complete stays, so detach it.
	AttachVolume(ctx context.Context, volume Volume, nodeID string, usage UsageOptions) (map[string]string, error)
	// DetachVolume detaches a volume from a node. The error is [ErrBusy] while the volume is staged on this host under that node
	// ID, and [ErrClaimConflict] if the attachment belongs to a claim.
	DetachVolume(ctx context.Context, volume Volume, nodeID string) error
	// ValidateVolume asks the plugin whether the volume can be used in all of these ways; without any, in all ways that the
	// volume has. The error is [ErrNotFound] if the volume or its plugin is unknown.
	ValidateVolume(ctx context.Context, volume Volume, capabilities ...Capability) (*Validated, error)
	// ExpandVolume expands a volume. The error is [ErrInvalidArgument] if the limit is less than the volume's size, and
	// [ErrNotSupported] if the plugin cannot expand that part.
	ExpandVolume(ctx context.Context, volume Volume, capacity CapacityRange, part Part) (*Expanded, error)
	// CreateSnapshot has the plugin create a snapshot and returns when it is ready. The same name again is the same snapshot.
	CreateSnapshot(ctx context.Context, volume Volume, name string, parameters map[string]string) (*Snapshot, error)
	// BeginSnapshot has the plugin create a snapshot and returns as soon as the plugin has answered. Ready is false while the
	// snapshot cannot be used yet. The same call again returns the progress.
	BeginSnapshot(ctx context.Context, volume Volume, name string, parameters map[string]string) (*Snapshot, error)

	// ListExternalVolumes returns a page of the volumes that a plugin has, registered with csid or not. The error is
	// [ErrNotFound] if no such plugin is registered, and [ErrNotSupported] if it has no controller.
	ListExternalVolumes(ctx context.Context, plugin string, page Page) (*ExternalVolumes, error)
	// ListSnapshots returns a page of the snapshots that a plugin has. The error is [ErrNotFound] if no such plugin is registered,
	// and [ErrNotSupported] if it has no controller.
	ListSnapshots(ctx context.Context, plugin string, filter SnapshotFilter, page Page) (*Snapshots, error)
	// DeleteSnapshot has the plugin delete a snapshot, given by the plugin's ID of it. The error is [ErrNotFound] if no such
	// plugin is registered, and [ErrNotSupported] if it has no controller.
	DeleteSnapshot(ctx context.Context, plugin, snapshot string, secrets Secrets) error

	// Events opens a reader of csid's events in order, which continues through csid's restarts. cursor is the [Event.Cursor] of
	// the last event that was handled, by this process or an earlier one and with either implementation, or [FromNow] or
	// [FromFirst]. The error is [ErrInvalidArgument] if it is none of these.
	Events(ctx context.Context, cursor string) (Events, error)

	// Close closes the connection. Running calls end here with [ErrDisconnected] and go on in csid. Nothing is unmounted.
	Close() error

	// AdoptMount takes over a mount that another manager made, while its consumer runs. Root only. No plugin is asked. The same
	// call again returns the same mount. Any error changes nothing: [ErrNotFound] or [ErrInvalidArgument] if the kernel does not
	// show the mount at both paths, [ErrAlreadyExists] if a path belongs to another mount.
	AdoptMount(ctx context.Context, volume Volume, consumer string, request MountRequest, at AdoptedAt) (*MountInfo, error)
}

// Where Client.Events begins without a cursor.
const (
	// FromNow begins with the next event.
	FromNow = "now"
	// FromFirst begins with the first event that csid still has.
	FromFirst = ""
)

// Events is a reader of csid's events. One goroutine may use it at a time.
type Events interface {
	// Next waits for the next event. If ctx ends the wait, no event is lost. Any other error ends the reader: open another one
	// with the last cursor.
	Next(ctx context.Context) (*Event, error)
	// Close closes the reader.
	Close() error
}
