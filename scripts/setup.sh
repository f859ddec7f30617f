#!/usr/bin/env bash
# Installs what `resolver` needs: Debian packages that are missing (as root only), and everything Python in .venv.
#
#   scripts/setup.sh        to run it and the demo
#   scripts/setup.sh dev    to test and change it as well
#
# A second run finds its stamp and leaves at once. One run at a time: the checkout's directory is the lock.
set -euo pipefail
cd "$(dirname "$0")/.."
readonly PROFILE=${1:-run} VENV=.venv

say() { printf 'setup: %s\n' "$*" >&2; }
die() {
    say "$1"
    shift
    for line in "$@"; do printf '       %s\n' "$line" >&2; done
    exit 1
}

# --- Debian packages: "<package> <the probe that is true when it is there>" ------------------------------------

have_header() { [[ -e /usr/include/$1 ]]; }
have_library() { /sbin/ldconfig -p | grep -qF "$1"; }
have_command() { PATH=$PATH:/usr/sbin:/sbin command -v "$1" >/dev/null; }
have_venv() { "$1" -c 'import ensurepip, venv' 2>/dev/null; }

missing_packages() {
    have_command gcc || echo gcc
    have_header stdio.h || echo libc6-dev
    have_library libatomic.so.1 || echo libatomic1
    [[ $PROFILE != dev ]] || have_command runc || echo runc
}

install_packages() {
    (($# > 0)) || return 0
    local command="apt-get install -y --no-install-recommends $*"
    have_command apt-get || die "these are missing and this is not Debian or Ubuntu: $*" \
        "Install them by this system's own means, then run this again."
    ((EUID == 0)) || die "these Debian packages are missing: $*" \
        "Only root can install them. Run this, then try again:" "    sudo $command"
    say "installing the Debian packages: $*"
    local log
    log=$(mktemp)
    export DEBIAN_FRONTEND=noninteractive
    # Try with the package lists there are; fetch them only when that fails.
    if ! $command >"$log" 2>&1 && ! { apt-get update && $command; } >"$log" 2>&1; then
        grep -E '^(E|W|Err)' "$log" | tail -n 8 >&2 || tail -n 8 "$log" >&2
        die "apt-get could not install one of: $*" "Its last complaints are above, all of it in $log."
    fi
    rm -f "$log"
}

# --- Python ------------------------------------------------------------------------------------------------------

# The distribution's own Python first: it starts in less time than one built by hand, and `resolver lookup` is
# mostly the start of Python.
find_python() {
    local candidate
    for candidate in /usr/bin/python3 python3.13 python3.12 python3.11 python3; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return 0
        fi
    done
    local found
    found=$(python3 --version 2>/dev/null || echo "no python3")
    die "resolver needs Python 3.11 or later, and this machine has $found." \
        "Debian 12, Ubuntu 24.04 and later have it: apt-get install python3 python3-venv" \
        "On an older system install python3.11, python3.12 or python3.13 so that it is found on PATH."
}

venv_package() {
    if [[ $1 == /usr/bin/python3 ]]; then echo python3-venv; else echo "$(basename "$1")-venv"; fi
}

pip_install() {
    local log failed
    log=$(mktemp)
    if "$VENV/bin/python" -m pip --disable-pip-version-check install "$@" >"$log" 2>&1; then
        rm -f "$log"
        return 0
    fi
    grep -vE '^(WARNING|\[notice\])' "$log" | tail -n 12 >&2
    failed=$(sed -nE 's/.*(No matching distribution found for|Failed building wheel for|Failed to build) ([A-Za-z0-9._=-]+).*/\2/p' "$log" | tail -n 1)
    [[ -n $failed ]] || failed=$(sed -nE 's/^ *(Collecting|Downloading) ([^ ]+).*/\2/p' "$log" | tail -n 1)
    die "pip could not install ${failed:-one of the packages}." \
        "Its last words are above, all of it in $log. Behind a proxy or a mirror, set HTTPS_PROXY or PIP_INDEX_URL."
}

make_venv() {
    local python=$1
    if [[ ! -x $VENV/bin/python ]] || [[ $(readlink -f "$VENV/bin/python") != "$(readlink -f "$python")" ]]; then
        say "making $VENV with $("$python" --version) ($python)"
        rm -rf "$VENV"
        "$python" -m venv "$VENV" || die "$python could not make a virtual environment in $VENV."
    fi
}

install_python() {
    local locks=(-r requirements.lock -r requirements-build.lock)
    [[ $PROFILE != dev ]] || locks=(-r requirements-dev.lock)
    say "installing $(grep -hc '==' "${locks[@]:1:1}") pinned Python packages and what builds them into $VENV"
    pip_install --require-hashes --no-deps "${locks[@]}"
    pip_install --no-deps --no-build-isolation --editable .
    # setuptools leaves an import hook that every start of Python would pay for; nothing here needs it.
    "$VENV/bin/python" -m pip --disable-pip-version-check uninstall --quiet --yes setuptools 2>/dev/null || true
    # pip's own launcher imports `re` to rename itself on Windows: three milliseconds of every lookup.
    printf '#!%s\nfrom resolver.cli import main\n\nraise SystemExit(main())\n' "$PWD/$VENV/bin/python" >"$VENV/bin/resolver"
}

# --- once per change of what is installed ------------------------------------------------------------------------

main() {
    exec 9<.
    flock 9
    local state stamp=$VENV/.setup-$PROFILE
    state=$(cat pyproject.toml requirements*.lock scripts/setup.sh | sha256sum; pwd)
    local missing
    mapfile -t missing < <(missing_packages)
    if ((${#missing[@]} == 0)) && [[ -x $VENV/bin/resolver && -f $stamp && $(<"$stamp") == "$state" ]]; then
        return 0
    fi
    local python
    python=$(find_python)
    have_venv "$python" || missing+=("$(venv_package "$python")")
    install_packages "${missing[@]}"
    [[ -w . ]] || die "everything Python goes into $PWD/$VENV, and $(id -un) may not write there." \
        "Run this as the owner of the checkout, or as root: sudo make setup"
    make_venv "$python"
    install_python
    printf '%s\n' "$state" | tee "$stamp" >"$VENV/.setup-run"
    say "done: $PWD/$VENV/bin/resolver"
}

main
