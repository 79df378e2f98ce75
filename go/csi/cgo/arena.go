package cgo

// #include <csi.h>
// #include <stdlib.h>
// #include <string.h>
import "C"

import (
	"strings"
	"time"
	"unsafe"

	"github.com/csid-project/csid/go/csi"
)

// turns limits the goroutines in C. Go adds a thread for each goroutine that stays in C for some microseconds, and on a busy machine
// every one does.
var turns = make(chan struct{}, 4)

// inC runs a function that calls C and does not wait there.
func inC(do func()) {
	turns <- struct{}{}
	defer func() { <-turns }()
	do()
}

// arena is the C memory of one call's arguments. libcsi copies them before the call returns. Then the memory is zeroed, because it may hold
// secrets, and freed.
type arena struct {
	// The arena holds a turn in C, and free returns it.
	hasTurn bool

	blocks []block
	// The error of the first text that C cannot represent.
	err error
}

type block struct {
	at   unsafe.Pointer
	size C.size_t
}

func newArena() *arena {
	turns <- struct{}{}
	return &arena{hasTurn: true}
}

func (a *arena) free() {
	if a.hasTurn {
		defer func() { <-turns }()
	}
	for _, b := range a.blocks {
		C.explicit_bzero(b.at, b.size)
		C.free(b.at)
	}
}

// alloc returns memory, and never NULL, also for size 0.
func (a *arena) alloc(size uintptr) unsafe.Pointer {
	size = max(size, 1)
	b := block{C.malloc(C.size_t(size)), C.size_t(size)}
	a.blocks = append(a.blocks, b)
	return b.at
}

func slice[T any](a *arena, len int) []T {
	var one T
	return unsafe.Slice((*T)(a.alloc(uintptr(len)*unsafe.Sizeof(one))), len)
}

func (a *arena) text(text string) *C.char {
	if strings.Contains(text, "\x00") {
		a.err = &csi.Error{Code: csi.ErrInvalidArgument, Message: "a text has a NUL in it"}
	}
	bytes := slice[byte](a, len(text)+1)
	bytes[copy(bytes, text)] = 0
	return (*C.char)(unsafe.Pointer(unsafe.SliceData(bytes)))
}

// some returns the text in C. An empty text is NULL.
func (a *arena) some(text string) *C.char {
	if text == "" {
		return nil
	}
	return a.text(text)
}

func (a *arena) pairs(pairs map[string]string) C.csi_map {
	if pairs == nil {
		return C.csi_map{}
	}
	items := slice[C.csi_pair](a, len(pairs))
	n := 0
	for key, value := range pairs {
		items[n] = C.csi_pair{key: a.text(key), value: a.text(value)}
		n++
	}
	return C.csi_map{items: unsafe.SliceData(items), len: C.size_t(n)}
}

func (a *arena) texts(texts []string) C.csi_strings {
	if texts == nil {
		return C.csi_strings{}
	}
	items := slice[*C.char](a, len(texts))
	for n, text := range texts {
		items[n] = a.text(text)
	}
	return C.csi_strings{items: unsafe.SliceData(items), len: C.size_t(len(texts))}
}

func (a *arena) capabilities(list []csi.Capability) C.csi_capabilities {
	if list == nil {
		return C.csi_capabilities{}
	}
	items := slice[C.csi_capability](a, len(list))
	for n, capability := range list {
		items[n] = C.csi_capability{
			access_mode:     a.some(string(capability.AccessMode)),
			attachment_mode: a.some(string(capability.AttachmentMode)),
		}
	}
	return C.csi_capabilities{items: unsafe.SliceData(items), len: C.size_t(len(list))}
}

func (a *arena) topologies(list []map[string]string) C.csi_topologies {
	if list == nil {
		return C.csi_topologies{}
	}
	items := slice[C.csi_map](a, len(list))
	for n, segments := range list {
		items[n] = a.pairs(segments)
	}
	return C.csi_topologies{items: unsafe.SliceData(items), len: C.size_t(len(list))}
}

func (a *arena) volume(v csi.Volume) *C.csi_volume {
	return &C.csi_volume{
		struct_size:  C.sizeof_csi_volume,
		ns:           a.text(v.Namespace),
		id:           a.text(v.ID),
		plugin:       a.some(v.Plugin),
		external_id:  a.some(v.ExternalID),
		context:      a.pairs(v.Context),
		capabilities: a.capabilities(v.Capabilities),
		fs_type:      a.some(v.FSType),
		mount_flags:  a.texts(v.MountFlags),
	}
}

func (a *arena) usage(u csi.UsageOptions) *C.csi_usage {
	usage := &C.csi_usage{
		struct_size:     C.sizeof_csi_usage,
		access_mode:     a.some(string(u.AccessMode)),
		attachment_mode: a.some(string(u.AttachmentMode)),
	}
	set(&usage.flags, C.CSI_READ_ONLY, u.ReadOnly)
	return usage
}

func (a *arena) spec(s csi.VolumeSpec) *C.csi_volume_spec {
	spec := &C.csi_volume_spec{
		struct_size: C.sizeof_csi_volume_spec,
		name:        a.some(s.Name),
		mount_group: a.some(s.MountGroup),
		parameters:  a.pairs(s.Parameters),
		topologies:  a.topologies(s.Topologies),
		heal:        a.some(s.Heal),
	}
	set(&spec.flags, C.CSI_SUID, s.SUID)
	set(&spec.flags, C.CSI_DEV, s.Dev)
	return spec
}

func set(flags *C.uint64_t, flag C.uint64_t, is bool) {
	if is {
		*flags |= flag
	}
}

func usec(d time.Duration) C.uint64_t { return C.uint64_t(max(d, 0).Microseconds()) }
