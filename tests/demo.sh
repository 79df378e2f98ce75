#!/bin/bash
# The main job as a person sees it, on a fresh Debian in a container: tests/demo.sh CSID.DEB. Every line of
# output is what the command said; the script ends with an error when one of them fails or what it shows is
# not so.
set -euo pipefail

deb=$(realpath -- "$1")
cd "$(dirname "$0")"
machine=$(mktemp -d "${TMPDIR:-/tmp}/csid-demo.XXXXXX")
trap './container down "$machine"' EXIT

if [[ -t 1 ]]; then bold=$'\e[1m' green=$'\e[32m' plain=$'\e[0m'; else bold='' green='' plain=''; fi
say() { printf '\n%s# %s%s\n' "$bold" "$*" "$plain"; }
# A command line, shown as typed and run in the container.
run() {
    printf '%sroot@csid:~#%s %s\n' "$green" "$plain" "$1"
    ./container exec "$machine" bash -c "cd; $1"
}
quietly() { ./container exec "$machine" bash -c "$1"; }
die() { echo "demo: $*" >&2; exit 1; }

say "A fresh Debian machine, booted in a container"
./container up "$machine"
cp -- "$deb" "$machine/root/root/csid.deb"
run 'dpkg --install csid.deb'
run 'systemctl is-active csid'
run 'csictl wait local'
run 'csictl status'

say "A volume: 64 MB with ext4, on the driver that comes with csid"
run 'csi-local create data --size 64M'
id=$(quietly 'csi-local create data --size 64M') # the same again: it is there
run 'mkdir /srv/data'
run "csictl mount demo data web --plugin local --external-id $id --target /srv/data --restore auto"
run "echo 'written before all that' >/srv/data/hello"
run 'findmnt /srv/data'
run 'csictl mounts'

say "csid is restarted: the mount stays"
run 'systemctl restart csid'
run 'cat /srv/data/hello'

say "csid is killed: the mount stays, csid comes back"
run 'systemctl show --property=MainPID csid'
run 'systemctl kill --signal=KILL csid'
quietly 'until csictl status >/dev/null 2>&1; do sleep 0.1; done'
run 'systemctl show --property=MainPID csid'
run 'csictl wait local'
run 'csictl status'
run 'cat /srv/data/hello'

say "The machine is rebooted: csid mounts the volume again"
before=$(quietly 'cat /proc/sys/kernel/random/boot_id')
echo "(reboot)"
./container reboot "$machine"
[[ $(quietly 'cat /proc/sys/kernel/random/boot_id') != "$before" ]] || die "that was no reboot"
run 'csictl wait local'
quietly "for i in {1..100}; do mountpoint -q /srv/data && exit; sleep 0.1; done; exit 1" ||
    die "not mounted again"
run 'csictl mounts'
run 'cat /srv/data/hello'
[[ $(quietly 'cat /srv/data/hello') == 'written before all that' ]] || die "the file is not what it was"

say "Unmounted and deleted: nothing is left"
run 'csictl unmount demo data web'
run 'csictl mounts'
run "csi-local delete $id"
run 'findmnt /srv/data || echo not mounted'
run 'ls -A /srv/data /var/lib/csi-local'
left=$(
    quietly 'grep -e /var/lib/csid/ -e /srv/data /proc/self/mountinfo
        find /var/lib/csid/plugins -mindepth 3'
    ./container loops "$machine"
)
[[ -z $left ]] || die "something is left: $left"
say "Done: the file was there after a restart, a kill and a reboot"
