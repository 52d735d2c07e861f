#!/usr/bin/env sh
# Steps in fp8, emulated on a CPU: `sh ci/test_float8.sh [pytest's options]`; puts torchao into .envs/float8 first.
# It is no package of .venv: every process that imports transformers would load it.
set -eu
if [ -x .venv/bin/python ]; then PYTHON=${PYTHON:-.venv/bin/python}; fi
pins=constraints/float8.txt
if ! cmp -s "$pins" .envs/float8/.complete; then
    rm -rf .envs/float8
    "${PYTHON:-python3}" -m pip install -q --no-deps --require-hashes --target .envs/float8 -r "$pins"
    cp "$pins" .envs/float8/.complete
fi
PYTHONPATH=.envs/float8 exec "${PYTHON:-python3}" -m pytest services/trainer/tests/test_trainer_float8.py "$@"
