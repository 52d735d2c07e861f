#!/bin/sh
# audit.sh all|hashes PYTHON: what tools say of the code (bandit), the workflows (zizmor) and the pins (pip-audit, which
# asks PyPI), and a list of what an installation needs (CycloneDX); or constraints/base.hashes.txt anew. The tools are in
# .envs/audit, by their hashes.
set -eu
cd "$(dirname "$0")/.."
tools=.envs/audit
if ! cmp -s constraints/audit.txt "$tools/.complete"; then
    rm -rf "$tools"
    "$2" -m venv "$tools"
    "$tools/bin/pip" install -q --require-hashes -r constraints/audit.txt
    cp constraints/audit.txt "$tools/.complete"
fi
if [ "$1" = hashes ]; then
    pins=$(mktemp)
    sed -e '/^#/d' -e '/^torch==/d' constraints/base.txt >"$pins"
    "$tools/bin/uv" pip compile -q --no-deps --generate-hashes --no-header --no-annotate --python-version 3.11 "$pins" -o "$pins.hashes"
    {
        echo "# Hashes of every pin of base.txt but torch, whose builds are many (make freeze writes this file)."
        cat "$pins.hashes"
    } >constraints/base.hashes.txt
    rm "$pins" "$pins.hashes"
    exit
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
