// Package proto compares csid's csi.proto with the published CSI v1.13.0, in both directions.
package proto

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	published "github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"
)

// What v1.12 has, v1.13 dropped and drivers still send. Everything else must be the same.
var v112 = []string{
	"message csi.v1.VolumeCondition options=[csi.v1.alpha_message]:true",
	"field csi.v1.VolumeCondition.abnormal = 1 optional bool options=",
	"field csi.v1.VolumeCondition.message = 2 optional string options=",
	"field csi.v1.ListVolumesResponse.VolumeStatus.volume_condition = 2 optional csi.v1.VolumeCondition options=[csi.v1.alpha_field]:true",
	"field csi.v1.ControllerGetVolumeResponse.VolumeStatus.volume_condition = 2 optional csi.v1.VolumeCondition options=",
	"field csi.v1.NodeGetVolumeStatsResponse.volume_condition = 2 optional csi.v1.VolumeCondition options=[csi.v1.alpha_field]:true",
	"value csi.v1.ControllerServiceCapability.RPC.Type.VOLUME_CONDITION = 11 options=[csi.v1.alpha_enum_value]:true",
	"value csi.v1.NodeServiceCapability.RPC.Type.VOLUME_CONDITION = 4 options=[csi.v1.alpha_enum_value]:true",
}

func TestSameAsPublished(t *testing.T) {
	ours, theirs := facts(our(t)), facts(published.File_csi_proto)
	for fact := range theirs {
		if !ours[fact] {
			t.Errorf("missing in ours: %s", fact)
		}
	}
	extras := 0
	for fact := range ours {
		if theirs[fact] {
			continue
		}
		if slices.Contains(v112, fact) {
			extras++
		} else {
			t.Errorf("only in ours: %s", fact)
		}
	}
	if extras != len(v112) {
		t.Errorf("%d of the %d fields of v1.12 are there", extras, len(v112))
	}
	kinds := map[string]int{}
	for fact := range theirs {
		kind, _, _ := strings.Cut(fact, " ")
		kinds[kind]++
		if strings.Contains(fact, "[csi.v1.csi_secret]") {
			kinds["secret"]++
		}
	}
	fmt.Printf("csi.proto equals v1.13.0: %d facts %v; and %d of v1.12\n", len(theirs), kinds, extras)
	for _, extra := range v112 {
		fmt.Println("  v1.12:", extra)
	}
	if kinds["secret"] < 20 || kinds["rpc"] < 30 || kinds["field"] < 200 {
		t.Errorf("the comparison sees too little: %v", kinds)
	}
}

// our reads the descriptor set that `cargo run -p csi-proto --example descriptors` printed.
func our(t *testing.T) protoreflect.FileDescriptor {
	path := os.Getenv("CSI_DESCRIPTORS")
	if path == "" {
		t.Fatal("CSI_DESCRIPTORS must name the descriptor set; tests/go/proto/run does that")
	}
	bytes, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var set descriptorpb.FileDescriptorSet
	if err := proto.Unmarshal(bytes, &set); err != nil {
		t.Fatal(err)
	}
	files, err := protodesc.NewFiles(&set)
	if err != nil {
		t.Fatal(err)
	}
	file, err := files.FindFileByPath("csi/v1/csi.proto")
	if err != nil {
		t.Fatal(err)
	}
	return file
}

// facts are one line for everything that is on the wire, or that the interface says about it.
func facts(file protoreflect.FileDescriptor) map[string]bool {
	facts := map[string]bool{}
	add := func(format string, args ...any) { facts[fmt.Sprintf(format, args...)] = true }

	add("syntax %s %s", file.Package(), file.Syntax())
	for x := range all(file.Extensions()) {
		add("extension %s of %s = %d %s", x.FullName(), x.ContainingMessage().FullName(), x.Number(), x.Kind())
	}
	enum := func(e protoreflect.EnumDescriptor) {
		add("enum %s %s", e.FullName(), options(e))
		for v := range all(e.Values()) {
			// A value's full name leaves the enum out; with it the fact says more.
			add("value %s.%s = %d %s", e.FullName(), v.Name(), v.Number(), options(v))
		}
	}
	var message func(protoreflect.MessageDescriptor)
	message = func(m protoreflect.MessageDescriptor) {
		add("message %s %s", m.FullName(), options(m))
		for f := range all(m.Fields()) {
			add("field %s = %d %s %s%s %s", f.FullName(), f.Number(), f.Cardinality(), oneof(f), kind(f), options(f))
		}
		for e := range all(m.Enums()) {
			enum(e)
		}
		for inner := range all(m.Messages()) {
			message(inner)
		}
	}
	for e := range all(file.Enums()) {
		enum(e)
	}
	for m := range all(file.Messages()) {
		message(m)
	}
	for s := range all(file.Services()) {
		add("service %s %s", s.FullName(), options(s))
		for r := range all(s.Methods()) {
			add("rpc %s(%s) %s streams %t %t %s", r.FullName(), r.Input().FullName(), r.Output().FullName(),
				r.IsStreamingClient(), r.IsStreamingServer(), options(r))
		}
	}
	return facts
}

func kind(f protoreflect.FieldDescriptor) string {
	switch {
	case f.IsMap():
		return fmt.Sprintf("map<%s,%s>", kind(f.MapKey()), kind(f.MapValue()))
	case f.Message() != nil:
		return string(f.Message().FullName())
	case f.Enum() != nil:
		return string(f.Enum().FullName())
	}
	return f.Kind().String()
}

func oneof(f protoreflect.FieldDescriptor) string {
	if o := f.ContainingOneof(); o != nil {
		return "oneof " + string(o.Name()) + " "
	}
	return ""
}

// options resolves ours against the published extensions: equal numbers become equal names.
func options(d protoreflect.Descriptor) string {
	var set []string
	d.Options().ProtoReflect().Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		if f.FullName() != "google.protobuf.MessageOptions.map_entry" {
			set = append(set, fmt.Sprintf("[%s]:%v", f.FullName(), v))
		}
		return true
	})
	slices.Sort(set)
	return "options=" + strings.Join(set, " ")
}

type list[T any] interface {
	Len() int
	Get(int) T
}

func all[T any](l list[T]) func(func(T) bool) {
	return func(yield func(T) bool) {
		for i := range l.Len() {
			if !yield(l.Get(i)) {
				return
			}
		}
	}
}
