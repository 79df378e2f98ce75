#!/bin/bash
# The runbooks of docs/cluster-operations.md, typed as they stand: tests/runbooks.sh DIR, the directory of the debs. What happened to the machines is
# made to happen first. db-1 has a volume mounted, and its file is there after each runbook.
set -euo pipefail
. "$(dirname "$0")/cluster-machines.sh"

# until_typed MACHINE HEADING NUMBER [COMMANDS]: types a block until its commands succeed, as a person repeats what is refused as Busy.
until_typed() {
    local end=$((SECONDS + 60))
    until (type_block "$@") 2>>"$work/log"; do
        ((SECONDS < end)) || die "after 60 s a command of \"$2\" fails still"
        sleep 1
    done
}
mount_on() { run "$1" 'csictl mount default data web --target /srv/data --wait 30s'; }
keeps_file() {
    [[ $(shell "$1" 'cat /srv/data/hello') == 'written on db-1' ]] || die "$1: the file is not what it was"
    echo "$1 has the volume mounted, and its file is as it was"
}
readonly log_of_server='journalctl --unit csid-server --output cat --no-pager'
# restore HOST…: restores the backup of s1 on all servers, up to the recovery, in which these hosts have joined.
restore() {
    local server host
    each stop_all "${servers[@]}"
    type_block s1 'Restore etcd' 2
    for server in s2 s3; do
        cp "$work/s1/root/var/lib/etcd/backup" "$work/s1/root/var/lib/etcd/backup.token" "$work/$server/root/var/lib/etcd/"
    done
    each restore_etcd "${servers[@]}"
    until_said anna 'csictl --operator cluster status --json' restored
    type_block anna 'Restore etcd' 4
    for host; do until_said "$host" 'csictl cluster status' recovering; done
}
stop_all() { type_block "$1" 'Restore etcd' 1; }
# before_restore: commands that are typed first. Empty: there are none.
before_restore=''
restore_etcd() { type_block "$1" 'Restore etcd' 3 "$before_restore"; }
# new_machine SERVER: as a machine that has Debian's packages and this server's keys, and no more: etcd runs a member of its own.
new_machine() {
    quietly "$1" 'systemctl stop csid-server etcd; systemctl disable csid-server etcd; rm -r /var/lib/etcd/csid /etc/default/etcd; systemctl start etcd'
}
# The block of etcd without its last two lines.
configure_etcd() {
    shell "$1" "set -eu; $(block etcd sh | head -n -2 | on_machine "$1")" >>"$work/log" 2>&1 || die "$1: a command of \"etcd\" failed"
}
# of_node NODE [OPTION]: prints a function by which csictl is about this node where a block has db-1. It confirms a fence, which has this option, too.
of_node() {
    cat <<END
csictl() {
    set -- "\${@/db-1/$1}"
    [[ \$2 != fence ]] || set -- "\$@" --confirm $1 ${2:-}
    command csictl "\$@"
}
END
}
# certificate NUMBER: types a block of "A stolen key" with the function for certificates.
certificate() { type_block anna 'A stolen key' "$1" "cd keys; umask 077; $(block 'Renewed certificates' sh | sed -n '/^certificate()/,/^}/p')"; }
# revoke NAME: has all servers refuse a certificate.
revoke() {
    local server
    block 'Revoked certificates' sh 2 | sed "s/anna\.pem/$1.pem/" >"$work/anna/root/root/keys/revoke.sh"
    quietly anna 'cd keys; bash -eu revoke.sh </dev/null'
    for server in "${servers[@]}"; do
        cp "$work/anna/root/root/keys/crl.pem" "$work/$server/root/etc/csid-server/"
        type_block "$server" 'Revoked certificates' 3
    done
}
serial() { openssl x509 -in "$1" -noout -serial; }
# next_release PACKAGE…: makes debs of the next release of these packages, which have the files of this one.
next_release() {
    local package
    for package; do
        dpkg-deb --raw-extract "$debs/$package.deb" "$work/$package"
        sed -i 's/^Version: .*/&+next/' "$work/$package/DEBIAN/control"
        dpkg-deb --build "$work/$package" "$work/$package.deb" >>"$work/log"
    done
}
main_pid() { shell "$1" "systemctl show --property MainPID --value $2"; }
# install_release MACHINE DIRECTORY NUMBER: copies the debs of a directory to a machine, and types the block of "Upgrades" with this number, which installs
# them. Dies unless the packages have their versions then, and the unit was started again.
install_release() {
    local machine=$1 from=$2 package unit=csid packages=(csid csid-cluster) before
    if [[ $machine == s* ]]; then unit=csid-server packages=(csid-server); fi
    before=$(main_pid "$machine" $unit)
    for package in "${packages[@]}"; do cp -- "$from/$package.deb" "$work/$machine/root/root/"; done
    echo "($machine: the commands of \"Upgrades\")"
    # A command for an operator's machine is in the servers' block.
    shell "$machine" "set -eu; $(block Upgrades sh "$3" | grep -v '^csictl ')" >>"$work/log" 2>&1 || die "$machine: a command of \"Upgrades\" failed"
    for package in "${packages[@]}"; do
        [[ $(shell "$machine" "dpkg-query --show --showformat '\${Version}' $package") == "$(dpkg-deb --field "$from/$package.deb" Version)" ]] ||
            die "$machine: $package is not of the release that was installed"
    done
    [[ $(main_pid "$machine" $unit) != "$before" ]] || die "$machine: $unit was not started again"
}
upgrade_server() { install_release "$1" "$2" "$3" && until_said anna 'csictl server list' "$1"; }
upgrade_host() { install_release "$1" "$2" "$3" && until_said "$1" 'csictl cluster status' joined; }

