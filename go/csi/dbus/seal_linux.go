package dbus

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/csid-project/csid/go/csi"
)

// supported returns an error on a system without csid. Here it returns nil.
func supported() error { return nil }

// seal writes the secrets, as a JSON object of strings, into a sealed memfd. csid reads it from its
// beginning at each try.
func seal(secrets csi.Secrets) (*os.File, error) {
	fd, err := unix.MemfdCreate("csid-secrets", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("a memfd: %w", err)
	}
	file := os.NewFile(uintptr(fd), "csid-secrets")
	text := object(secrets)
	defer clear(text[:cap(text)])
	if _, err := file.Write(text); err != nil {
		file.Close()
		return nil, fmt.Errorf("a memfd: %w", err)
	}
	seals := unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_WRITE | unix.F_SEAL_SEAL
	if _, err := unix.FcntlInt(file.Fd(), unix.F_ADD_SEALS, seals); err != nil {
		file.Close()
		return nil, fmt.Errorf("a memfd: %w", err)
	}
	if _, err := file.Seek(0, 0); err != nil {
		file.Close()
		return nil, fmt.Errorf("a memfd: %w", err)
	}
	return file, nil
}
