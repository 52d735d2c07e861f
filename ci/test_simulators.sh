#!/usr/bin/env sh
# The tests of one real simulator, in .envs/SIM: `sh ci/test_simulators.sh SIM [pytest's options]`. Of simulators of robots
# the contract suite of the service and the variants; of environments of others their own tests, and a whole run; of
# servers (openenv, nemo-gym) the tests that ask them, from .venv.
set -eu
sim=${1:?usage: sh ci/test_simulators.sh metaworld|maniskill|libero|dm_control|pybullet|robotics|playground|verifiers|web|openenv|nemo-gym}
shift
if [ -x .venv/bin/python ]; then PYTHON=${PYTHON:-.venv/bin/python}; fi
sh ci/simulators.sh "$sim" "${PYTHON:-python3}"
# Only what was installed: the checkout's own environment must not lend packages.
unset PYTHONPATH
tests="services/simulator/tests/test_simulator_contract.py services/simulator/tests/test_simulator_knobs.py"
case $sim in
  dm_control | pybullet | robotics | playground) tests=services/simulator/tests/test_simulator_contract.py ;;
  metaworld) tests="$tests plugins/robots/tests/simulator/test_robots_metaworld.py" ;;
  verifiers | web)
    ".envs/$sim/bin/python" -m pytest "plugins/environments/tests/test_environments_$sim.py"
    BACKEND_UNDER_TEST=$sim exec "${PYTHON:-python3}" -m pytest integration_tests/engines/test_environments_run.py "$@"
    ;;
  openenv | nemo-gym)
    exec "${PYTHON:-python3}" -m pytest -m "" "plugins/environments/tests/test_environments_$(echo "$sim" | tr - _).py" "$@"
    ;;
esac
# shellcheck disable=SC2086 # several files
BACKEND_UNDER_TEST=$sim exec ".envs/$sim/bin/python" -m pytest $tests "$@"
