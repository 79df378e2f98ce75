//go:build !cgo

package main

import (
	"context"

	"github.com/csid-project/csid/go/csi"
	"github.com/csid-project/csid/go/csi/dbus"
)

// Without a C compiler.
func open(ctx context.Context, socket string) (csi.Client, error) { return dbus.Open(ctx, socket) }
