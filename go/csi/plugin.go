package csi

import "slices"

// Service is a service of a plugin.
type Service string

// The services that csid uses.
const (
	// Node mounts volumes on this node.
	Node Service = "node"
	// Controller creates, attaches and deletes volumes.
	Controller Service = "controller"
)

// PluginSpec is a plugin to be registered. Supervision says who runs it: csid ("managed", with Argv), an existing systemd unit
// ("unit", with Unit and Socket) or anything else ("external", with Socket).
type PluginSpec struct {
	// ID is the plugin's ID: 1 to 63 of [A-Za-z0-9._-].
	ID string
	// Supervision is "external", "unit" or "managed".
	Supervision string
	// Unit is the service in which the plugin runs, with Supervision "unit". Root only.
	Unit string
	// Socket is the path where an external plugin or a unit listens.
	Socket string
	// Instance is one of several processes of the plugin. Empty: "default".
	Instance string
	// PluginRoot is the directory on the host for the volumes' paths, PluginView the same as the plugin sees it. Root only. Empty:
	// csid's own, and PluginRoot.
	PluginRoot, PluginView string
	// Argv is program (absolute path) and arguments of a managed plugin. Root only.
	Argv []string
	// Environment is that of a managed plugin. It is stored and public: no secrets here. Root only.
	Environment map[string]string
	// Credentials are systemd credentials of a managed plugin, each as LoadCredential= has it.
	Credentials []string
	// Log is "journal" or "none". Empty: "journal".
	Log string
	// Profile of a managed plugin is "node-block", "node-fuse", "node-net" or "controller". Root only. Empty: all devices and
	// capabilities.
	Profile string
	// Propagation of a managed plugin's mounts is "private", "host-to-task" or "bidirectional". Root only. Empty: "bidirectional".
	Propagation string
	// Network of a managed plugin is "host", "none" or "netns:NAME". Root only. Empty: "host".
	Network string
}

// UnregisterOptions says what UnregisterPlugin unregisters.
type UnregisterOptions struct {
	// Instance is the instance. Empty: all.
	Instance string
	// Force unregisters also a plugin whose volumes are in use.
	Force bool
}

// Plugin is what csid knows of a plugin. Capabilities have CSI's own names, such as STAGE_UNSTAGE_VOLUME.
type Plugin struct {
	// ID is the plugin's ID.
	ID string
	// State is stopped, starting, probing, ready, unhealthy, failed or stopping.
	State string
	// Healthy says whether the plugin can be used. HealthMessage says why not.
	Healthy       bool
	HealthMessage string
	// Supervision is "external", "unit" or "managed".
	Supervision string
	// Provider and ProviderVersion are the plugin's own name and version.
	Provider, ProviderVersion string
	// Services are the services that it offers.
	Services []Service
	// PluginCapabilities, NodeCapabilities and ControllerCapabilities are what it can do.
	PluginCapabilities, NodeCapabilities, ControllerCapabilities []string
	// NodeID is the plugin's name of this node.
	NodeID string
	// MaxVolumes is the number of volumes that this node can have. 0: the plugin gives no limit.
	MaxVolumes uint64
	// Instances are its instances, the newest first. The first is active and listens at Socket.
	Instances []string
	Socket    string
	// Topology is where this node is. Nil: the plugin does not say.
	Topology map[string]string
}

// Stages says whether the plugin stages a volume on a node before it publishes it.
func (p *Plugin) Stages() bool { return slices.Contains(p.NodeCapabilities, "STAGE_UNSTAGE_VOLUME") }

// Attaches says whether the plugin attaches a volume to a node before it is mounted there.
func (p *Plugin) Attaches() bool {
	return slices.Contains(p.ControllerCapabilities, "PUBLISH_UNPUBLISH_VOLUME")
}

// PluginRow is a plugin as ListPlugins returns it.
type PluginRow struct {
	// ID is the plugin's ID, Provider its own name. State and Supervision are as in Plugin.
	ID, State, Provider, Supervision string
}
