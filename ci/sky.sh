#!/usr/bin/env sh
# Makes .envs/sky with SkyPilot alone, whose parser reads the tasks of examples/clusters: `sh ci/sky.sh PYTHON`.
set -eu
python=${1:-python3}
environment=.envs/sky
release=0.14.1
mkdir -p .envs .cache
exec 9>.cache/sky.lock
flock 9
if [ "$(cat "$environment/.complete" 2>/dev/null)" != "$release" ]; then
  rm -rf "$environment"
  "$python" -m venv "$environment"
  "$environment/bin/python" -m pip install -q --no-compile "skypilot==$release"
  echo "$release" >"$environment/.complete"
fi
