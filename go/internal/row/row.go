// Package row converts csid's answers to the types of package csi. Names are those of the contract, in kebab-case. An absent name, or a
// value of another type, gives the zero value.
package row

import "github.com/csid-project/csid/go/csi"

// Row is a record of names and values.
type Row interface {
	Text(name string) string
	Number(name string) uint64
	Flag(name string) bool
	Texts(name string) []string
	// Map returns nil for an absent map, and never nil for an empty one.
	Map(name string) map[string]string
	Rows(name string) []Row
	// Pairs returns the row's own texts.
	Pairs() map[string]string
}

func Each[T any](rows []Row, make func(Row) T) []T {
	var made []T
	for _, r := range rows {
		made = append(made, make(r))
	}
	return made
}

func MountInfo(r Row) *csi.MountInfo {
	return &csi.MountInfo{Source: r.Text("source"), IsDevice: r.Flag("is-device")}
}

func Plugin(r Row) *csi.Plugin {
	var services []csi.Service
	for _, service := range r.Texts("services") {
		services = append(services, csi.Service(service))
	}
	topology := r.Map("topology")
	if len(topology) == 0 {
		topology = nil
	}
	return &csi.Plugin{
		ID:                     r.Text("id"),
		State:                  r.Text("state"),
		Healthy:                r.Flag("healthy"),
		HealthMessage:          r.Text("health-message"),
		Supervision:            r.Text("supervision"),
		Provider:               r.Text("provider"),
		ProviderVersion:        r.Text("provider-version"),
		Services:               services,
		PluginCapabilities:     r.Texts("plugin-capabilities"),
		NodeCapabilities:       r.Texts("node-capabilities"),
		ControllerCapabilities: r.Texts("controller-capabilities"),
		NodeID:                 r.Text("node-id"),
		MaxVolumes:             r.Number("max-volumes"),
		Instances:              r.Texts("instances"),
		Socket:                 r.Text("socket"),
		Topology:               topology,
	}
}

func PluginRow(r Row) csi.PluginRow {
	return csi.PluginRow{
		ID:          r.Text("id"),
		State:       r.Text("state"),
		Provider:    r.Text("provider"),
		Supervision: r.Text("supervision"),
	}
}

func MountRow(r Row) csi.MountRow {
	return csi.MountRow{
		Namespace:      r.Text("namespace"),
		Volume:         r.Text("volume"),
		Consumer:       r.Text("consumer"),
		Tag:            r.Text("tag"),
		Plugin:         r.Text("plugin"),
		ExternalID:     r.Text("external-id"),
		State:          r.Text("state"),
		UID:            uint32(r.Number("uid")),
		Source:         r.Text("source"),
		Staging:        r.Text("staging"),
		Target:         r.Text("target"),
		IsDevice:       r.Flag("is-device"),
		ReadOnly:       r.Flag("read-only"),
		AccessMode:     csi.AccessMode(r.Text("access-mode")),
		AttachmentMode: csi.AttachmentMode(r.Text("attachment-mode")),
		FSType:         r.Text("fs-type"),
		MountGroup:     r.Text("mount-group"),
		Restore:        r.Text("restore"),
		Healthy:        r.Flag("healthy"),
		Error:          r.Text("error"),
		Operation:      r.Text("operation"),
		Since:          r.Number("since"),
		ModifyIndex:    r.Number("modify-index"),
		Cursor:         r.Text("cursor"),
	}
}

func ClaimRow(r Row) csi.ClaimRow {
	return csi.ClaimRow{
		Namespace:      r.Text("namespace"),
		Volume:         r.Text("volume"),
		Consumer:       r.Text("consumer"),
		Node:           r.Text("node"),
		UID:            uint32(r.Number("uid")),
		Mode:           r.Text("mode"),
		AccessMode:     csi.AccessMode(r.Text("access-mode")),
		AttachmentMode: csi.AttachmentMode(r.Text("attachment-mode")),
		State:          r.Text("state"),
		Releasing:      r.Flag("releasing"),
		ByMount:        r.Flag("by-mount"),
		Bind:           r.Text("bind"),
		Error:          r.Text("error"),
		Since:          r.Number("since"),
		ModifyIndex:    r.Number("modify-index"),
		Cursor:         r.Text("cursor"),
	}
}

func Claimed(r Row) *csi.Claimed {
	return &csi.Claimed{
		VolumeInfo:     VolumeInfo(r),
		PublishContext: r.Map("publish-context"),
		ExternalNodeID: r.Text("external-node-id"),
		State:          r.Text("state"),
	}
}

