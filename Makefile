# Thin: a target runs what it says. What it needs and does not find it installs, and says so: Debian packages
# by apt-get, tools below target/tools, a driver and promtool for the tests below ~/.cache/csid-tests.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.ONESHELL:
# One recipe after the other: `make test` measures at its end, and a recipe without $(MAKE) in it is not run by `make -n`.
.NOTPARALLEL:
.PHONY: help demo demo-cluster test run-tests soak soak-cluster check advisory-db advisories bench bench-cluster bench-pictures pgo count count-renew deb rpm docs package-files libcsi cfgd-csi debian-packages machine-packages go

TOOLS := $(CURDIR)/target/tools
CARGO_DENY := $(TOOLS)/cargo-deny-0.20.2/bin/cargo-deny
CARGO_DEB := $(TOOLS)/cargo-deb-3.8.0/bin/cargo-deb
INFERNO := $(TOOLS)/inferno-0.12.8/bin/inferno-flamegraph
CARGO_GENERATE_RPM := $(TOOLS)/cargo-generate-rpm-0.21.1/bin/cargo-generate-rpm
MDBOOK := $(TOOLS)/mdbook-0.5.4/bin/mdbook
CARGO_FUZZ := $(TOOLS)/cargo-fuzz-0.13.2/bin/cargo-fuzz
# What is built once for a machine, not once for a target directory.
KEPT := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/csid-tests
CFGD_CSI := $(KEPT)/cfgd-csi-0.4.0/bin/cfgd-csi
PROMTOOL := $(KEPT)/prometheus/promtool
DEBIAN_PACKAGES := bindfs build-essential busybox-static crun dbus e2fsprogs etcd-client etcd-server iproute2 iptables libprotobuf-dev openssl pkgconf podman polkitd procps \
	protobuf-compiler rpm systemd-container util-linux valgrind xfsprogs
# What tests install in a booted machine, from files that are downloaded here. On this machine they would start services.
MACHINE_PACKAGES := docker-compose docker.io postgresql psmisc
PROFILE ?= release
# PGO=no: csid in the packages of a release is not optimised by a profile. It is slower, and takes half the time to build.
PGO ?= yes
# The packages that a test installs.
demo demo-cluster run-tests soak: PROFILE := dev

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: debian-packages deb ## a volume mounted, csid killed, a machine rebooted, the file still there (root)
	tests/demo.sh target/csid.deb

demo-cluster: debian-packages deb ## three servers and two hosts by docs/cluster-install.md: a volume that one host has at a time (root)
	tests/demo-cluster.sh target

test: run-tests count ## all tests, with counts: Rust, Go, csi-sanity, the system in a booted container (root)

run-tests: debian-packages machine-packages go $(CARGO_FUZZ) $(PROMTOOL) cfgd-csi deb rpm
	rm -rf target/tools/build # the tools are installed
	PATH=$(dir $(CARGO_FUZZ)):$(dir $(PROMTOOL)):$$PATH tests/run

soak: debian-packages deb ## csid killed 10,000 times, and more that takes long (root)
	tests/soak

soak-cluster: debian-packages go ## a cluster with an earlier release, 30 minutes in which no process grows, 1,000 faults judged by porcupine (root)
	tests/soak-cluster

check: $(CARGO_DENY) go ## format, clippy, go vet, dependencies
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --all-features -- -D warnings
	$(CARGO_DENY) check bans licenses sources
	unformatted=$$(gofmt -l go examples/go tests/bench/go tests/go)
	[[ -z $$unformatted ]] || { echo "gofmt -w $$unformatted" >&2; exit 1; }
	for module in go examples/go/scheduler tests/bench/go tests/go/{histories,proto,registrar,sanity}; do
		# The header is all that is needed of libcsi.
		PKG_CONFIG=true CGO_CFLAGS=-I$(CURDIR)/include go -C $$module vet ./...
		go -C $$module mod tidy -diff
	done
	CGO_ENABLED=0 go -C examples/go/scheduler vet ./...
	# csid runs on Linux alone; a program that uses the package builds for others, too.
	for system in windows darwin freebsd; do
		GOOS=$$system CGO_ENABLED=0 go -C go build ./...
	done

