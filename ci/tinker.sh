#!/usr/bin/env sh
# Makes .envs/tinker with Tinker's client and its cookbook, which nothing of ours is in: `sh ci/tinker.sh PYTHON`.
# constraints/tinker.txt is the whole environment, so nothing is resolved. TORCH_FROM: pip options that say where torch comes from.
set -eu
python=${1:-python3}
env=.envs/tinker
stamp=$env/.complete
[ -e "$stamp" ] && [ constraints/tinker.txt -ot "$stamp" ] && [ ci/tinker.sh -ot "$stamp" ] && exit 0
rm -rf "$env"
"$python" -m venv "$env"
pip="$env/bin/python -m pip install -q --no-compile --no-deps"
# shellcheck disable=SC2086 # several options
$pip ${TORCH_FROM:-} "$(grep '^torch==' constraints/tinker.txt)"
$pip -r constraints/tinker.txt
touch "$stamp"
