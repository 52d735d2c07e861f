#!/bin/sh
# Regenerates the checked-in Python code from the .proto sources, or writes it below the folder given as $1.
set -eu
cd "$(dirname "$0")/src"
out="${1:-.}"
"${PYTHON:-python3}" -m grpc_tools.protoc -I. --python_out="$out" --pyi_out="$out" --grpc_python_out="$out" \
    $(find headrace -name '*.proto' | sort)
