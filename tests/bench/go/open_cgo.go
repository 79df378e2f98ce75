//go:build cgo

package main

import (
	"context"

	"github.com/csid-project/csid/go/csi"
	"github.com/csid-project/csid/go/csi/cgo"
)

// Over libcsi.
func open(ctx context.Context, socket string) (csi.Client, error) { return cgo.Open(ctx, socket) }
