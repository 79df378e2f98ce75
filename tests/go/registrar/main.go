// Command registrar runs next to a CSI driver and registers it, with the kubelet's own messages:
//
//	registrar [-type TYPE] [-version VERSION] SOCKET NAME ENDPOINT
//
// It listens on SOCKET, and prints each answer to what it says there.
package main

import (
	"context"
	"flag"
	"fmt"
	"net"
	"os"

	"google.golang.org/grpc"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

type registrar struct {
	registration.UnimplementedRegistrationServer
	info *registration.PluginInfo
}

func (r registrar) GetInfo(context.Context, *registration.InfoRequest) (*registration.PluginInfo, error) {
	return r.info, nil
}

func (r registrar) NotifyRegistrationStatus(
	_ context.Context, status *registration.RegistrationStatus,
) (*registration.RegistrationStatusResponse, error) {
	if status.PluginRegistered {
		fmt.Println("registered")
	} else {
		fmt.Println("refused:", status.Error)
	}
	return &registration.RegistrationStatusResponse{}, nil
}

func main() {
	kind := flag.String("type", registration.CSIPlugin, "the type of plugin")
	version := flag.String("version", "1.0.0", "the version that the plugin supports")
	flag.Parse()
	if flag.NArg() != 3 {
		fmt.Fprintln(os.Stderr, "usage: registrar [-type TYPE] [-version VERSION] SOCKET NAME ENDPOINT")
		os.Exit(2)
	}
	if err := serve(flag.Arg(0), &registration.PluginInfo{
		Type:              *kind,
		Name:              flag.Arg(1),
		Endpoint:          flag.Arg(2),
		SupportedVersions: []string{*version},
	}); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func serve(socket string, info *registration.PluginInfo) error {
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	server := grpc.NewServer()
	registration.RegisterRegistrationServer(server, registrar{info: info})
	return server.Serve(listener)
}
