#!/bin/bash
# A volume that one host of a cluster has at a time: tests/demo-cluster.sh DIR, the directory of the debs. The script ends with an error when
# a command fails, or when what it shows is not so.
set -euo pipefail
. "$(dirname "$0")/cluster-machines.sh"

build_cluster

say "A volume. Its plugin has image files in /var/lib/csi-local. Here both hosts have the same directory there, as if it were a storage network"
run db-1 'csictl wait local'
quietly db-2 'csictl wait local'
run db-1 'csi-local create data --size 64M'
id=$(shell db-1 'csi-local create data --size 64M') # the same again: it is there
run anna "csictl --operator volume register default data --plugin local --external-id $id --access-mode single-node-writer"
run anna 'csictl --operator volume list'

say "db-1 mounts it"
for host in "${hosts[@]}"; do quietly "$host" 'mkdir /srv/data'; done
run db-1 'csictl mount default data web --target /srv/data'
run db-1 "echo 'written on db-1' >/srv/data/hello && sync /srv/data/hello"

say "db-2 is refused, and is given the holder's name"
refused db-2 'csictl mount default data web --target /srv/data' db-1/web
run anna 'csictl --operator claims'

say "Anna asks why, and sees the whole cluster on one screen"
run anna 'csictl --operator explain default data'
run anna 'csictl --operator cluster status'

say "The server of db-1 dies, with its etcd. db-1 joins another one, and keeps its claim and its mount"
server_of() { shell "$1" 'csictl cluster status --json' | sed -n 's/.*"server": *"\(s[0-9]\)\..*/\1/p'; }
# joins_another HOST SERVER: waits until a host has another server than this one.
joins_another() {
    local now end=$((SECONDS + 30))
    until now=$(server_of "$1") && [[ -n $now && $now != "$2" ]]; do
        ((SECONDS < end)) || die "$1 has not joined another server than $2 in 30 s: $(shell "$1" 'csictl cluster status' 2>&1)"
        sleep 0.2
    done
}
at=$(server_of db-1)
[[ -n $at ]] || die "db-1 has no server"
run "$at" 'systemctl kill --signal=KILL etcd csid-server; systemctl stop etcd csid-server'
# db-2 may have had the same server.
for host in "${hosts[@]}"; do joins_another "$host" "$at"; done
run db-1 'csictl cluster status'
# The servers may have no leader of etcd for a moment, and answer nobody.
until_refused db-2 'csictl mount default data web --target /srv/data' db-1/web 'csictl: Unavailable: '
run db-1 'cat /srv/data/hello'
run "$at" 'systemctl start etcd csid-server'

say "db-1 unmounts it. Now db-2 has it"
run db-1 'csictl unmount default data web'
run db-2 'csictl mount default data web --target /srv/data --wait 20s'
run db-2 'cat /srv/data/hello'
[[ $(shell db-2 'cat /srv/data/hello') == 'written on db-1' ]] || die "the file is not what it was"
refused db-1 'csictl mount default data web --target /srv/data' db-2/web
run anna 'csictl --operator claims'

say "Unmounted and deregistered: nothing is left"
run db-2 'csictl unmount default data web'
until_said anna 'csictl --operator claims --json' '[]'
run anna 'csictl --operator volume deregister default data'
run anna 'csictl --operator volume list'
run db-1 "csi-local delete $id"
run anna 'csictl server audit'
run db-2 'csictl cluster leave'
left=$(losetup --list --noheadings --output NAME,BACK-MAJ:MIN | awk -v own="$(stat -c %Hd:%Ld "$work/shared")" '$2 == own')
[[ -z $left ]] || die "loop devices are left: $left"
say "Done in $SECONDS s: one host at a time had the volume, and it kept its file"