build_cluster

say "db-1 mounts a volume"
for host in "${hosts[@]}"; do quietly "$host" 'csictl wait local; mkdir /srv/data'; done
id=$(shell db-1 'csi-local create data --size 64M')
run anna "csictl --operator volume register default data --plugin local --external-id $id --access-mode single-node-writer"
mount_on db-1
run db-1 "echo 'written on db-1' >/srv/data/hello && sync /srv/data/hello"

say "Certificates end soon: renewed certificates"
before=$(serial "$work/db-1/root/etc/csid/link/node.pem")
type_block anna 'Renewed certificates' 1 'cd keys'
type_block anna Keys 1 'cd keys'
each deliver "${servers[@]}" "${hosts[@]}"
[[ $(serial "$work/db-1/root/etc/csid/link/node.pem") != "$before" ]] || die "the certificate of db-1 is the old one"
for server in "${servers[@]}"; do type_block "$server" 'Renewed certificates' 2; done
for host in "${hosts[@]}"; do type_block "$host" 'Renewed certificates' 3; done
for host in "${hosts[@]}"; do until_said "$host" 'csictl cluster status' joined; done
run anna 'csictl server list'
keeps_file db-1

say "A new release: upgrades"
next_release csid-server csid csid-cluster
for server in "${servers[@]}"; do upgrade_server "$server" "$work" 1; done
upgrade_server s3 "$debs" 3
upgrade_server s3 "$work" 1
for host in "${hosts[@]}"; do upgrade_host "$host" "$work" 2; done
upgrade_host db-1 "$debs" 4
keeps_file db-1
upgrade_host db-1 "$work" 2
type_block anna Upgrades 5
keeps_file db-1

say "etcd has no space: a full etcd"
# quota SERVER: gives the member of etcd this quota.
quota() { quietly "$1" "sed -i 's/^ETCD_QUOTA_BACKEND_BYTES=.*/ETCD_QUOTA_BACKEND_BYTES=$quota/' /etc/default/etcd; systemctl restart etcd"; }
quota=16000000
for server in "${servers[@]}"; do quota "$server"; done
readonly put='etcdctl --endpoints https://10.0.0.1:2379 --cacert /etc/etcd/etcd-ca.pem --cert /etc/etcd/member.pem --key /etc/etcd/member.key put filler'
refused s1 "export ETCDCTL_API=3; set -o pipefail; for n in {1..40}; do head --bytes 1000000 /dev/zero | tr '\\0' x | $put >/dev/null || exit; done" 'database space exceeded'
until_said anna 'csictl --operator cluster status' etcd-full
until_said anna 'csictl node list' db-1
keeps_file db-1
run db-1 'csictl unmount default data web'
# The servers have yet to learn of the unmount.
refused db-2 'csictl mount default data web --target /srv/data' db-1/web
# Both blocks are typed in one shell.
shell s1 "set -eu; $(block 'A full etcd' sh 1); $(block 'A full etcd' sh 2)" >>"$work/log" 2>&1 || die "s1: a command of \"A full etcd\" failed"
mount_on db-2
keeps_file db-2
run db-2 'csictl unmount default data web'
mount_on db-1
quota=8589934592
for server in "${servers[@]}"; do quota "$server"; done

