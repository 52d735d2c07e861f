#!/usr/bin/env sh
# Runs plugins/robots/tests/*/test_robots_lerobot*.py; makes .envs/lerobot first, with LeRobot itself, which
# nothing of ours is in: `sh ci/lerobot.sh [pytest's options]`. LeRobot needs Python 3.12: PYTHON_312 names it.
# constraints/lerobot.txt is the whole environment, so nothing is resolved. TORCH_FROM: pip options that say where torch comes from.
set -eu
env=.envs/lerobot
stamp=$env/.complete
if [ ! -e "$stamp" ] || [ constraints/lerobot.txt -nt "$stamp" ] || [ ci/lerobot.sh -nt "$stamp" ]; then
    rm -rf "$env"
    "${PYTHON_312:-python3.12}" -m venv "$env"
    pip="$env/bin/python -m pip install -q --no-compile --no-deps"
    # shellcheck disable=SC2086 # several options
    $pip ${TORCH_FROM:-} "$(grep '^torch==' constraints/lerobot.txt)"
    $pip -r constraints/lerobot.txt
    # torchvision's wheel registers kernels that a CPU build of torch does not have.
    packages=$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    cp integration_tests/engines/torchvision_cpu/torchvision_cpu_shim.py "$packages"
    echo "import torchvision_cpu_shim" >"$packages/torchvision_cpu_shim.pth"
    touch "$stamp"
fi
exec "${PYTHON:-python3}" -m pytest -m nightly plugins/robots/tests/policies plugins/robots/tests/rollout -k lerobot "$@"
