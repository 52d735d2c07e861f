#!/usr/bin/env sh
# Makes .envs/SIM with the simulator service, one simulator and what its tests need:
# `sh ci/simulators.sh metaworld|maniskill|libero|dm_control|pybullet|robotics|playground|verifiers|web PYTHON`, or with a server of environments alone, for tests:
# `openenv`, or `nemo-gym`, which takes PYTHON313. TORCH_FROM: pip options that say where torch comes from.
# System libraries come by apt-get where it may: OSMesa for MuJoCo's pictures, Vulkan for ManiSkill, Chromium for web pages.
set -eu
sim=${1:?usage: sh ci/simulators.sh metaworld|maniskill|libero|verifiers|web|openenv|nemo-gym PYTHON}
python=${2:-python3}
environment=.envs/$sim
pins=constraints/$sim.txt
dists="./proto ./libs/schema ./libs/servicekit ./plugins/robots ./services/simulator"
extra="headrace-simulator[$(echo "$sim" | tr _ -)]"
own=plugins/robots/pyproject.toml
case $sim in
  metaworld | maniskill | libero | dm_control | pybullet | robotics | playground) ;;
  verifiers | web)
    dists="$dists ./plugins/environments"
    extra="headrace-environments[$sim]"
    own=plugins/environments/pyproject.toml
    ;;
  openenv | nemo-gym) dists="" ;;
  *)
    echo "there is no simulator environment '$sim': metaworld, maniskill, libero, dm_control, pybullet, robotics, playground, verifiers, web, openenv or nemo-gym" >&2
    if [ "$sim" = isaaclab ]; then
      echo "Isaac Lab is installed by its own instructions; then pip install headrace-simulator into its Python" >&2
    fi
    exit 2
    ;;
esac
if [ ! -e "$environment/.complete" ] || [ "$pins" -nt "$environment/.complete" ] \
  || [ services/simulator/pyproject.toml -nt "$environment/.complete" ] || [ "$own" -nt "$environment/.complete" ]; then
  if [ "$sim" = nemo-gym ]; then python=${PYTHON313:-python3.13}; fi
  rm -rf "$environment"
  "$python" -m venv "$environment"
  pip="$environment/bin/python -m pip install -q --no-compile -c $pins"
  if [ -z "$dists" ]; then
    # NeMo Gym asks for a patch of 3.13 that it does not need.
    $pip --ignore-requires-python "$sim"
  else
    $pip hatchling editables
    # shellcheck disable=SC2086 # several options
    case $sim in maniskill | libero) $pip --no-deps ${TORCH_FROM:-} torch ;; esac
    # shellcheck disable=SC2046,SC2086 # several words
    $pip --no-deps --no-build-isolation $(printf -- '-e %s ' $dists)
    $pip "$extra" pytest pytest-asyncio pytest-timeout
    "$environment/bin/python" -m pip check
  fi
  touch "$environment/.complete"
fi
case $sim in
  verifiers | openenv | nemo-gym | pybullet) exit ;;
  maniskill) sh deploy/vulkan.sh; exit ;;
  web)
    for program in "${CHROMIUM:-chromium}" chromium-browser google-chrome; do
      if command -v "$program" >/dev/null 2>&1; then exit 0; fi
    done
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
      sh ci/apt.sh chromium fonts-dejavu-core
      exit
    fi
    echo "there is no Chromium: install it (Debian: apt-get install chromium), or set CHROMIUM=/path/to/chromium" >&2
    exit 1
    ;;
esac
if ldconfig -p | grep -q libOSMesa; then exit 0; fi
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
  sh ci/apt.sh libosmesa6 libegl1 libgl1 libglib2.0-0
else
  echo "there is no OSMesa: state observations run, pictures do not (Debian: apt-get install libosmesa6 libegl1 libgl1)" >&2
fi
