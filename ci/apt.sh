#!/usr/bin/env sh
# Installs Debian packages: `sh ci/apt.sh PACKAGE…`. Waits for whatever else of this checkout runs apt-get.
set -eu
mkdir -p .cache
exec 9>.cache/apt.lock
flock 9
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