say "A command switches machines off: a lost machine"
# The command of this test switches nothing off. A file has its exit status.
fence_exits() { for server in "${servers[@]}"; do echo "$1" >"$work/$server/root/etc/csid-server/fence-exit"; done; }
fence_exits 1
for server in "${servers[@]}"; do
    block 'A lost machine' toml >>"$work/$server/root/etc/csid-server/csid-server.toml"
    printf '%s\n' '#!/bin/sh' 'echo "$1 is switched off"' 'exit "$(cat /etc/csid-server/fence-exit)"' >"$work/$server/root/usr/local/lib/csid-fence"
    type_block "$server" 'A lost machine' 2
    until_said "$server" "$log_of_server" 'the configuration was taken'
done

say "The power of db-1 fails: a lost machine"
./container kill "$work/db-1" >>"$work/log" 2>&1
until_said anna 'csictl --operator cluster status --json' node-away
refused db-2 'csictl mount default data web --target /srv/data' db-1/web
refused anna 'csictl node fence db-1 --reason "no power since 3:10" --confirm db-1' 'csid-fence has exited with 1'
refused db-2 'csictl mount default data web --target /srv/data' db-1/web
fence_exits 0
type_block anna 'A lost machine' 1 'csictl() { command csictl "$@" --confirm db-1; }'
until_said s1 "$log_of_server" 'db-1 is switched off'
mount_on db-2
keeps_file db-2
run db-2 'csictl unmount default data web'
connect db-1
until_said db-1 'csictl cluster status' joined
mount_on db-1
keeps_file db-1

say "db-1 is to be switched off for a while: maintenance"
type_block anna Maintenance 1
refused db-1 'mountpoint /srv/data' 'is not a mountpoint'
# The host hears of the drain's end a moment later.
until_said db-1 'csictl mount default data web --target /srv/data' /publish/
keeps_file db-1

say "db-1 is broken, and a new machine takes its place: a replaced machine"
quietly db-1 'sync /srv/data/hello'
./container down "$work/db-1" >>"$work/log" 2>&1
boot db-1
equip db-1
deliver db-1
configure_host db-1
type_block db-1 'A replaced machine' 1
until_said db-1 'csictl cluster status' another-machine
type_block anna 'A replaced machine' 2 "csictl() { command csictl \"\$@\" --machine-id $(shell db-1 'cat /etc/machine-id'); }"
until_said db-1 'csictl cluster status' joined
refused db-2 'csictl mount default data web --target /srv/data' db-1/web
type_block anna 'A replaced machine' 3 'csictl() {
    [[ $* != *" release "* ]] || set -- "$@" --yes default/data
    command csictl "$@"
}'
run anna 'csictl --operator claims'
quietly db-1 'csictl wait local; mkdir /srv/data'
mount_on db-1
keeps_file db-1

say "s2 and its disk are gone: a lost server"
new_machine s2
for host in "${hosts[@]}"; do until_said "$host" 'csictl cluster status' joined; done
configure_etcd s2
type_block s1 'A lost server' 1
type_block s2 'A lost server' 2
until_said anna 'csictl server list' s2
keeps_file db-1

say "s2 and s3 and their disks are gone: a lost majority of etcd"
for server in s2 s3; do
    quietly "$server" 'systemctl kill --signal=KILL etcd'
    new_machine "$server"
done
keeps_file db-1
run db-1 'csictl unmount default data web'
type_block s1 'A lost majority of etcd' 1
for server in s2 s3; do
    configure_etcd "$server"
    type_block "$server" 'A lost majority of etcd' 3
done

say "Restore etcd"
restore "${hosts[@]}"
until_typed anna 'Restore etcd' 9
for host in "${hosts[@]}"; do until_said "$host" 'csictl cluster status' joined; done
# db-1 had unmounted the volume while nobody knew it.
mount_on db-2
keeps_file db-2
run anna 'csictl server audit'

say "s2 and s3 and their disks are gone again, and etcd on s1 is started again: a lost majority of etcd"
for server in s2 s3; do
    quietly "$server" 'systemctl kill --signal=KILL etcd'
    new_machine "$server"