func VolumeInfo(r Row) csi.VolumeInfo {
	return csi.VolumeInfo{
		Namespace:          r.Text("namespace"),
		ID:                 r.Text("id"),
		Name:               r.Text("name"),
		ExternalID:         r.Text("external-id"),
		Plugin:             r.Text("plugin"),
		Provider:           r.Text("provider"),
		ProviderVersion:    r.Text("provider-version"),
		Context:            r.Map("context"),
		Parameters:         r.Map("parameters"),
		Capabilities:       Each(r.Rows("capabilities"), capability),
		Topologies:         Each(r.Rows("topologies"), Row.Pairs),
		Credential:         r.Text("credential"),
		FSType:             r.Text("fs-type"),
		MountGroup:         r.Text("mount-group"),
		Heal:               r.Text("heal"),
		UID:                uint32(r.Number("uid")),
		Standing:           r.Text("standing"),
		ControllerRequired: r.Flag("controller-required"),
		Schedulable:        r.Flag("schedulable"),
		Capacity:           r.Number("capacity"),
		AccessMode:         csi.AccessMode(r.Text("access-mode")),
		AttachmentMode:     csi.AttachmentMode(r.Text("attachment-mode")),
		ReadClaims:         r.Texts("read-claims"),
		WriteClaims:        r.Texts("write-claims"),
		PastClaims:         r.Texts("past-claims"),
		PendingExpand:      r.Number("pending-expand"),
		ModifyIndex:        r.Number("modify-index"),
		Cursor:             r.Text("cursor"),
	}
}

func capability(r Row) csi.Capability {
	return csi.Capability{
		AccessMode:     csi.AccessMode(r.Text("access-mode")),
		AttachmentMode: csi.AttachmentMode(r.Text("attachment-mode")),
	}
}

func Validated(r Row) *csi.Validated {
	return &csi.Validated{Confirmed: r.Flag("confirmed"), Message: r.Text("message")}
}

func Expanded(r Row) *csi.Expanded {
	return &csi.Expanded{
		CapacityBytes:         int64(r.Number("capacity-bytes")),
		NodeExpansionRequired: r.Flag("node-expansion-required"),
	}
}

func Snapshot(r Row) *csi.Snapshot {
	return &csi.Snapshot{
		ID:         r.Text("id"),
		ExternalID: r.Text("external-id"),
		Size:       r.Number("size"),
		Created:    r.Number("created"),
		Ready:      r.Flag("ready"),
	}
}

func ExternalVolume(r Row) csi.ExternalVolume {
	return csi.ExternalVolume{
		ExternalID:       r.Text("external-id"),
		Capacity:         r.Number("capacity"),
		PublishedNodeIDs: r.Texts("published-node-ids"),
		Abnormal:         r.Flag("abnormal"),
		Message:          r.Text("message"),
	}
}

func ExternalVolumes(r Row) *csi.ExternalVolumes {
	return &csi.ExternalVolumes{Volumes: Each(r.Rows("volumes"), ExternalVolume), NextToken: r.Text("next-token")}
}

func Snapshots(r Row) *csi.Snapshots {
	one := func(r Row) csi.Snapshot { return *Snapshot(r) }
	return &csi.Snapshots{Snapshots: Each(r.Rows("snapshots"), one), NextToken: r.Text("next-token")}
}

// Event returns the event with its details.
func Event(r, details Row) *csi.Event {
	return &csi.Event{
		Sequence: r.Number("sequence"),
		Realtime: r.Number("realtime-usec"),
		Type:     r.Text("type"),
		Subject:  r.Text("subject"),
		Success:  details.Flag("success"),
		Error:    details.Text("error"),
		Consumer: details.Text("consumer"),
		Tag:      details.Text("tag"),
		Plugin:   details.Text("plugin"),
		UID:      uint32(details.Number("uid")),
		From:     details.Text("from"),
		To:       details.Text("to"),
	}
}

// Details fills in the details of an error, besides its code and message.
func Details(err *csi.Error, r Row) {
	err.RPC = r.Text("rpc")
	err.PluginMessage = r.Text("plugin-message")
	err.Holders = r.Texts("holders")
	err.Tags = r.Texts("tags")
	err.Step = r.Text("step")
	err.Obstacle = r.Text("obstacle")
	err.Operation = r.Text("operation")
	err.Namespace = r.Text("namespace")
	err.Volume = r.Text("volume")
	err.Plugin = r.Text("plugin")
}
