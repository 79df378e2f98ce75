package csi_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	"github.com/csid-project/csid/go/csi"
	"github.com/csid-project/csid/go/csi/dbus"
)

// Open connects to csid. cgo.Open does the same over libcsi.
func Example() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	client, err := dbus.Open(ctx, "")
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	plugins, err := client.ListPlugins(ctx)
	if err != nil {
		log.Fatal(err)
	}
	for _, plugin := range plugins {
		fmt.Println(plugin.ID, plugin.State)
	}
}

// A volume that is not registered is given whole.
func ExampleClient_mount() {
	ctx := context.Background()
	client, err := dbus.Open(ctx, "")
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	volume := csi.Volume{Namespace: "prod", ID: "data", Plugin: "local", ExternalID: "vol-1"}
	request := csi.MountRequest{Usage: csi.UsageOptions{ReadOnly: true}}
	mount, err := client.Mount(ctx, volume, "alloc-7", request)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(mount.Source, mount.IsDevice)
}

// The mount may be another process's. A missing one is success.
func ExampleClient_unmount() {
	ctx := context.Background()
	client, err := dbus.Open(ctx, "")
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	volume := csi.Volume{Namespace: "prod", ID: "data"}
	if err := client.Unmount(ctx, volume, "alloc-7", csi.UnmountOptions{}); err != nil {
		log.Fatal(err)
	}
}

// A claim waits a minute for other claims, then for as long as the plugin needs to attach the volume.
func ExampleClient_claim() {
	ctx := context.Background()
	client, err := dbus.Open(ctx, "")
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	volume := csi.Volume{Namespace: "prod", ID: "pg"}
	claimed, err := client.Claim(ctx, volume, "nightly-backup", csi.ClaimOptions{Mode: "read", Wait: time.Minute})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(claimed.State, claimed.PublishContext)
	if err := client.Release(ctx, volume, "nightly-backup", csi.ReleaseOptions{}); err != nil {
		log.Fatal(err)
	}
}

// A filter selects the rows that match all of its fields.
func ExampleClient_list() {
	ctx := context.Background()
	client, err := dbus.Open(ctx, "")
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	mounts, err := client.ListMounts(ctx, csi.MountFilter{Namespace: "prod", State: "mounted"})
	if err != nil {
		log.Fatal(err)
	}
	for _, mount := range mounts {
		fmt.Println(mount.Volume, mount.Consumer, mount.Source)
	}
}

// A code is an error, and an Error has all else that is known.
func ExampleError() {
	ctx := context.Background()
	client, err := dbus.Open(ctx, "")
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	_, err = client.Mount(ctx, csi.Volume{Namespace: "prod", ID: "pg"}, "alloc-8", csi.MountRequest{})
	var failed *csi.Error
	switch {
	case errors.Is(err, csi.ErrClaimConflict) && errors.As(err, &failed):
		fmt.Println("in use by", failed.Holders)
	case errors.Is(err, csi.ErrPlugin) && errors.As(err, &failed):
		fmt.Println(failed.RPC, failed.GRPCCode, failed.PluginMessage)
	case err != nil:
		log.Fatal(err)
	}
}

// The cursor of the last handled event is kept, so that a later process misses none.
func ExampleClient_events() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	client, err := dbus.Open(ctx, "")
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	events, err := client.Events(ctx, csi.FromNow)
	if err != nil {
		log.Fatal(err)
	}
	defer events.Close()
	cursor := csi.FromNow
	for {
		event, err := events.Next(ctx)
		if errors.Is(err, context.DeadlineExceeded) {
			break
		}
		if err != nil {
			log.Fatal(err)
		}
		if event.Gap {
			fmt.Println("events were lost: list the objects again")
		} else {
			fmt.Println(event.Type, event.Subject)
		}
		cursor = event.Cursor
	}
	fmt.Println("continue at", cursor)
}

// A scheduler's own volume manager is replaced by NewManager.
func ExampleNewManager() {
	ctx := context.Background()
	client, err := dbus.Open(ctx, "")
	if err != nil {
		log.Fatal(err)
	}
	manager := csi.NewManager(client)
	defer manager.Shutdown()
	if err := manager.WaitForPlugin(ctx, "csi-node", "local"); err != nil {
		log.Fatal(err)
	}
	mounter, err := manager.MounterForPlugin(ctx, "local")
	if err != nil {
		log.Fatal(err)
	}
	volume := &csi.Volume{Namespace: "prod", ID: "data", ExternalID: "vol-1"}
	mount, err := mounter.MountVolume(ctx, volume, "alloc-7", &csi.UsageOptions{}, nil)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(mount.Source)
}
