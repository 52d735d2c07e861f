#!/bin/sh
# What make setup needs of a machine, each with the sentence that says how to get it. $1: the Python to use.
set -eu
"$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || {
    echo "make setup: $1 is no Python 3.11 or newer; install one and name it: make setup PYTHON=python3.12" >&2
    exit 1
}
"$1" -c 'import ensurepip, venv' 2>/dev/null || {
    echo "make setup: $1 cannot make virtual environments; install its venv package (Debian: apt install python3-venv)" >&2
    exit 1
}
command -v cc >/dev/null || command -v gcc >/dev/null || {
    echo "make setup: no C compiler; some dependencies are built from source (Debian: apt install gcc libc6-dev python3-dev)" >&2
    exit 1
}
