package cgo_test

import (
	"context"
	"testing"

	"github.com/csid-project/csid/go/csi"
	"github.com/csid-project/csid/go/csi/cgo"
	"github.com/csid-project/csid/go/csi/csitest"
)

func TestConformance(t *testing.T) {
	csitest.Run(t, func(ctx context.Context) (csi.Client, error) {
		client, err := cgo.Open(ctx, "")
		if err != nil {
			return nil, err
		}
		return client, nil
	})
}
