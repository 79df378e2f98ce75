package csi

import "slices"

// Service is one of the halves of a plugin.
type Service string

const (
	Node       Service = "node"
	Controller Service = "controller"
)

// PluginSpec is a plugin. A managed one, which csid runs, has Argv; one in a unit that somebody else has defined has Unit and Socket;
// an external one, which somebody else runs, has a Socket.
type PluginSpec struct {
	ID string
	// "external", "unit", "managed"
	Supervision string
	// The service that it runs in.
	Unit   string
	Socket string
	// Which of several processes of the plugin; empty: its only one.
	Instance string
	// A directory on the host, and the same as the plugin sees it.
	PluginRoot, PluginView string
	Argv                   []string
	// Stored and public: no secrets here.
	Environment map[string]string
	// LoadCredential= of its unit.
	Credentials []string
	// "journal", "none"
	Log string
	// Of a managed one, from here on. "node-block", "node-fuse", "node-net", "controller"
	Profile string
	// "private", "host-to-task", "bidirectional": of its mounts.
	Propagation string
	// "host", "none", "netns:NAME"
	Network string
}

type UnregisterOptions struct {
	// Empty: all.
	Instance string
	Force    bool
}

// Plugin is what csid knows of a plugin. Capabilities have CSI's own names: STAGE_UNSTAGE_VOLUME.
type Plugin struct {
	ID string
	// stopped starting probing ready unhealthy failed stopping
	State                                                        string
	Healthy                                                      bool
	HealthMessage                                                string
	Supervision                                                  string
	Provider, ProviderVersion                                    string
	Services                                                     []Service
	PluginCapabilities, NodeCapabilities, ControllerCapabilities []string
	// What its storage calls this node.
	NodeID string
	// 0: it gives no limit.
	MaxVolumes uint64
	// Where this node is; nil: it does not say.
	Topology map[string]string
}

// Stages says whether a volume is staged on a node before it is published.
func (p *Plugin) Stages() bool { return slices.Contains(p.NodeCapabilities, "STAGE_UNSTAGE_VOLUME") }

// Attaches says whether a volume has to be attached to a node first.
func (p *Plugin) Attaches() bool {
	return slices.Contains(p.ControllerCapabilities, "PUBLISH_UNPUBLISH_VOLUME")
}

type PluginRow struct {
	ID, State, Provider, Supervision string
}
