#!/usr/bin/env sh
# Makes .envs/SIM with the simulator service, one simulator and what its tests need:
# `sh ci/simulators.sh metaworld|maniskill|libero PYTHON`. TORCH_FROM: pip options that say where torch comes from.
# System libraries come by apt-get where it may: OSMesa for MuJoCo's pictures, Vulkan for ManiSkill.
set -eu
sim=${1:?usage: sh ci/simulators.sh metaworld|maniskill|libero PYTHON}
python=${2:-python3}
environment=.envs/$sim
pins=constraints/$sim.txt
if [ ! -e "$pins" ]; then
  echo "there is no simulator environment '$sim': metaworld, maniskill or libero" >&2
  if [ "$sim" = isaaclab ]; then
    echo "Isaac Lab is installed by its own instructions; then pip install headrace-simulator into its Python" >&2
  fi
  exit 2
fi
if [ ! -e "$environment/.complete" ] || [ "$pins" -nt "$environment/.complete" ] \
  || [ services/simulator/pyproject.toml -nt "$environment/.complete" ] \
  || [ plugins/robots/pyproject.toml -nt "$environment/.complete" ]; then
  rm -rf "$environment"
  "$python" -m venv "$environment"
  pip="$environment/bin/python -m pip install -q --no-compile -c $pins"
  $pip hatchling editables
  # shellcheck disable=SC2086 # several options
  if [ "$sim" != metaworld ]; then $pip --no-deps ${TORCH_FROM:-} torch; fi
  $pip --no-deps --no-build-isolation -e ./proto -e ./libs/schema -e ./libs/servicekit -e ./plugins/robots -e ./services/simulator
  $pip "headrace-simulator[$sim]" pytest pytest-asyncio pytest-timeout
  "$environment/bin/python" -m pip check
  touch "$environment/.complete"
fi
if [ "$sim" = maniskill ]; then sh deploy/vulkan.sh; exit; fi
if ldconfig -p | grep -q libOSMesa; then exit 0; fi
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
  sh ci/apt.sh libosmesa6 libegl1 libgl1 libglib2.0-0
else
  echo "there is no OSMesa: state observations run, pictures do not (Debian: apt-get install libosmesa6 libegl1 libgl1)" >&2
fi
