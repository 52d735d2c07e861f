#!/bin/sh
# audit.sh PYTHON: what tools say of the code (bandit), the workflows (zizmor) and the pins (pip-audit, which asks PyPI),
# and a list of what an installation needs (CycloneDX). The tools are in .envs/audit, by their hashes.
set -eu
cd "$(dirname "$0")/.."
tools=.envs/audit
if ! cmp -s constraints/audit.txt "$tools/.complete"; then
    rm -rf "$tools"
    "$1" -m venv "$tools"
    "$tools/bin/pip" install -q --require-hashes -r constraints/audit.txt
    cp constraints/audit.txt "$tools/.complete"
fi
"$tools/bin/bandit" -q -c pyproject.toml -r ci libs services plugins cli tools --severity-level medium
"$tools/bin/zizmor" --offline .github
mkdir -p .cache/ci
"$tools/bin/cyclonedx-py" requirements --output-reproducible --of JSON -o .cache/ci/sbom.cdx.json constraints/base.hashes.txt
if "$tools/bin/pip-audit" --disable-pip --require-hashes -r constraints/base.hashes.txt >.cache/ci/pip-audit.txt 2>&1; then
    echo "pip-audit: nothing known"
elif grep -q "ConnectionError\|ServiceError\|Failed to establish\|Name or service not known" .cache/ci/pip-audit.txt && [ "${CI:-}" != true ]; then
    echo "pip-audit: not covered, as its service cannot be asked from here"
else
    cat .cache/ci/pip-audit.txt
    exit 1
fi