done
quietly s1 'systemctl kill --signal=KILL etcd'
type_block s1 'A lost majority of etcd' 2
for server in s2 s3; do
    configure_etcd "$server"
    type_block "$server" 'A lost majority of etcd' 3
done
before_restore='etcdctl() { command etcdctl "$@" --skip-hash-check; }'
restore "${hosts[@]}"
before_restore=''
until_typed anna 'Restore etcd' 9
for host in "${hosts[@]}"; do until_said "$host" 'csictl cluster status' joined; done
keeps_file db-2

say "A scheduler attaches volumes: AttachVolume, by the controller of a plugin on db-2"
mkdir "$work/db-2/root/var/lib/csi-disk"
cat >"$work/db-2/root/etc/csid/plugins.d/disk.toml" <<'END'
supervision = "managed"
argv = ["/usr/sbin/csi-local", "--state-dir", "/var/lib/csi-disk", "serve", "--attach"]
profile = "node-block"
END
for server in "${servers[@]}"; do
    printf '[[grant]]\nwho = "%s"\nnamespaces = ["default"]\nmay = ["%s"]\n' node/db-2 controller:disk operator/anna attach \
        >>"$work/$server/root/etc/csid-server/csid-server.toml"
    quietly "$server" 'systemctl reload csid-server'
done
quietly db-2 "sed -i 's/^# controllers = .*/controllers = [\"disk\"]/' /etc/csid/csid.toml; systemctl restart csid; csictl wait disk"
until_said db-2 'csictl cluster status' joined
for disk in disk-1 disk-2; do
    id_of_disk=$(shell db-2 "csi-local --state-dir /var/lib/csi-disk create $disk --size 16M")
    run anna "csictl --operator volume register default $disk --plugin disk --external-id $id_of_disk --access-mode single-node-writer"
done
# The servers hear of the controller a moment after the host has joined.
until_said anna 'csictl --operator volume attach default disk-2 db-2' ''

say "A backup, and etcd has lost its data once more: restore etcd"
quietly s1 'rm /var/lib/etcd/backup'
type_block s1 'A backup of etcd' 1
run anna 'csictl --operator volume detach default disk-2 db-2'
run anna 'csictl --operator volume attach default disk-1 db-2'
# This host does not come back.
./container kill "$work/db-1" >>"$work/log" 2>&1
restore db-2
refused anna 'csictl server resume' 'the cluster waits for db-1'
for server in "${servers[@]}"; do type_block "$server" 'Restore etcd' 5; done
until_typed anna 'Restore etcd' 10 'csictl() {
    set -- "${@/db-3/db-1}"
    command csictl "${@/db-4/db-2}" --confirm db-1
}'
until_said db-2 'csictl cluster status' joined
until_said db-2 'csictl cluster status' 'generation: 4'
until_said anna 'csictl node show db-1' fenced
keeps_file db-2
# Nobody knows that disk-1 is attached.
refused db-2 'csictl mount default disk-1 web' 'has no grant for'
type_block anna 'Restore etcd' 6
type_block anna 'Restore etcd' 7
for server in "${servers[@]}"; do type_block "$server" 'Restore etcd' 8; done
until_refused db-2 'csictl mount default disk-1 web' 'AttachVolume' 'has no grant for'
type_block anna 'After a restore' 1
for disk in disk-1 disk-2; do run anna "csictl --operator volume deregister default $disk"; done
connect db-1
until_said db-1 'csictl cluster status' joined
refused db-1 'csictl mount default data web --target /srv/data' db-2/web
# The row of a server has its new grants with its next beat.
until_said anna 'csictl server audit' 'No findings'
run anna 'csictl server audit'

say "The key of a server was stolen: new authorities"
type_block anna Certificates 1 'mkdir new; cd new'
type_block anna Certificates 2 'umask 077; cd new'
type_block anna Keys 1 'cd new'
quietly anna 'mv keys keys-before; mv new keys'
each deliver "${servers[@]}" "${hosts[@]}"
renew_all() { type_block "$1" 'A stolen key' 8; }
each renew_all "${servers[@]}"
for host in "${hosts[@]}"; do type_block "$host" 'Renewed certificates' 3; done
for host in "${hosts[@]}"; do until_said "$host" 'csictl cluster status' joined; done
run anna 'csictl server list'
keeps_file db-2

