package dbus_test

import (
	"context"
	"testing"

	"github.com/csid-project/csid/go/csi"
	"github.com/csid-project/csid/go/csi/csitest"
	"github.com/csid-project/csid/go/csi/dbus"
)

func TestConformance(t *testing.T) {
	csitest.Run(t, func(ctx context.Context) (csi.Client, error) {
		client, err := dbus.Open(ctx, "")
		if err != nil {
			return nil, err
		}
		return client, nil
	})
}
