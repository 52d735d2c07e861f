#!/usr/bin/env sh
# Makes .envs/ENGINE, in which a rollout instance can run that engine on a CPU: `sh ci/engines.sh ENGINE PYTHON`.
# Everything is pinned by constraints/ENGINE.txt; torch comes from where TORCH_FIND_LINKS or TORCH_INDEX_URL say.
set -eu
engine=$1
python=${2:-python3}
pins=constraints/$engine.txt
folder=.envs/$engine
if [ ! -f "$pins" ]; then
  echo "there is no $pins: ENGINE is one of $(cd constraints && ls vllm.txt sglang.txt 2>/dev/null | sed 's/\.txt//' | xargs)" >&2
  exit 2
fi
if [ -e "$folder/.complete" ] && [ ! "$pins" -nt "$folder/.complete" ]; then exit 0; fi
echo "make engines: making $folder; this takes some minutes and 3.3 GB"
rm -rf "$folder"
"$python" -m venv "$folder"
pip="$folder/bin/python -m pip install -q --disable-pip-version-check"
$pip --no-deps ${TORCH_FIND_LINKS:+--find-links "$TORCH_FIND_LINKS"} ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} -r "$pins"
$pip --no-deps --no-build-isolation -e ./proto -e ./libs/servicekit -e ./libs/schema -e ./libs/modelkit -e ./services/rollout
touch "$folder/.complete"
