module github.com/csid-project/csid/tests/bench/go

go 1.25.0

require github.com/csid-project/csid/go v0.0.0

require (
	github.com/godbus/dbus/v5 v5.2.4 // indirect
	golang.org/x/sys v0.27.0 // indirect
)

replace github.com/csid-project/csid/go => ../../../go
