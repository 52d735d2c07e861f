#!/usr/bin/env sh
# Runs the tests against LeRobot's own policies and arms; makes .envs/lerobot first, which nothing of ours is in:
# `sh ci/lerobot.sh [pytest's options]`. LeRobot needs Python 3.12: PYTHON_312 names it.
# constraints/lerobot.txt is the whole environment, so nothing is resolved. TORCH_FROM: pip options that say where torch comes from.
set -eu
env=.envs/lerobot
stamp=$env/.complete
if [ ! -e "$stamp" ] || [ constraints/lerobot.txt -nt "$stamp" ] || [ ci/lerobot.sh -nt "$stamp" ]; then
    rm -rf "$env"
    "${PYTHON_312:-python3.12}" -m venv "$env"
    pip="$env/bin/python -m pip install -q --no-compile"
    # With what it needs: a CUDA build does not import without CUDA's libraries.
    # shellcheck disable=SC2086 # several options
    $pip ${TORCH_FROM:-} "$(grep '^torch==' constraints/lerobot.txt)"
    $pip --no-deps -r constraints/lerobot.txt
    # torchvision's wheel registers kernels that a CPU build of torch does not have.
    packages=$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    cp integration_tests/engines/torchvision_cpu/torchvision_cpu_shim.py "$packages"
    echo "import torchvision_cpu_shim" >"$packages/torchvision_cpu_shim.pth"
    touch "$stamp"
fi
exec "${PYTHON:-python3}" -m pytest -m nightly plugins/robots/tests -k lerobot "$@"
