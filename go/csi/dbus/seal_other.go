//go:build !linux

package dbus

import (
	"os"
	"runtime"

	"github.com/csid-project/csid/go/csi"
)

// supported returns an error on a system without csid.
func supported() error {
	return &csi.Error{Code: csi.ErrNotSupported, Message: "csid runs on Linux only; this is " + runtime.GOOS}
}

// seal is never called: Open fails first.
func seal(csi.Secrets) (*os.File, error) { return nil, supported() }