# cargo-deny looks for a database by this name, which has a hash of RustSec's address in it, and never fetches here. It refuses one
# that was not fetched for 90 days.
ADVISORIES := target/advisories/advisory-db-3157b0e258782691
advisory-db:
	@if [[ ! -d "$(DB)/.git" || ! -d "$(DB)/crates" ]]; then
		echo "no advisory database at '$(DB)', so nothing was checked: make advisories DB=PATH, a git clone of RustSec's advisory-db" >&2
		exit 1
	fi

advisories: advisory-db $(CARGO_DENY) ## Cargo.lock against RustSec's advisories: make advisories DB=PATH, a git clone of advisory-db, which is not fetched
	mkdir -p $(dir $(ADVISORIES))
	ln -sfn "$$(realpath "$(DB)")" $(ADVISORIES)
	cargo fetch --locked --quiet
	CSID_ADVISORIES=$(CURDIR)/$(dir $(ADVISORIES)) $(CARGO_DENY) --offline check advisories

bench: debian-packages go ## what a durable mount costs against the bare RPCs, and the targets: one table (root)
	cargo build --locked --release -p csid -p csid-bench
	packaging/pgo
	libcsi-ffi/link target/libcsi --release
	cc -std=c99 -O2 -Wall -Wextra -Werror tests/bench/c/cycles.c -I target/libcsi/include -L target/libcsi/lib -lcsi \
		-Wl,-rpath,$(CURDIR)/target/libcsi/lib -o target/release/csid-bench-c
	PKG_CONFIG_PATH=$(CURDIR)/target/libcsi/lib/pkgconfig CGO_LDFLAGS=-Wl,-rpath,$(CURDIR)/target/libcsi/lib \
		go -C tests/bench/go build -o $(CURDIR)/target/release/csid-bench-cgo
	CGO_ENABLED=0 go -C tests/bench/go build -o $(CURDIR)/target/release/csid-bench-go
	target/release/csid-bench --csid target/pgo/csid

pgo: debian-packages ## target/pgo/csid: a release of csid, optimised by a profile of the benchmark (root)
	packaging/pgo

bench-cluster: debian-packages ## three servers and 1,000 played nodes against raw transactions of their etcd: one table (root)
	cargo build --locked --release -p csid -p csid-link -p csid-server -p csid-bench-cluster
	target/release/csid-bench-cluster

# A flame graph needs the names of functions.
bench-pictures: debian-packages $(INFERNO) ## docs/pictures: the steps of a mount, and flame graphs of its instructions (root)
	cargo build --locked --profile pictures -p csid -p csid-bench
	target/pictures/csid-bench --milliseconds 4000 pictures target/bench/pictures
	target/pictures/csid-bench count --stacks target/bench/pictures
	mkdir -p docs/pictures
	for callers in 1 64; do
		$(INFERNO) --flamechart --countname µs --width 1000 --title "A mount with $$callers callers" \
			target/bench/pictures/steps-$$callers.folded >docs/pictures/steps-$$callers.svg
	done
	for operation in mount unmount; do
		$(INFERNO) --minwidth 0.4 --countname instructions --title "csid's instructions for one $$operation" \
			target/bench/pictures/$$operation.folded >docs/pictures/$$operation.svg
	done

count: debian-packages ## the instructions and system calls of one mount, against tests/bench/count.toml (root)
	cargo build --locked --release -p csid -p csid-bench
	target/release/csid-bench count

count-renew: debian-packages ## keep what one mount executes now, in tests/bench/count.toml (root)
	cargo build --locked --release -p csid -p csid-bench
	target/release/csid-bench count --renew

