#!/usr/bin/env sh
# Makes .envs/megatron, in which trainers run megatron-core on the CPU: `sh ci/megatron.sh PYTHON`.
# constraints/megatron.txt is the whole environment, so nothing is resolved. FOLDER of torch's wheel or its index:
# TORCH_FIND_LINKS, TORCH_INDEX_URL, as for make setup.
set -eu
python=${1:-python3}
env=.envs/megatron
stamp=$env/.complete
[ -e "$stamp" ] && [ constraints/megatron.txt -ot "$stamp" ] && [ ci/megatron.sh -ot "$stamp" ] && exit 0
echo "megatron: making $env takes some minutes the first time"
rm -rf "$env"
"$python" -m venv "$env"
pip="$env/bin/python -m pip install -q --no-compile --no-deps"
torch=$(grep '^torch==' constraints/megatron.txt)
$pip ${TORCH_FIND_LINKS:+--find-links "$TORCH_FIND_LINKS"} ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "$torch"
$pip -r constraints/megatron.txt
$pip --no-build-isolation -e ./proto -e ./libs/servicekit -e ./libs/schema -e ./libs/modelkit -e ./services/trainer -e ./plugins/megatron
touch "$stamp"
