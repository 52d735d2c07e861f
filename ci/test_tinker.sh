#!/usr/bin/env sh
# Tinker's own client and recipes against a fleet: `sh ci/test_tinker.sh [pytest's options]`; makes .envs/tinker first.
set -eu
if [ -x .venv/bin/python ]; then PYTHON=${PYTHON:-.venv/bin/python}; fi
sh ci/tinker.sh "${PYTHON:-python3}"
exec "${PYTHON:-python3}" -m pytest integration_tests/engines/test_tinker_run.py "$@"
