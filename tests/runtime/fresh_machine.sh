#!/usr/bin/env bash
# Proves `make setup` and `make demo` on a machine that has git, make and Python and nothing else: a minimal Debian
# in a directory, the root of a mount namespace of its own. Takes minutes, so it is no part of `make test`.
#
#   make fresh                      the whole proof
#   make fresh ARGS="make setup"    another command in the fresh machine, after `make setup`
#   SUITE=trixie make fresh         another release; DEBIAN_MIRROR=... another mirror. Ubuntu 24.04:
#   SUITE=noble DEBIAN_MIRROR='deb [trusted=yes] http://archive.ubuntu.com/ubuntu noble main universe' make fresh
#
# This machine's way to the network (certificates, resolver, PIP_* and pip's own settings, apt's settings) is
# lent to the fresh one while it runs. Nothing of it is written into the checkout.
set -euo pipefail

readonly CHECKOUT=$(cd "$(dirname "$0")/../.." && pwd)
readonly SUITE=${SUITE:-bookworm}
readonly KEEP=${FRESH_CACHE:-/var/cache/resolver-fresh}

die() {
    printf 'fresh: %s\n' "$*" >&2
    exit 1
}

if [[ -z ${FRESH_INSIDE:-} ]]; then
    ((EUID == 0)) || die "needs root to make a chroot: sudo make fresh"
    command -v mmdebstrap >/dev/null || die "mmdebstrap is missing: apt-get install mmdebstrap"
    FRESH_INSIDE=1 exec unshare --mount --propagation private "$0" "$@"
fi

base_image() {
    local image=$KEEP/$SUITE.tar merged=()
    [[ $SUITE != bookworm ]] || merged=(--hook-dir=/usr/share/mmdebstrap/hooks/maybe-merged-usr)
    if [[ ! -e $image ]]; then
        echo "fresh: bootstrapping a minimal Debian $SUITE (kept in $image)" >&2
        mkdir -p "$KEEP"
        mmdebstrap --variant=minbase --include=apt,git,make,python3 --dpkgopt=force-unsafe-io \
            --aptopt='Acquire::Check-Valid-Until "false"' "${merged[@]}" \
            "$SUITE" "$KEEP/new.tar" ${DEBIAN_MIRROR:+"$DEBIAN_MIRROR"} >"$KEEP/log" 2>&1 ||
            die "mmdebstrap failed; its words are in $KEEP/log"
        mv "$KEEP/new.tar" "$image"
    fi
    tar -C "$1" -xf "$image"
}

local_folders() {
    { pip config list 2>/dev/null; env | grep '^PIP_'; } | grep -oE "(file://|=')?/[A-Za-z0-9/._-]+" |
        sed -E "s,^(file://|='),,; s,/simple$,," | sort -u | while read -r place; do
        [[ -d $place ]] && echo "$place"
    done
}

lend_network() {
    cp -L /etc/resolv.conf "$1/etc/resolv.conf"
    # Beside the place where the distribution's own package would overwrite it.
    cp -L /etc/ssl/certs/ca-certificates.crt "$1/etc/lent-certificates.crt"
    # Wherever this machine's pip and apt are told to look, and the local folders that they are told to look in.
    local place
    for place in /etc/pip.conf /etc/apt/apt.conf.d $(local_folders); do
        [[ -e $place ]] || continue
        if [[ -d $place ]]; then
            mkdir -p "$1$place" && mount --bind -o ro "$place" "$1$place"
        else
            cp -L "$place" "$1$place"
        fi
    done
}

fresh=$(mktemp -d)
trap 'umount -R "$fresh" 2>/dev/null; rm -rf --one-file-system "$fresh"' EXIT
mount -t tmpfs -o size=3g,mode=0755 fresh "$fresh" # gone with the namespace, whatever happens
base_image "$fresh"
lend_network "$fresh"
mount -t proc proc "$fresh/proc"
mount --rbind /sys "$fresh/sys"
mount --rbind /dev "$fresh/dev"
git clone --quiet "$CHECKOUT" "$fresh/root/resolver"

inside() {
    local name lent=()
    for name in $(compgen -e | grep -E '^(PIP_|https?_proxy|HTTPS?_PROXY)'); do
        lent+=("$name=${!name}")
    done
    env -i "${lent[@]}" PIP_CERT=/etc/lent-certificates.crt HOME=/root TERM=dumb PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
        unshare --mount --propagation private sh -ec 'cd "$0"; pivot_root . mnt; umount -l mnt; exec sh -c "$1"' "$fresh" \
        "cd /root/resolver && $*"
}

echo "fresh: as a person without root, who must be told what is missing" >&2
if inside "setpriv --reuid=65534 --regid=65534 --clear-groups scripts/setup.sh" 2>"$fresh/told"; then
    die "setup said it was done without root and without gcc"
fi
grep -q 'apt-get install' "$fresh/told" || die "setup did not say which command installs what is missing: $(<"$fresh/told")"
sed 's/^/    /' "$fresh/told" >&2

echo "fresh: make setup" >&2
inside "make setup"
echo "fresh: make setup, again" >&2
before=$(date +%s%N)
inside "make setup"
taken=$((($(date +%s%N) - before) / 1000000))
((taken < 1000)) || die "the second make setup took $taken ms; it should find its stamp and leave"
inside ".venv/bin/resolver --version"
echo "fresh: ${*:-make demo}" >&2
inside "${*:-make demo}"
echo "fresh: all of it works (second setup: $taken ms)" >&2
