package csi

import (
	"fmt"
	"io"
	"log/slog"
)

// Volume is a volume. One that is registered with csid has Namespace and ID alone; any other has Plugin and ExternalID too,
// and whatever else its plugin needs. It prints as its name alone: all else may hold credentials.
type Volume struct {
	Namespace string
	ID        string

	Plugin     string
	ExternalID string
	// The plugin's; nil is none, and something else than empty.
	Context      map[string]string
	Capabilities []Capability
	FSType       string
	MountFlags   []string

	// For this one call, in a sealed memfd.
	Secrets Secrets
	// Instead of secrets: the name of a systemd credential that csid can load again after a reboot.
	Credential string
}

func (v Volume) String() string { return v.Namespace + "/" + v.ID }

func (v Volume) Format(f fmt.State, _ rune) { io.WriteString(f, v.String()) }

func (v Volume) LogValue() slog.Value { return slog.StringValue(v.String()) }

// Secrets are names and values as a plugin wants them. They print as their number alone. Go's strings cannot be zeroed:
// whatever these packages make of them is, and the map itself is the caller's to let go.
type Secrets map[string]string

func (s Secrets) String() string { return fmt.Sprintf("%d secrets", len(s)) }

func (s Secrets) Format(f fmt.State, _ rune) { io.WriteString(f, s.String()) }

// MarshalText keeps them out of whatever is encoded.
func (s Secrets) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// Capability is one of the ways in which a volume can be used.
type Capability struct {
	AccessMode     AccessMode
	AttachmentMode AttachmentMode
}

// VolumeSpec is what csid shall know of a volume beyond what a [Volume] says.
type VolumeSpec struct {
	// For people.
	Name       string
	MountGroup string
	Parameters map[string]string
	// The segments of the places it can be used at.
	Topologies []map[string]string
	// What is done about a mount that died: "report", "remount".
	Heal string
	// Whether set-user-ID programs, and device nodes, on it are honoured: root's alone.
	SUID, Dev bool
}

// CreateSpec is what a new volume shall be. Of the [Volume] the plugin and at least one capability are needed; the external
// id and the context are the plugin's to give.
type CreateSpec struct {
	VolumeSpec
	// Whether csid keeps the volume as a registered one. Otherwise the caller keeps the answer.
	Register bool
	// Bytes; a limit of 0 is none.
	Capacity CapacityRange
	// The id of the volume in the same namespace whose clone it shall be, or the plugin's id of the snapshot that it begins
	// with.
	Clone, Snapshot string
}

// CapacityRange is a size in bytes.
type CapacityRange struct {
	RequiredBytes int64
	// 0 is none.
	LimitBytes int64
}

// Check is nil when the range is one.
func (c CapacityRange) Check() error {
	if c.RequiredBytes < 0 || c.LimitBytes < 0 {
		return &Error{Code: ErrInvalidArgument, Message: "a capacity is negative"}
	}
	return nil
}

// Part says whom an expansion concerns; empty is all.
type Part string

const (
	PartController Part = "controller"
	PartNode       Part = "node"
)

// VolumeInfo is what csid knows of a volume.
type VolumeInfo struct {
	Namespace, ID, Name, ExternalID   string
	Plugin, Provider, ProviderVersion string
	Context, Parameters               map[string]string
	Capabilities                      []Capability
	Topologies                        []map[string]string
	Credential                        string
	FSType                            string
	MountGroup                        string
	Heal                              string
	ControllerRequired                bool
	Schedulable                       bool
	// Bytes; 0: not known.
	Capacity uint64
	// Empty: it has no claims.
	AccessMode     AccessMode
	AttachmentMode AttachmentMode
	// Consumers.
	ReadClaims, WriteClaims, PastClaims []string
	// Bytes that a node still has to make of it; 0: none.
	PendingExpand uint64
	ModifyIndex   uint64
}

// VolumeFilter takes the volumes that have all of these.
type VolumeFilter struct {
	Namespace string
	Plugin    string
	// With a claim of this node.
	Node string
	// What the id begins with.
	Prefix string
}

type DeregisterOptions struct {
	// Whatever claims it.
	Force bool
}

type Validated struct {
	Confirmed bool
	// Why not, in the plugin's words.
	Message string
}

type Expanded struct {
	CapacityBytes int64
	// A node still has to expand it, when it has the volume next.
	NodeExpansionRequired bool
}

type Snapshot struct {
	// The plugin's id for it, and for the volume.
	ID, ExternalID string
	// Bytes; 0: the plugin does not say.
	Size uint64
	// Microseconds since 1970; 0: the plugin does not say.
	Created uint64
	Ready   bool
}
