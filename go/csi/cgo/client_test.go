package cgo_test

import (
	"context"
	"testing"

	"github.com/csid-project/csid/go/csi"
	"github.com/csid-project/csid/go/csi/cgo"
	"github.com/csid-project/csid/go/csi/csitest"
)

func open(address string) func(context.Context) (csi.Client, error) {
	return func(ctx context.Context) (csi.Client, error) {
		client, err := cgo.Open(ctx, address)
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
