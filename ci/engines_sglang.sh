#!/usr/bin/env sh
# Makes .envs/sglang, in which the engine tests run the real SGLang on the CPU: `sh ci/engines_sglang.sh PYTHON`.
# constraints/sglang.txt is the whole environment, so nothing is resolved: SGLang's own requirements name CUDA builds,
# of which no test needs one. FOLDER of torch's wheel or its index: TORCH_FIND_LINKS, TORCH_INDEX_URL, as for make setup.
set -eu
python=${1:-python3}
env=.envs/sglang
stamp=$env/.complete
shims=$(pwd)/integration_tests/engines
[ -e "$stamp" ] && [ constraints/sglang.txt -ot "$stamp" ] && [ ci/engines_sglang.sh -ot "$stamp" ] && exit 0
echo "engines: making $env takes some minutes the first time"
rm -rf "$env"
"$python" -m venv "$env"
pip="$env/bin/python -m pip install -q --no-compile --no-deps"
torch=$(grep '^torch==' constraints/sglang.txt)
$pip ${TORCH_FIND_LINKS:+--find-links "$TORCH_FIND_LINKS"} ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "$torch"
$pip -r constraints/sglang.txt
$pip --no-build-isolation -e ./proto -e ./libs/servicekit -e ./libs/schema -e ./libs/modelkit -e ./services/rollout -e ./plugins/sglang
# Lines for the path, one that runs at the start of every process, also of those that SGLang starts.
site=$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
printf '%s\n%s\nimport torchvision_cpu_shim\n' "$shims/sglang_cpu" "$shims/torchvision_cpu" >"$site/headrace_sglang_cpu.pth"
touch "$stamp"
