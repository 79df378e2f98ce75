# A cluster as a person builds it by docs/cluster-install.md, for scripts that source this: three servers with etcd, two hosts and an operator's
# machine, each a booted container. They share a network that this machine's own does not see. The blocks that are typed are those of the
# documents of a cluster. The first argument of the script is the directory of the debs. The script ends with an error when a command fails.

debs=$(realpath -- "$1")
cd "$(dirname "$0")"
documents=(../docs/cluster*.md)
work=$(mktemp -d "${TMPDIR:-/tmp}/csid-demo-cluster.XXXXXX")
network=${work##*/}
declare -A address=([s1]=10.0.0.1 [s2]=10.0.0.2 [s3]=10.0.0.3 [db-1]=10.0.0.11 [db-2]=10.0.0.12 [anna]=10.0.0.21)
servers=(s1 s2 s3)
hosts=(db-1 db-2)

finish() {
    local code=$? machine device
    trap - EXIT INT TERM
    ((code == 0)) || tail -n 40 "$work/log" >&2 || true
    for machine in "${!address[@]}"; do ./container down "$work/$machine" || true; done
    # What the hosts shared is not a machine's own, so its loop devices are not, either.
    if mountpoint -q "$work/shared"; then
        for device in $(losetup --list --noheadings --output NAME,BACK-MAJ:MIN |
            awk -v own="$(stat -c %Hd:%Ld "$work/shared")" '$2 == own { print $1 }'); do
            losetup --detach "$device" || true
        done
        umount "$work/shared" || true
    fi
    ip netns del "$network" 2>/dev/null || true
    rm -rf --one-file-system "$work"
    exit "$code"
}
trap finish EXIT
trap 'exit 130' INT TERM
# A command that ends the script has not always said so. The last line is the script's own.
failed() { echo "$0: exit status $1 in ${FUNCNAME[*]:1}, at the lines $2 ${BASH_LINENO[*]:1}" >&2; }
set -o errtrace
trap 'failed $? $LINENO' ERR
mkdir "$work/shared"
: >"$work/log"

if [[ -t 1 ]]; then bold=$'\e[1m' green=$'\e[32m' plain=$'\e[0m'; else bold='' green='' plain=''; fi
say() { printf '\n%s# %s%s\n' "$bold" "$*" "$plain"; }
die() { echo "$0: $*" >&2; exit 1; }

# shell MACHINE COMMAND: runs a command there.
shell() { ./container exec "$work/$1" bash -c "cd; $2"; }
quietly() { shell "$@" >>"$work/log" 2>&1; }
show() { printf '%sroot@%s:~#%s %s\n' "$green" "$1" "$plain" "$2"; }
# A command line, shown as typed and run there.
run() {
    show "$1" "$2"
    shell "$1" "$2" 2>&1
}
# The same of a command that has to be refused, for this reason.
refused() {
    local said
    show "$1" "$2"
    said=$(shell "$1" "$2" 2>&1) && die "it was not refused: $said"
    echo "$said"
    [[ $said == *"$3"* ]] || die "the refusal does not say '$3'"
}
# until_refused MACHINE COMMAND TEXT MEANWHILE: waits until a command is refused for this reason. Until then it may be refused for the other one.
until_refused() {
    local said end=$((SECONDS + 60))
    show "$1" "$2"
    while said=$(shell "$1" "$2" 2>&1) && die "it was not refused: $said"; [[ $said != *"$3"* ]]; do
        [[ $said == *"$4"* ]] || die "the refusal does not say '$3': $said"
        ((SECONDS < end)) || die "after 60 s the refusal does not say '$3': $said"
        sleep 0.2
    done
    echo "$said"
}

# block HEADING LANGUAGE [NUMBER]: prints a block of the documents, without its fences. A heading is in one of them.
block() {
    awk -v heading="$1" -v language="$2" -v number="${3:-1}" '
        FNR == 1 { here = 0 }
        /^ *```/ {
            if (fenced && wanted) { found = 1; exit }
            fenced = !fenced
            sub(/^ *```/, "")
            wanted = fenced && here && $0 == language && ++count == number
            next
        }
        fenced { if (wanted) print; next }
        /^#/ { sub(/^#+ /, ""); here = $0 == heading }
        END { exit !found }' "${documents[@]}" || die "${documents[*]} have no block $2 ${3:-1} below '$1'"
}
# on_machine NAME: makes a block for the first machine of its kind one for this machine.
on_machine() {
    case $1 in
    s1 | db-1 | anna) cat ;;
    s*) sed "s/^n=1 .*/n=${1#s}/; s/^\(address = .\)s1\./\1$1./" ;;
    db-*) sed "s/db-1/$1/" ;;
    esac
}
# type_block MACHINE HEADING [NUMBER [COMMANDS]]: types the commands of a block there, as one shell, after these commands.
type_block() {
    echo "($1: the commands of \"$2\")"
    shell "$1" "set -eu; ${4:-}
        $(block "$2" sh "${3:-1}" | on_machine "$1")" >>"$work/log" 2>&1 || die "$1: a command of \"$2\" failed"
}
# write_block MACHINE HEADING PATH: writes the file of a block there.
write_block() {
    echo "($1: $3 of \"$2\")"
    block "$2" toml | on_machine "$1" >"$work/$1/root$3"
}
# each FUNCTION MACHINE…: for all of them at the same time.
each() {
    local function=$1 machine jobs=() job
    shift
    for machine; do
        "$function" "$machine" &
        jobs+=($!)
    done
    for job in "${jobs[@]}"; do wait "$job" || die "$function failed"; done
}
# until_said MACHINE COMMAND TEXT: waits until a command says this.
until_said() {
    local said end=$((SECONDS + 60))
    until said=$(shell "$1" "$2" 2>&1) && [[ $said == *"$3"* ]]; do
        ((SECONDS < end)) || die "$1: after 60 s \`$2\` does not say '$3': $said"
        sleep 0.2
    done
}

