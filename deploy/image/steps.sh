#!/bin/sh
# The steps of the image's recipe, one function each; the Dockerfile calls them, and so can anyone in a fresh Debian:
#
#   steps.sh python                                    what both stages have
#   steps.sh build-packages | dependencies | wheel     in the first stage, with the checkout in the working directory
#   steps.sh bcc                                       in the last one; WITH_BPF=0 leaves bcc and LLVM out
#
# Result: /opt/resolver, a virtual environment of the distribution's Python that needs nothing but it.
set -eu

readonly TARGET=/opt/resolver BUILD=/opt/build
export DEBIAN_FRONTEND=noninteractive PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore

# A package list is of no use in an image, and neither is what apt and dpkg wrote down about the installation.
install_packages() {
    apt-get update --quiet=2
    apt-get install --yes --no-install-recommends "$@"
    apt-get clean
    rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/cache/ldconfig/* /var/cache/debconf/*-old /var/lib/dpkg/*-old \
        /var/log/apt /var/log/dpkg.log /var/log/alternatives.log
}

# libatomic: the compare-and-swap of the slot writer.
python() {
    install_packages python3 libatomic1
}

build_packages() {
    install_packages python3-venv
}

bcc() {
    case ${WITH_BPF:-1} in
    1) install_packages python3-bpfcc ;;
    0) ;;
    *)
        echo "steps.sh: WITH_BPF is 1 or 0, not '$WITH_BPF'" >&2
        exit 2
        ;;
    esac
}

# pip stays outside of what is shipped. Only wheels: nothing is compiled here, so that no compiler has to be.
dependencies() {
    python3 -m venv "$BUILD"
    python3 -m venv --without-pip "$TARGET"
    "$BUILD/bin/pip" install --require-hashes --no-deps --only-binary=:all: -r requirements-build.lock
    "$BUILD/bin/pip" --python "$TARGET/bin/python" install \
        --require-hashes --no-deps --only-binary=:all: --no-compile -r requirements-kubernetes.lock
}

wheel() {
    [ -z "${VERSION:-}" ] || printf 'Metadata-Version: 2.1\nName: hami-resolver\nVersion: %s\n' "$VERSION" >PKG-INFO
    "$BUILD/bin/python" -m hatchling build -t wheel -d "$BUILD/dist"
    "$BUILD/bin/pip" --python "$TARGET/bin/python" install --no-deps --no-index --no-compile "$BUILD"/dist/*.whl
    # pip's own launcher imports `re`; this one does not.
    printf '#!%s/bin/python\nfrom resolver.cli import main\n\nraise SystemExit(main())\n' "$TARGET" \
        >"$TARGET/bin/resolver"
    # The root file system is read-only where this runs: whatever is not compiled now would be compiled at every start.
    # Unchecked: the sources can't change, so no start has to look whether they did.
    "$TARGET/bin/python" -m compileall -q --invalidation-mode unchecked-hash "$TARGET/lib"
}

case ${1:-} in
python | dependencies | wheel | bcc) "$1" ;;
build-packages) build_packages ;;
*)
    echo "usage: steps.sh python | build-packages | dependencies | wheel | bcc" >&2
    exit 2
    ;;
esac
