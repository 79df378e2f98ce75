package dbus

import (
	"fmt"
	"os"
	"sort"

	"golang.org/x/sys/unix"

	"github.com/csid-project/csid/go/csi"
)

// seal writes the secrets, as a JSON object of strings, into a memfd that nobody can change any more. csid reads it from its
// beginning, however often it has to be asked.
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

// object is what encoding/json would make of it, in one piece of memory: nothing is left behind when it is zeroed.
func object(secrets csi.Secrets) []byte {
	size := 2
	names := make([]string, 0, len(secrets))
	for name, value := range secrets {
		names = append(names, name)
		size += len(`"":"",`) + 6*(len(name)+len(value))
	}
	sort.Strings(names)
	text := append(make([]byte, 0, size), '{')
	for i, name := range names {
		if i > 0 {
			text = append(text, ',')
		}
		text = quoted(text, name)
		text = append(text, ':')
		text = quoted(text, secrets[name])
	}
	return append(text, '}')
}

func quoted(text []byte, value string) []byte {
	const hex = "0123456789abcdef"
	text = append(text, '"')
	for i := range len(value) {
		switch b := value[i]; {
		case b == '"' || b == '\\':
			text = append(text, '\\', b)
		case b < 0x20:
			text = append(text, '\\', 'u', '0', '0', hex[b>>4], hex[b&15])
		default:
			text = append(text, b)
		}
	}
	return append(text, '"')
}
