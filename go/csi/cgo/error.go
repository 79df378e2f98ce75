package cgo

// #include <csi.h>
import "C"

import (
	"fmt"

	"github.com/csid-project/csid/go/csi"
	"github.com/csid-project/csid/go/internal/row"
)

var codes = map[C.csi_code]csi.Code{
	C.CSI_E_INVALID:            csi.ErrInvalidArgument,
	C.CSI_E_NOT_FOUND:          csi.ErrNotFound,
	C.CSI_E_EXISTS:             csi.ErrAlreadyExists,
	C.CSI_E_BUSY:               csi.ErrBusy,
	C.CSI_E_CLAIM_CONFLICT:     csi.ErrClaimConflict,
	C.CSI_E_PLUGIN_UNAVAILABLE: csi.ErrPluginUnavailable,
	C.CSI_E_UNSUPPORTED:        csi.ErrNotSupported,
	C.CSI_E_DENIED:             csi.ErrNotAuthorized,
	C.CSI_E_CANCELLED:          csi.ErrCancelled,
	C.CSI_E_DEADLINE:           csi.ErrTimedOut,
	C.CSI_E_UNCERTAIN:          csi.ErrUncertain,
	C.CSI_E_DISCONNECTED:       csi.ErrDisconnected,
	C.CSI_E_RATE_LIMITED:       csi.ErrRateLimited,
	C.CSI_E_PLUGIN:             csi.ErrPlugin,
	C.CSI_E_PLUGIN_SHUTDOWN:    csi.ErrPluginShutdown,
	C.CSI_E_SECRET_REQUIRED:    csi.ErrSecretRequired,
	C.CSI_E_STATE_CORRUPT:      csi.ErrStateCorrupt,
	C.CSI_E_UNAVAILABLE:        csi.ErrUnavailable,
}

// failure converts C's error and frees it.
func failure(code C.csi_code, said *C.csi_error) *csi.Error {
	defer C.csi_error_free(said)
	known, is := codes[code]
	if !is {
		known = csi.ErrInternal
	}
	err := &csi.Error{
		Code:      known,
		Message:   C.GoString(C.csi_error_message(said)),
		Retryable: bool(C.csi_error_retryable(said)),
		GRPCCode:  uint32(max(C.csi_error_grpc_code(said), 0)),
	}
	row.Details(err, crow{C.csi_error_details(said)})
	return err
}

func internal(what string, err error) *csi.Error {
	return &csi.Error{Code: csi.ErrInternal, Message: fmt.Sprintf("%s: %v", what, err)}
}
