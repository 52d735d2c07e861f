#!/usr/bin/env sh
# The megatron backend against the fsdp one, in .envs/megatron: `sh ci/test_megatron.sh [pytest's options]`.
set -eu
if [ -x .venv/bin/python ]; then PYTHON=${PYTHON:-.venv/bin/python}; fi
sh ci/megatron.sh "${PYTHON:-python3}"
# Only what was installed: the checkout's own environment must not lend packages.
unset PYTHONPATH
exec .envs/megatron/bin/python -m pytest -p no:cacheprovider \
  plugins/megatron/tests "$@"
