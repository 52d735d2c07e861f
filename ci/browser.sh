#!/usr/bin/env sh
# Makes what the browser tests need: Playwright in .envs/browser, and Chromium, which apt-get brings where it may.
# `sh ci/browser.sh PYTHON`. Chromium elsewhere: CHROMIUM=/path/to/chromium.
set -eu
python=${1:-python3}
if [ ! -e .envs/browser/.complete ] || [ constraints/browser.txt -nt .envs/browser/.complete ]; then
  rm -rf .envs/browser
  "$python" -m venv .envs/browser
  .envs/browser/bin/python -m pip install -q -c constraints/browser.txt playwright
  touch .envs/browser/.complete
fi
for program in "${CHROMIUM:-chromium}" chromium-browser google-chrome; do
  if command -v "$program" >/dev/null 2>&1; then exit 0; fi
done
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
  sh ci/apt.sh chromium fonts-dejavu-core
else
  echo "there is no Chromium: install it (Debian: apt-get install chromium), or set CHROMIUM=/path/to/chromium" >&2
  exit 1
fi