say "Unmounted and deregistered: nothing is left"
run db-2 'csictl unmount default data web'
until_said anna 'csictl --operator claims --json' '[]'
run anna 'csictl --operator volume deregister default data'
run db-1 "csi-local delete $id"

say "db-2 is to be no part of the cluster: a host that leaves"
type_block anna 'A host that leaves' 1
run db-2 'csictl cluster leave'
quietly db-2 "sed -i '/^\[cluster\]/,\$d' /etc/csid/csid.toml"
type_block db-2 'A host that leaves' 2
until_said db-2 'csictl cluster status' 'has no cluster'
until_typed anna 'A host that leaves' 3

say "db-2 joins again, and has a volume meanwhile: a host with volumes of its own"
own=$(shell db-2 'csi-local create own --size 64M')
run db-2 "csictl volume register default own --plugin local --external-id $own --access-mode single-node-writer"
quietly db-2 'mkdir --mode=700 /etc/csid/link'
deliver db-2
configure_host db-2
quietly db-2 'systemctl restart csid'
until_said db-2 'csictl cluster status' own-volumes
refused db-2 'csictl cluster join --import' 'grant `register`'
for server in "${servers[@]}"; do quietly "$server" 'sed -i "s|node/db-1|node/db-2|" /etc/csid-server/csid-server.toml; systemctl reload csid-server'; done
until_typed db-2 'A host with volumes of its own' 1
until_said db-2 'csictl cluster status' joined
until_said anna 'csictl --operator volume show default own --json' node/db-2

say "The key of db-2 was stolen: a stolen key"
run db-2 'csictl mount default own web --target /srv/data'
type_block anna 'A stolen key' 1 "$(of_node db-2)"
until_said db-2 'csictl cluster status' blocked
run db-2 'mountpoint /srv/data'
refused db-1 'csictl mount default own web --target /srv/data' db-2/web
run db-2 'csictl unmount default own web'
type_block anna 'A stolen key' 2 "$(of_node db-2 --without-command)"
run db-1 'csictl mount default own web --target /srv/data'
type_block anna 'Revoked certificates' 1 'cd keys'
for server in "${servers[@]}"; do quietly "$server" 'sed -i "1i crl = \"/etc/csid-server/crl.pem\"" /etc/csid-server/csid-server.toml'; done
revoke db-2
# The node's session ends, and it does not come back.
until_said db-2 'csictl cluster status' 'certificate is not valid now'
until_said db-1 'csictl cluster status' joined
certificate 3
for kind in pem key; do cp "$work/anna/root/root/keys/db-3.$kind" "$work/db-2/root/etc/csid/link/node.$kind"; done
for server in "${servers[@]}"; do quietly "$server" 'sed -i "s|node/db-2|node/db-3|" /etc/csid-server/csid-server.toml; systemctl reload csid-server'; done
quietly db-2 "sed -i 's/^node = .*/node = \"db-3\"/' /etc/csid/csid.toml"
type_block db-2 'A stolen key' 4
until_said db-2 'csictl cluster status' joined
until_typed anna 'A stolen key' 5 "$(of_node db-2)"
type_block anna 'A stolen key' 6 'csictl() {
    set -- "${@/db-1/db-2}"
    command csictl "${@/data/own}"
}'
run db-1 'csictl unmount default own web'
run db-2 'csictl mount default own web --target /srv/data'
run anna 'csictl node list'
run db-2 'csictl unmount default own web'
run anna 'csictl --operator volume deregister default own'
run db-2 "csi-local delete $own"

say "db-3 is sold: a lost machine"
./container down "$work/db-2" >>"$work/log" 2>&1
type_block anna 'A lost machine' 3 "$(of_node db-3)"
type_block anna 'A lost machine' 4 "$(of_node db-3)"
[[ $(shell anna 'csictl node list') != *db-[23]* ]] || die "the host is in the list still"

say "The key of Anna was stolen: a stolen key"
certificate 7
for server in "${servers[@]}"; do quietly "$server" 'sed -i "s|operator/anna|&-2|" /etc/csid-server/csid-server.toml; systemctl reload csid-server'; done
refused anna 'csictl node list' 'has no grant'
revoke anna
refused anna 'csictl node list' 'invalid peer certificate: Revoked'
quietly anna 'cd keys; for kind in pem key; do cp anna-2.$kind ~/.config/csid/anna.$kind; done'
run anna 'csictl node list'
say "Done in $SECONDS s: the runbooks do what they say"
