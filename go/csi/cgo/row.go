package cgo

// #include <csi.h>
// #include <stdlib.h>
import "C"

import (
	"unsafe"

	"github.com/csid-project/csid/go/internal/row"
)

// crow is a csi_row as a row.Row. It is valid as long as the operation or event that it was read from.
type crow struct{ at *C.csi_row }

// by calls read with the name in C.
func by[T any](name string, read func(*C.char) T) T {
	c := C.CString(name)
	defer C.free(unsafe.Pointer(c))
	return read(c)
}

func (r crow) Text(name string) string {
	return by(name, func(n *C.char) string { return C.GoString(C.csi_row_text(r.at, n)) })
}

func (r crow) Number(name string) uint64 {
	return by(name, func(n *C.char) uint64 { return uint64(C.csi_row_number(r.at, n)) })
}

func (r crow) Flag(name string) bool {
	return by(name, func(n *C.char) bool { return bool(C.csi_row_flag(r.at, n)) })
}

func (r crow) Texts(name string) []string {
	return by(name, func(n *C.char) (texts []string) {
		for i := range C.csi_row_len(r.at, n) {
			texts = append(texts, C.GoString(C.csi_row_item(r.at, n, i)))
		}
		return
	})
}

func (r crow) Map(name string) map[string]string {
	return by(name, func(n *C.char) map[string]string {
		given := C.csi_row_map(r.at, n)
		if given.items == nil {
			return nil
		}
		made := map[string]string{}
		for _, pair := range unsafe.Slice(given.items, given.len) {
			made[C.GoString(pair.key)] = C.GoString(pair.value)
		}
		return made
	})
}

func (r crow) Rows(name string) []row.Row {
	return by(name, func(n *C.char) (rows []row.Row) {
		for i := range C.csi_row_len(r.at, n) {
			rows = append(rows, crow{C.csi_row_row(r.at, n, i)})
		}
		return
	})
}

func (r crow) Pairs() map[string]string {
	pairs := map[string]string{}
	for i := range C.csi_row_size(r.at) {
		name := C.csi_row_name(r.at, i)
		pairs[C.GoString(name)] = C.GoString(C.csi_row_text(r.at, name))
	}
	return pairs
}
