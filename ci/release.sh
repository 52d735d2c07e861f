#!/bin/sh
# release.sh PYTHON FOLDER: wheels of every dist into FOLDER, with SBOM and SHA256SUMS. They are built twice, from two
# copies of the checkout in folders of different names, and must be equal byte by byte.
set -eu
python=$1
mkdir -p "$2"
out=$(cd "$2" && pwd)
root=$(cd "$(dirname "$0")/.." && pwd)
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git -C "$root" log -1 --format=%ct)}
export SOURCE_DATE_EPOCH PIP_DISABLE_PIP_VERSION_CHECK=1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m venv "$work/build"
# The backend, and all that it needs, are among the hashes.
sed -n '/^#/!p' "$root/constraints/base.hashes.txt" | awk '
    /^[^ ]/ {split($0, name, "=="); wanted = name[1] ~ /^(hatchling|packaging|pathspec|pluggy|trove-classifiers|tomli)$/}
    wanted' >"$work/backend.txt"
"$work/build/bin/pip" install -q --require-hashes --no-deps -r "$work/backend.txt"
for copy in first second-of-another-name; do
    mkdir -p "$work/$copy/tree" "$work/$copy/dist"
    git -C "$root" archive HEAD | tar -x -C "$work/$copy/tree"
    (cd "$work/$copy/tree" && umask "$([ $copy = first ] && echo 022 || echo 077)" && "$work/build/bin/pip" wheel -q --no-deps \
        --no-build-isolation -w "$work/$copy/dist" ./proto ./libs/* ./plugins/* ./services/* ./cli)
done
diff -r "$work/first/dist" "$work/second-of-another-name/dist"
cp "$work/first/dist"/*.whl "$out"
"$python" -m venv "$work/tools"
"$work/tools/bin/pip" install -q --require-hashes -r "$root/constraints/audit.txt"
"$work/tools/bin/cyclonedx-py" requirements --output-reproducible --of JSON -o "$out/sbom.cdx.json" \
    "$root/constraints/base.hashes.txt"
(cd "$out" && sha256sum ./*.whl sbom.cdx.json >SHA256SUMS)