# What the packages have that cargo does not build.
package-files: debian-packages
	cargo build --locked -p csid -p csictl -p csi-local -p csid-volume-plugin -p csid-link -p csid-server --profile $(PROFILE)
	if [[ $(PROFILE) == release && $(PGO) != no ]]; then
		packaging/pgo
		install target/pgo/csid target/release/csid
	elif [[ $(PROFILE) == release ]]; then
		# The root daemon has no TLS. In one call with csid-server it is built with that.
		cargo build --locked -p csid --profile release
	fi
	if [[ $(PROFILE) == release ]] && grep --quiet rustls target/release/csid; then
		echo "target/release/csid has rustls, and csid has no network" >&2
		exit 1
	fi
	csictl=target/$(if $(filter dev,$(PROFILE)),debug,$(PROFILE))/csictl
	mkdir -p target/man target/completions target/bin target/sbin
	# The package keeps the links of target/sbin. cargo-deb reads what they name here.
	ln -sfn ../../$$csictl target/bin/csictl
	ln -sfn ../bin/csictl target/sbin/mount.csi
	ln -sfn ../bin/csictl target/sbin/umount.csi
	$$csictl gen-man target/man
	awk -f packaging/man/org.csid1.5.awk proto/dbus/org.csid1.xml >target/man/org.csid1.5
	$$csictl completions bash >target/completions/csictl.bash
	$$csictl completions zsh >target/completions/_csictl
	$$csictl completions fish >target/completions/csictl.fish

deb: $(CARGO_DEB) libcsi package-files ## target/csid.deb, csid-volume-plugin.deb, csid-cluster.deb, csid-server.deb, libcsi1.deb, libcsi-dev.deb (PROFILE=dev: fast to build, slower to run)
	package() {
		$(CARGO_DEB) --quiet --no-build --no-strip --profile $(PROFILE) $(if $(filter dev,$(PROFILE)),--fast) "$$@"
	}
	package --package csid --output target/csid.deb
	package --package csid-volume-plugin --output target/csid-volume-plugin.deb
	package --package csid-link --output target/csid-cluster.deb
	package --package csid-server --output target/csid-server.deb
	package --package libcsi-ffi --output target/libcsi1.deb
	package --package libcsi-ffi --variant dev --output target/libcsi-dev.deb

rpm: $(CARGO_GENERATE_RPM) package-files ## target/csid.rpm, csid-volume-plugin.rpm, csid-cluster.rpm, csid-server.rpm, with the debs' files
	package() {
		awk -f packaging/rpm/assets.awk $$1/Cargo.toml >target/$$2.rpm.toml
		$(CARGO_GENERATE_RPM) --package $$1 --metadata-overwrite target/$$2.rpm.toml --profile $(PROFILE) --auto-req builtin \
			$(if $(filter dev,$(PROFILE)),--payload-compress none) --output target/$$2.rpm
	}
	package csid csid
	package volume-plugin csid-volume-plugin
	package link csid-cluster
	package server csid-server

libcsi: debian-packages ## target/libcsi: the C library, shared and static, csi.pc and csi.h
	libcsi-ffi/link target/libcsi --profile $(PROFILE)

