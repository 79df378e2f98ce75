# An etcd for suites of tests. For scripts that have TMPDIR, a directory of their own.

# etcd_data: prints the directory of the members of this run. The script removes it at its end.
etcd_data() {
    local name=${TMPDIR:?}
    echo "/dev/shm/${name##*/}"
}

# metrics ADDRESS PORT: prints what a member of etcd counts.
metrics() {
    local member
    exec {member}<>"/dev/tcp/$1/$2" || return
    printf 'GET /metrics HTTP/1.0\r\n\r\n' >&"$member"
    cat <&"$member"
    exec {member}>&-
}

# with_etcd MEMBERS VARIABLE COMMAND…: runs a command with an etcd of so many members, which is on a tmpfs. The variable has the members'
# endpoints, with commas between them. The members end with this function's shell. Fails if the command fails.
with_etcd() {
    local members=$1 variable=$2 pid=$BASHPID n status=0
    local data
    data=$(etcd_data)/$pid
    shift 2
    local -a addresses=() started=() peers=() endpoints=()
    # Addresses that nothing else has.
    for ((n = 0; n < members; n++)); do
        addresses+=("127.$((pid >> 16 & 63 | n << 6)).$((pid >> 8 & 255)).$((pid & 255))")
        peers+=("m$n=http://${addresses[n]}:2380") endpoints+=("http://${addresses[n]}:2379")
    done
    mkdir -p "$data" || return 1
    for ((n = 0; n < members; n++)); do
        setpriv --pdeathsig KILL etcd --data-dir "$data/m$n" --name "m$n" --initial-cluster "$(IFS=,; echo "${peers[*]}")" \
            --listen-peer-urls "http://${addresses[n]}:2380" --initial-advertise-peer-urls "http://${addresses[n]}:2380" \
            --listen-client-urls "${endpoints[n]}" --advertise-client-urls "${endpoints[n]}" --logger zap --log-level error &
        started+=($!)
    done
    local begun=$SECONDS
    for ((n = 0; n < members; n++)); do
        until [[ $(metrics "${addresses[n]}" 2379 2>/dev/null) == *$'\n'etcd_server_has_leader\ 1* ]]; do
            if ! kill -0 "${started[n]}" 2>/dev/null || ((SECONDS - begun > 30)); then
                echo "etcd has no leader on ${addresses[n]}:2379" >&2
                kill "${started[@]}" 2>/dev/null
                wait "${started[@]}"
                return 1
            fi
            sleep 0.1
        done
    done
    local -x "$variable=$(IFS=,; echo "${endpoints[*]}")"
    "$@" || status=1
    # A csid that used its journal would have passed, too. A csid-server writes to etcd in any case, and csid's tests wait until it has joined one.
    if [[ $variable == CSID_TEST_ETCD && $(metrics "${addresses[0]}" 2379) != *$'\n'etcd_mvcc_put_total\ [1-9]* ]]; then
        echo "nothing was written to etcd on ${addresses[0]}:2379" >&2
        status=1
    fi
    kill "${started[@]}" && wait "${started[@]}"
    rm -rf "$data"
    return $status
}
