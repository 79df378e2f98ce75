package dbus_test

import (
	"context"
	"testing"

	"github.com/csid-project/csid/go/csi"
	"github.com/csid-project/csid/go/csi/csitest"
	"github.com/csid-project/csid/go/csi/dbus"
)

func open(address string) func(context.Context) (csi.Client, error) {
	return func(ctx context.Context) (csi.Client, error) {
		client, err := dbus.Open(ctx, address)
		if err != nil {
			return nil, err
		}
		return client, nil
	}
}

func TestOverTheSocket(t *testing.T) { csitest.Run(t, csitest.Way{Open: open("")}) }

func TestOverTheBus(t *testing.T) {
	csitest.Run(t, csitest.Way{Open: open("system-bus"), OnBus: true})
}