# README.md and others are chapters, too, so the book has the places of the repository.
docs: $(MDBOOK) ## target/docs: the documents as one book
	rm -rf target/book target/docs
	mkdir -p target/book/src
	cp docs/book.toml target/book/
	cp -r --parents *.md docs/*.md docs/decisions proto/dbus/org.csid1.xml tests/witness/README.md target/book/src/
	sed 's|](\([^.)]\)|](docs/\1|; s|](\.\./|](|' docs/SUMMARY.md >target/book/src/SUMMARY.md
	rm target/book/src/docs/SUMMARY.md
	$(MDBOOK) build --dest-dir $(CURDIR)/target/docs target/book

cfgd-csi: $(CFGD_CSI) ## a driver of somebody else's, for the tests: built once, outside target/

$(CFGD_CSI): | debian-packages
	@echo "installing cfgd-csi-0.4.0 below $(KEPT): some minutes, once for this machine"
	CARGO_PROFILE_DEV_DEBUG=0 cargo install --quiet --locked --debug --root "$(KEPT)/cfgd-csi-0.4.0" cfgd-csi@0.4.0

# Of Debian's package prometheus, which is not installed: it would start a service.
$(PROMTOOL): | debian-packages
	@echo "downloading promtool below $(KEPT), once for this machine"
	directory=$$(mktemp -d)
	trap 'rm -rf "$$directory"' EXIT
	cd "$$directory"
	download() { apt-get download -qq -o APT::Sandbox::User=root prometheus; }
	if ! download 2>/dev/null; then
		apt-get update -qq
		download
	fi
	dpkg-deb --fsys-tarfile prometheus_*.deb | tar --extract ./usr/bin/promtool
	install -D usr/bin/promtool $@

debian-packages:
	@missing=$$(for p in $(DEBIAN_PACKAGES); do
		dpkg-query --show --showformat='$${db:Status-Status}' $$p 2>/dev/null | grep -qx installed || echo -n " $$p"
	done)
	if [[ -n $$missing ]]; then
		echo "installing:$$missing"
		apt-get update -qq
		# The tests start members of their own. The package would start one, here and in each test's machine.
		unit=/etc/systemd/system/etcd.service
		[[ $$missing != *etcd-server* || -e $$unit || -L $$unit ]] || { mkdir -p "$${unit%/*}" && ln -s /dev/null "$$unit"; }
		DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $$missing
	fi

# A test's machine has this machine's packages and lists. So these files and those packages are all that apt needs there.
machine-packages:
	@download() {
		mkdir -p "$(KEPT)/debs/partial"
		apt-get install -qq -y --no-install-recommends --download-only -o APT::Sandbox::User=root \
			-o Dir::Cache::archives="$(KEPT)/debs" $(MACHINE_PACKAGES)
	}
	if ! download 2>/dev/null; then
		apt-get update -qq
		download
	fi >/dev/null
	rm -rf "$(KEPT)/debs/lock" "$(KEPT)/debs/partial"

GO_NEEDED := 1.25
go:
	@version() { go env GOVERSION 2>/dev/null || true; }
	is_new() { [[ $$(printf 'go%s\n%s\n' $(GO_NEEDED) "$$(version)" | sort -V | head -n 1) = go$(GO_NEEDED) ]]; }
	if ! is_new; then
		candidate=$$(apt-cache policy golang-go 2>/dev/null | awk '/Candidate:/ { print $$2 }')
		if ! dpkg --compare-versions "$${candidate:-0}" ge 2:$(GO_NEEDED); then
			echo "Go $(GO_NEEDED) or newer has to be installed and in PATH: https://go.dev/doc/install (here: $$(version))" >&2
			exit 1
		fi
		echo "installing: golang-go"
		DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends golang-go
	fi

$(INFERNO): FEATURES := --features cli
$(MDBOOK): FEATURES := --features search
# It computes digests of all files, for minutes if it is not optimised.
$(CARGO_GENERATE_RPM): export CARGO_PROFILE_DEV_OPT_LEVEL := 2
# Built once, as fast as they build: each runs for a second.
TOOL_PROGRAMS := cargo-deny cargo-deb cargo-fuzz cargo-generate-rpm inferno-flamegraph mdbook
$(addprefix $(TOOLS)/%/bin/,$(TOOL_PROGRAMS)): | debian-packages
	@echo "installing $(*F) below target/tools"
	name=$(*F); CARGO_PROFILE_DEV_DEBUG=0 cargo install --quiet --locked --debug --no-default-features $(FEATURES) \
		--root $(TOOLS)/$$name --target-dir target/tools/build $${name%-*}@$${name##*-}
