#!/bin/sh
# Compile every kernel with other versions of Triton than the one that is installed, each in a temporary folder:
#   sh tests/aot_versions.sh                 # 3.6.0 and 3.9.0, the oldest and the newest that nanoslide runs with
#   sh tests/aot_versions.sh 3.8.0           # or those that are named
# PYTHON names the interpreter, .venv/bin/python by default. A version takes about 200 MB to download and 4 minutes.
set -eu
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || set -- 3.6.0 3.9.0
for version in "$@"; do
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    "${PYTHON:-.venv/bin/python}" -m pip install -q --disable-pip-version-check --no-deps --target "$folder/triton" "triton==$version"
    TRITON_CACHE_DIR="$folder/cache" PYTHONPATH="$folder/triton" "${PYTHON:-.venv/bin/python}" tests/aot.py
    rm -rf "$folder"
done