boot() {
    local options=()
    [[ $1 != db-* ]] || options=("--bind=$work/shared:/var/lib/csi-local")
    ./container up "$work/$1" "${options[@]}" >>"$work/log" 2>&1
    connect "$1"
    block "Install a cluster" hosts >>"$work/$1/root/etc/hosts"
}
# connect MACHINE: gives a machine that has booted its network.
connect() {
    local pid
    pid=$(./container pid "$work/$1")
    ip -n "$network" link add "to-$1" type veth peer name host0 netns "$pid"
    ip -n "$network" link set "to-$1" master switch up
    quietly "$1" "hostname $1; ip addr add ${address[$1]}/24 dev host0; ip link set host0 up; ip link set lo up"
}
# MACHINE PACKAGE…
install_packages() {
    local machine=$1 package
    shift
    for package; do
        cp -- "$debs/$package.deb" "$work/$machine/root/root/"
        quietly "$machine" "dpkg --install $package.deb"
    done
}
equip() {
    case $1 in
    # These machines begin with Debian's etcd masked, and without the links of its init script.
    s*) install_packages "$1" csid-server && quietly "$1" 'systemctl unmask etcd && rm -f /etc/init.d/etcd' ;;
    db-*) install_packages "$1" csid csid-cluster ;;
    anna) install_packages "$1" csid && quietly anna 'systemctl mask --now csid.service csid.socket csid-helper.socket' ;;
    esac
}
# The courier: what a person does with scp.
deliver() {
    local from=$work/anna/root/root/keys/$1 to=$work/$1/root/etc
    case $1 in
    s*)
        mkdir -p "$to/etcd"
        cp "$from"/csid-server/* "$to/csid-server/"
        cp "$from"/etcd/* "$to/etcd/"
        ;;
    db-*) cp "$from"/link/* "$to/csid/link/" ;;
    esac
}
start_etcd() { type_block "$1" etcd; }
start_server() { type_block "$1" Servers 2; }
configure_host() {
    write_block "$1" csid-link /etc/csid/link.toml
    type_block "$1" csid-link
    write_block "$1" "A host" /etc/csid/csid.toml
}
start_host() {
    run "$1" 'systemctl restart csid'
    until_said "$1" 'csictl cluster status' joined
}

# Builds the cluster, up to hosts that have joined and an operator who sees them.
build_cluster() {
    say "Six Debian machines: three servers, two hosts, and Anna's, an operator. They have a network of their own"
    ip netns add "$network"
    ip -n "$network" link add switch type bridge
    ip -n "$network" link set switch up
    mount -t tmpfs -o mode=0755 csid-demo-cluster "$work/shared"
    each boot "${!address[@]}"
    each equip "${!address[@]}"
    echo "s1 s2 s3: etcd-server, etcd-client and csid-server.deb. db-1 db-2: csid.deb and csid-cluster.deb. Anna's: csid.deb, for csictl"
    run s1 'csid-server --version'
    run db-1 'csictl --version'

    say "Anna makes all certificates, and gives each machine its own"
    {
        echo 'set -eu; mkdir -p keys; cd keys'
        block Certificates sh 1
        block Certificates sh 2
        block Keys sh
    } >"$work/anna/root/root/certificates.sh"
    echo '(anna: the commands of "Certificates" and "Keys")'
    quietly anna 'bash certificates.sh' || die "the recipe for certificates failed"
    run anna 'openssl x509 -in keys/db-1.pem -noout -ext subjectAltName,extendedKeyUsage'
    each deliver "${servers[@]}" "${hosts[@]}"

    say "Three members of etcd"
    each start_etcd "${servers[@]}"

    say "Three servers"
    for server in "${servers[@]}"; do write_block "$server" csid-server /etc/csid-server/csid-server.toml; done
    type_block s1 Servers 1
    each start_server "${servers[@]}"

    say "Two hosts join"
    for host in "${hosts[@]}"; do
        configure_host "$host"
        start_host "$host"
    done
    run db-1 'csictl cluster status'

    say "Anna sees the servers and the hosts"
    write_block anna Operators /root/.config/csid/operator.toml
    run anna 'csictl server list'
    run anna 'csictl node list'
}
