#!/usr/bin/env sh
# The contract suite of the simulator service, and the variants, against one real simulator, in .envs/SIM:
# `sh ci/test_simulators.sh metaworld|maniskill|libero [pytest's options]`.
set -eu
sim=${1:?usage: sh ci/test_simulators.sh metaworld|maniskill|libero}
shift
if [ -x .venv/bin/python ]; then PYTHON=${PYTHON:-.venv/bin/python}; fi
sh ci/simulators.sh "$sim" "${PYTHON:-python3}"
# Only what was installed: the checkout's own environment must not lend packages.
unset PYTHONPATH
tests="services/simulator/tests/test_simulator_contract.py services/simulator/tests/test_simulator_knobs.py"
if [ "$sim" = metaworld ]; then tests="$tests plugins/robots/tests/simulator/test_robots_metaworld.py"; fi
# shellcheck disable=SC2086 # several files
BACKEND_UNDER_TEST=$sim exec ".envs/$sim/bin/python" -m pytest $tests "$@"
