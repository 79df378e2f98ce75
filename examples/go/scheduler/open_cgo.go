//go:build cgo

package main

import (
	"context"

	"github.com/csid-project/csid/go/csi"
	"github.com/csid-project/csid/go/csi/cgo"
)

// With a C compiler: over libcsi.
func open(ctx context.Context) (csi.Client, error) { return cgo.Open(ctx, "") }
