#!/usr/bin/env sh
# Makes .envs/vllm, in which the engine tests run the real vLLM on the CPU: `sh ci/engines_vllm.sh PYTHON`.
# constraints/vllm.txt is the whole environment, so nothing is resolved. FOLDER of torch's wheel or its index:
# TORCH_FIND_LINKS, TORCH_INDEX_URL, as for make setup.
set -eu
python=${1:-python3}
env=.envs/vllm
stamp=$env/.complete
[ -e "$stamp" ] && [ constraints/vllm.txt -ot "$stamp" ] && [ ci/engines_vllm.sh -ot "$stamp" ] && exit 0
echo "engines: making $env takes some minutes the first time"
rm -rf "$env"
"$python" -m venv "$env"
pip="$env/bin/python -m pip install -q --no-compile --no-deps"
torch=$(grep '^torch==' constraints/vllm.txt)
$pip ${TORCH_FIND_LINKS:+--find-links "$TORCH_FIND_LINKS"} ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "$torch"
$pip -r constraints/vllm.txt
$pip --no-build-isolation -e ./proto -e ./libs/servicekit -e ./libs/schema -e ./libs/modelkit -e ./services/rollout
# torchvision, which its processor of images needs: a line for the path, one that runs at the start of every process.
site=$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
printf '%s\nimport torchvision_cpu_shim\n' "$(pwd)/integration_tests/engines/torchvision_cpu" >"$site/headrace_torchvision_cpu.pth"
touch "$stamp"
