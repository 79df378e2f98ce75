//go:build !linux

package dbus_test

import (
	"context"
	"errors"
	"testing"

	"github.com/csid-project/csid/go/csi"
	"github.com/csid-project/csid/go/csi/dbus"
)

func TestOpenIsNotSupportedElsewhere(t *testing.T) {
	client, err := dbus.Open(context.Background(), "")
	if client != nil || !errors.Is(err, csi.ErrNotSupported) {
		t.Errorf("%v, %v", client, err)
	}
}
