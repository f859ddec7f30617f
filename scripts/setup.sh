#!/usr/bin/env bash
# Installs the requirements of `resolver`: missing Debian packages (as root only), and everything Python in .venv.
#
#   scripts/setup.sh        to run it and the demo
#   scripts/setup.sh dev    also to test, measure and change it
#
# A second run finds its stamp and exits at once. One run at a time: the checkout's directory is the lock.
set -euo pipefail
cd "$(dirname "$0")/.."
readonly VENV=.venv
PROFILE=${1:-run}

say() { printf 'setup: %s\n' "$*" >&2; }
die() {
    say "$1"
    shift
    for line in "$@"; do printf '       %s\n' "$line" >&2; done
    exit 1
}

# --- Debian packages ---------------------------------------------------------------------------------------------

# Not grep -q: it exits at the first match, and the broken pipe would count as a failure.
have_library() { /sbin/ldconfig -p | grep -F "$1" >/dev/null; }
have_command() { PATH=$PATH:/usr/sbin:/sbin command -v "$1" >/dev/null; }
have_bcc() { compgen -G '/usr/lib/python3*/*-packages/bcc/__init__.py' >/dev/null; }
have_prometheus() { [[ -x $VENV/bin/$1 ]] || have_command "$1"; }
have_seccomp_profile() { [[ -e $VENV/share/seccomp.json || -e /usr/share/containers/seccomp.json ]]; }
have_venv() { "$1" -c 'import ensurepip, venv' 2>/dev/null; }

missing_packages() {
    have_command gcc || echo gcc
    [[ -e /usr/include/stdio.h ]] || echo libc6-dev
    have_library libatomic.so.1 || echo libatomic1
    [[ $PROFILE == dev ]] || return 0
    have_command runc || echo runc
    have_command systemd-analyze || echo systemd
    have_command tmux || echo tmux
    have_command strace || echo strace
    have_command curl || echo curl
    have_command git || echo git
    have_command openssl || echo openssl
    have_bcc || echo python3-bpfcc
    have_command bpftool || bpftool_package
    have_command zsh || echo zsh
    have_command fish || echo fish
    have_command mandoc || echo mandoc
    have_command chromium-headless-shell || is_ubuntu || echo chromium-headless-shell # the site's test; Ubuntu has none
    have_command buildah || echo buildah
    have_command mmdebstrap || echo mmdebstrap
    have_command "qemu-system-$(uname -m)" || qemu_package "$(uname -m)"
    have_command mke2fs || echo e2fsprogs
    have_command mkfs.btrfs || echo btrfs-progs
    [[ -e /usr/share/keyrings/debian-archive-keyring.gpg ]] || echo debian-archive-keyring
}

is_ubuntu() { grep -qx 'ID=ubuntu' /etc/os-release 2>/dev/null; }

# On Ubuntu bpftool belongs to the kernel's tools.
bpftool_package() {
    if is_ubuntu; then echo linux-tools-common; else echo bpftool; fi
}

qemu_package() {
    if [[ $1 == aarch64 ]]; then echo qemu-system-arm; else echo qemu-system-x86; fi
}

