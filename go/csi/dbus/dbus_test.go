package dbus

import (
	"encoding/json"
	"io"
	"maps"
	"os"
	"testing"

	"github.com/godbus/dbus/v5"

	"github.com/csid-project/csid/go/csi"
)

func TestPluginPathsAreEscapedAsSdBusDoes(t *testing.T) {
	for id, path := range map[string]string{
		"local":       "/org/csid1/plugin/local",
		"ebs.csi-1_x": "/org/csid1/plugin/ebs_2ecsi_2d1_5fx",
		"9p":          "/org/csid1/plugin/_39p",
		"":            "/org/csid1/plugin/_",
	} {
		if pluginPath(id) != path {
			t.Errorf("%q: %s", id, pluginPath(id))
		}
	}
}

func TestSecretsAreSealedAsJSON(t *testing.T) {
	secrets := csi.Secrets{"user": "u", "password": "a\"b\\\x00\n\u2028ä", "": ""}
	file, err := seal(secrets)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	text, err := io.ReadAll(file)
	if err != nil {
		t.Fatal(err)
	}
	read := csi.Secrets{}
	if err := json.Unmarshal(text, (*map[string]string)(&read)); err != nil || !maps.Equal(read, secrets) {
		t.Errorf("%s: %v", text, err)
	}
	if _, err := file.WriteAt([]byte("x"), 0); err == nil {
		t.Error("it can be written")
	}
	if err := file.Truncate(0); err == nil {
		t.Error("it can be shortened")
	}
	if _, err := os.OpenFile(file.Name(), os.O_RDONLY, 0); err == nil {
		t.Error("it has a name")
	}
	if object := object(csi.Secrets{}); string(object) != "{}" {
		t.Errorf("%s", object)
	}
	// In one piece: what was grown out of would stay behind.
	const control = "\x01\x02\x03\x04"
	if made := object(csi.Secrets{control: control}); len(made) > 2+6*8+6 || cap(made) < len(made) {
		t.Errorf("%d of %d", len(made), cap(made))
	}
}

func TestPropertiesHaveTheContractsNames(t *testing.T) {
	given := properties(values{"NodeId": "n", "ControllerCapabilities": []string{"A"}, "Id": "i"})
	if given.Text("node-id") != "n" || len(given.Texts("controller-capabilities")) != 1 || given.Text("id") != "i" {
		t.Error(given)
	}
}

func TestAnUnknownErrorNameIsInternalWithTheName(t *testing.T) {
	for name, want := range map[string]csi.Error{
		"Novel":        {Code: csi.ErrInternal, Message: "Novel: words", Retryable: true},
		"Disconnected": {Code: csi.ErrInternal, Message: "Disconnected: words", Retryable: true},
		"StateCorrupt": {Code: csi.ErrStateCorrupt, Message: "words", Retryable: true},
		"Unavailable":  {Code: csi.ErrUnavailable, Message: "words", Retryable: true},
		"ShuttingDown": {Code: csi.ErrDisconnected, Message: "words", Retryable: true},
	} {
		details := map[string]dbus.Variant{"retryable": dbus.MakeVariant(true)}
		said := dbus.Error{Name: "org.csid1.Error." + name, Body: []any{"words", details}}
		err := failure("Mount", said)
		if gone, is := err.(gone); is != (name == "ShuttingDown") || gone.unasked != is {
			t.Errorf("%s: %+v", name, err)
		}
		made, is := callerError(err).(*csi.Error)
		if !is || made.Code != want.Code || made.Message != want.Message || made.Retryable != want.Retryable {
			t.Errorf("%s: %+v", name, made)
		}
	}
}
