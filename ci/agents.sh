#!/usr/bin/env bash
# Makes .envs/mini, in which mini-swe-agent is: `bash ci/agents.sh`. What it needs does not go with the services' packages.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
environment=.envs/mini
if [ -f "$environment/.complete" ] && [ ! constraints/mini.txt -nt "$environment/.complete" ]; then exit 0; fi
rm -rf "$environment"
"${PYTHON:-python3}" -m venv "$environment"
"$environment/bin/pip" install -q -c constraints/mini.txt mini-swe-agent
touch "$environment/.complete"
