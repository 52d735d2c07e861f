#!/usr/bin/env sh
# Starts a fleet in a directory of its own, draws `headrace run submit examples/tiny.yaml --watch` into $1, stops the
# fleet. PYTHON: the interpreter that has the packages.
set -eu
PYTHON=${PYTHON:-python3}
folder=$(mktemp -d)
headrace="$PYTHON -m headrace_cli"
stop() {
    $headrace down --data-dir "$folder" >/dev/null 2>&1 || true
    rm -rf "$folder"
}
trap stop EXIT
trap 'exit 130' INT TERM
port=$("$PYTHON" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
$headrace up --simulator 0 --port "$port" --data-dir "$folder"
"$PYTHON" -m headrace_modelkit.presets.tiny .headrace/models/tiny >/dev/null
HEADRACE_DATA_DIR=$folder "$PYTHON" -m ci.recording "$1" "$(dirname "$PYTHON")/headrace" run submit examples/tiny.yaml --watch
