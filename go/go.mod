module github.com/csid-project/csid/go

go 1.25.0

require (
	github.com/godbus/dbus/v5 v5.2.4
	golang.org/x/sys v0.27.0
)