install_packages() {
    (($# > 0)) || return 0
    have_command apt-get || die "these are missing and this is not Debian or Ubuntu: $*" \
        "Install them by this system's own means, then run this again."
    ((EUID == 0)) || die "these Debian packages are missing: $*" \
        "Only root can install them. Run this, then try again:" \
        "    sudo apt-get install -y --no-install-recommends $*"
    say "installing the Debian packages: $*"
    apt_install "$@" || die "apt-get could not install one of: $*" "Its last complaints are above, all of it in $APT_LOG."
}

# The daemon works without it, so setup goes on where it can't be installed.
install_bcc() {
    local package=python3-bpfcc reason="this is not Debian or Ubuntu"
    if have_command apt-get && ((EUID != 0)); then
        reason="only root can install it: sudo apt-get install -y --no-install-recommends $package"
    elif have_command apt-get; then
        say "installing the Debian package $package"
        apt_install "$package" && return 0
        reason="apt-get could not install it, its words are in $APT_LOG"
    fi
    say "without $package the kernel can't keep the map of processes:" \
        "\`resolver run\` falls back to --source netlink ($reason)"
}

# Try with the present package lists; fetch them only if that fails.
apt_install() {
    local command="apt-get install -y --no-install-recommends $*"
    APT_LOG=$(mktemp)
    export DEBIAN_FRONTEND=noninteractive
    if ! $command >"$APT_LOG" 2>&1 && ! { apt-get update && $command; } >"$APT_LOG" 2>&1; then
        grep -E '^(E|W|Err)' "$APT_LOG" | tail -n 8 >&2 || tail -n 8 "$APT_LOG" >&2
        return 1
    fi
    rm -f "$APT_LOG"
}

# Prometheus and its linter. Their package would run a server on this machine, so only two files of it are used.
fetch_prometheus() {
    local program
    for program in prometheus promtool; do
        have_prometheus $program || take_out prometheus usr/bin/$program bin/$program 755 ||
            say "without $program the tests of metrics, dashboard and alerts fail"
    done
}

# A container runtime's default profile. Its package would configure this machine for containers.
fetch_seccomp_profile() {
    have_seccomp_profile || take_out golang-github-containers-common usr/share/containers/seccomp.json share/seccomp.json 644 ||
        die "without a runtime's default seccomp profile the tests can't run the daemon under it."
}

take_out() {
    local package=$1 from=$2 to=$3 mode=$4 place done=1
    place=$(mktemp -d)
    say "taking $(basename "$from") out of the Debian package $package"
    if (cd "$place" && download "$package" && dpkg-deb --fsys-tarfile ./*.deb | tar -x "./$from") 2>"$place/log"; then
        install -D -m "$mode" "$place/$from" "$VENV/$to" && done=0
    else
        tail -n 1 "$place/log" >&2
    fi
    rm -rf "$place"
    return "$done"
}

download() {
    have_command apt-get || { echo "this is not Debian or Ubuntu" >&2 && return 1; }
    apt-get download "$1" >&2 || { ((EUID == 0)) && apt-get update >&2 && apt-get download "$1" >&2; }
}

# --- Python ------------------------------------------------------------------------------------------------------

# The distribution's Python first: it starts faster than one built by hand, and `resolver lookup` is mostly the start
# of Python.
find_python() {
    local candidate
    for candidate in /usr/bin/python3 python3.13 python3.12 python3.11 python3; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return 0
        fi
    done
    die "resolver needs Python 3.11 or later, and this machine has $(python3 --version 2>/dev/null || echo "no python3")." \
        "Debian 12, Ubuntu 24.04 and later have it: apt-get install python3 python3-venv" \
        "On an older system install python3.11, python3.12 or python3.13 so that it is found on PATH."
}

venv_package() {
    if [[ $1 == /usr/bin/python3 ]]; then echo python3-venv; else echo "$(basename "$1")-venv"; fi
}

# Without a network pip would try each package five times, more slowly each time: 22 s.
pip_install() {
    local log
    log=$(mktemp)
    export PIP_RETRIES=${PIP_RETRIES:-1}
    if "$VENV/bin/python" -m pip --disable-pip-version-check install "$@" >"$log" 2>&1; then
        rm -f "$log"
        return 0
    fi
    grep -vE '^(WARNING|\[notice\])' "$log" | tail -n 12 >&2
    die "pip could not install the Python packages. Its last words are above, all of it in $log." \
        "Behind a proxy or a mirror, set HTTPS_PROXY or PIP_INDEX_URL. Without a network, fetch them elsewhere:" \
        "    pip download --dest wheels $*" \
        "and run this with PIP_NO_INDEX=1 PIP_FIND_LINKS=wheels."
}

# A venv without a stamp is half made: its set-up was interrupted.
make_venv() {
    local python=$1
    if ! compgen -G "$VENV/.setup-*" >/dev/null || [[ $(readlink -f "$VENV/bin/python") != "$(readlink -f "$python")" ]]; then
        say "making $VENV with $("$python" --version) ($python)"
        rm -rf "$VENV"
        "$python" -m venv "$VENV" || die "$python could not make a virtual environment in $VENV."
    fi
    rm -f "$VENV"/.setup-*
}

install_python() {
    local locks=(-r requirements.lock -r requirements-build.lock)
    [[ $PROFILE != dev ]] || locks=(-r requirements-dev.lock)
    say "installing $(grep -hc '==' "${locks[@]:1:1}") pinned Python packages and what builds them into $VENV"
    pip_install --require-hashes --no-deps "${locks[@]}"
    pip_install --no-deps --no-build-isolation --editable .
    # setuptools installs an import hook that slows every start of Python, and nothing here needs it.
    "$VENV/bin/python" -m pip --disable-pip-version-check uninstall --quiet --yes setuptools 2>/dev/null || true
    # pip's launcher imports `re`, for Windows: three milliseconds of every lookup.
    local first="#!$PWD/$VENV/bin/python"
    # A shebang can't contain a space: sh then runs a line that to Python is part of a string.
    [[ $PWD != *' '* ]] || first=$'#!/bin/sh\n\'\'\'exec\' '"\"$PWD/$VENV/bin/python\""$' "$0" "$@"\n\'\'\''
    printf '%s\nfrom resolver.cli import main\n\nraise SystemExit(main())\n' "$first" >"$VENV/bin/resolver"
}

# Without compiled files a start is slow, and every start is if PYTHONDONTWRITEBYTECODE is set; and the daemon's loop
# would write one where it imports a module late. Compiled ones are found by their time: 0.1 s if none is missing.
compile_python() {
    "$VENV/bin/python" -m compileall -q resolver bpf
}

# --- once per change of the requirements -------------------------------------------------------------------------

# The stamp's content: the requirements, the place, and the missing recommended packages, by user.
state() {
    cat pyproject.toml requirements*.lock scripts/setup.sh | sha256sum
    pwd
    have_bcc || echo "without bcc as $EUID"
    [[ $PROFILE != dev ]] || { have_prometheus prometheus && have_prometheus promtool; } || echo "without Prometheus as $EUID"
    [[ $PROFILE != dev ]] || have_seccomp_profile || echo "without a seccomp profile"
}

main() {
    exec 9<.
    flock 9
    local stamp=$VENV/.setup-$PROFILE
    local missing
    mapfile -t missing < <(missing_packages)
    if ((${#missing[@]} == 0)) && [[ -x $VENV/bin/resolver && -f $stamp && $(<"$stamp") == "$(state)" ]]; then
        [[ ! -w $stamp ]] || compile_python
        return 0
    fi
    local python
    python=$(find_python)
    have_venv "$python" || missing+=("$(venv_package "$python")")
    install_packages "${missing[@]}"
    [[ -w . ]] || die "everything Python goes into $PWD/$VENV, and the user $(id -un) cannot write there." \
        "Run this as the owner of the checkout, or as root: sudo make setup"
    have_bcc || install_bcc
    make_venv "$python"
    install_python
    [[ $PROFILE != dev ]] || { fetch_prometheus && fetch_seccomp_profile; }
    compile_python
    state >"$stamp"
    PROFILE=run state >"$VENV/.setup-run" # dev has all that run has
    say "done: $PWD/$VENV/bin/resolver"
}

main
