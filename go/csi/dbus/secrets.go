package dbus

import (
	"sort"

	"github.com/csid-project/csid/go/csi"
)

// object encodes the map as encoding/json does, in one piece of memory: zeroing it leaves no copy.
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
