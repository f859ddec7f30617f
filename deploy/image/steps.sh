#!/bin/sh
# The steps of the Dockerfile, one function each. They also run in a fresh Debian:
#
#   steps.sh python                                    in both stages
#   steps.sh build-packages | dependencies | wheel     in the first stage, with the checkout in the working directory
#   steps.sh bcc                                       in the last one; WITH_BPF=0 leaves bcc and LLVM out
#
# Result: /opt/resolver, a virtual environment that needs only the distribution's Python.
set -eu

readonly TARGET=/opt/resolver BUILD=/opt/build
export DEBIAN_FRONTEND=noninteractive PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore

# Package lists and logs of the installation are removed.
install_packages() {
    apt-get update --quiet=2
    apt-get install --yes --no-install-recommends "$@"
    apt-get clean
    rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/cache/ldconfig/* /var/cache/debconf/*-old /var/lib/dpkg/*-old \
        /var/log/apt /var/log/dpkg.log /var/log/alternatives.log
}

# libatomic: for the slot writer's compare-and-swap.
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

# The image gets no pip. Only wheels, so no compiler is needed.
dependencies() {
    python3 -m venv "$BUILD"
    python3 -m venv --without-pip "$TARGET"
    "$BUILD/bin/pip" install --require-hashes --no-deps --only-binary=:all: -r requirements-build.lock
    "$BUILD/bin/pip" --python "$TARGET/bin/python" install \
        --require-hashes --no-deps --only-binary=:all: --no-compile -r requirements-kubernetes.lock
}

wheel() {
    "$BUILD/bin/python" -m hatchling build -t wheel -d "$BUILD/dist"
    "$BUILD/bin/pip" --python "$TARGET/bin/python" install --no-deps --no-index --no-compile "$BUILD"/dist/*.whl
    # pip's launcher imports `re`, which costs milliseconds.
    printf '#!%s/bin/python\nfrom resolver.cli import main\n\nraise SystemExit(main())\n' "$TARGET" \
        >"$TARGET/bin/resolver"
    # The image runs read-only, so modules that are not compiled now would be compiled at every start. Unchecked, because
    # the sources can't change.
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
