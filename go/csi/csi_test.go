package csi_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"github.com/csid-project/csid/go/csi"
)

func TestAUsageIsItsValues(t *testing.T) {
	usage := func() csi.UsageOptions {
		return csi.UsageOptions{
			ReadOnly:       true,
			AttachmentMode: csi.BlockDevice,
			AccessMode:     csi.MultiNodeReaderOnly,
			MountOptions:   csi.MountOptions{FSType: "xfs", MountFlags: []string{"noatime"}},
		}
	}
	if !usage().Equal(usage()) {
		t.Error("two that were built apart are one")
	}
	if name := usage().ToFS(); name != "ro-block-device-multi-node-reader-only" {
		t.Error(name)
	}
	if name := (csi.UsageOptions{}).ToFS(); name != "rw-file-system-single-node-writer" {
		t.Error(name)
	}
	if !(csi.UsageOptions{}).Equal(csi.UsageOptions{AccessMode: csi.SingleNodeWriter, AttachmentMode: csi.FileSystem}) {
		t.Error("an empty mode is the usual one")
	}
	for _, change := range []func(*csi.UsageOptions){
		func(u *csi.UsageOptions) { u.ReadOnly = false },
		func(u *csi.UsageOptions) { u.AttachmentMode = csi.FileSystem },
		func(u *csi.UsageOptions) { u.AccessMode = csi.SingleNodeReaderOnly },
		func(u *csi.UsageOptions) { u.MountOptions.FSType = "ext4" },
		func(u *csi.UsageOptions) { u.MountOptions.MountFlags = []string{"noatime", "nodiratime"} },
	} {
		other := usage()
		change(&other)
		if other.Equal(usage()) || usage().Equal(other) {
			t.Errorf("%+v is another one", other)
		}
	}
	bare := usage()
	bare.MountOptions = csi.MountOptions{}
	if bare.ToFS() != usage().ToFS() {
		t.Error("the name depends on mount options")
	}
}

func TestMountOptionsStandBeforeTheVolumesFieldByField(t *testing.T) {
	volume := csi.Volume{FSType: "ext4", MountFlags: []string{"ro"}}
	of := csi.UsageOptions{MountOptions: csi.MountOptions{FSType: "xfs"}}.Of(volume)
	if of.FSType != "xfs" || len(of.MountFlags) != 1 {
		t.Errorf("%s %v", of.FSType, of.MountFlags)
	}
	of = csi.UsageOptions{MountOptions: csi.MountOptions{MountFlags: []string{}}}.Of(volume)
	if of.FSType != "ext4" || len(of.MountFlags) != 0 {
		t.Errorf("%s %v", of.FSType, of.MountFlags)
	}
}

func TestErrorsAreFoundByIsAndAs(t *testing.T) {
	var err error = &csi.Error{Code: csi.ErrBusy, Message: "in use", Holders: []string{"job"}}
	err = fmt.Errorf("job: %w", err)
	var said *csi.Error
	if !errors.Is(err, csi.ErrBusy) || errors.Is(err, csi.ErrNotFound) || !errors.As(err, &said) || said.Holders[0] != "job" {
		t.Error(err)
	}
	var code csi.Code
	if errors.As(err, &code) {
		t.Error("a code is not an error's cause")
	}
	ended := error(csi.Ended(context.Canceled))
	if !errors.Is(ended, csi.ErrCancelled) || !errors.Is(ended, context.Canceled) || errors.Is(ended, context.DeadlineExceeded) {
		t.Error(ended)
	}
	ended = csi.Ended(context.DeadlineExceeded)
	if !errors.Is(ended, csi.ErrTimedOut) || !errors.Is(ended, context.DeadlineExceeded) {
		t.Error(ended)
	}
	// One of csid's, which a context's cancellation did not make.
	if errors.Is(&csi.Error{Code: csi.ErrCancelled}, context.Canceled) {
		t.Error("another call ended it")
	}
	if !errors.Is(&csi.Error{Code: csi.ErrTimedOut}, context.DeadlineExceeded) {
		t.Error("the deadline is the context's")
	}
}

func TestNothingPrintsASecret(t *testing.T) {
	const canary = "c4n4ry"
	volume := csi.Volume{
		Namespace:  "n",
		ID:         "v",
		Context:    map[string]string{"token": canary},
		MountFlags: []string{"password=" + canary},
		Secrets:    csi.Secrets{"password": canary},
	}
	var logged strings.Builder
	slog.New(slog.NewTextHandler(&logged, nil)).Info("a", "volume", volume, "secrets", volume.Secrets)
	slog.New(slog.NewJSONHandler(&logged, nil)).Info("a", "volume", volume, "secrets", volume.Secrets)
	usage := csi.UsageOptions{MountOptions: csi.MountOptions{MountFlags: volume.MountFlags}}
	// A volume is data, that may be kept; its secrets are not.
	encoded, err := json.Marshal(csi.Volume{Secrets: volume.Secrets})
	if err != nil {
		t.Fatal(err)
	}
	said := logged.String() + string(encoded)
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%d", "%x"} {
		said += fmt.Sprintf(verb+verb+verb+verb, volume, &volume, volume.Secrets, usage)
	}
	hexed := fmt.Sprintf("%x", canary)
	if strings.Contains(said, canary) || strings.Contains(said, hexed) {
		t.Error(said)
	}
}
