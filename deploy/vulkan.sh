#!/usr/bin/env sh
# Gives a Debian 12 machine without a GPU a Vulkan device (Mesa's lavapipe), which ManiSkill needs for state observations
# too: `sh deploy/vulkan.sh`, as root. Debian 12's own Mesa 22 lacks descriptorBindingPartiallyBound; Mesa 25 comes from
# bookworm-backports. A machine with a GPU and its vendor's Vulkan driver needs none of this.
set -eu
has_mesa_25() {
  version=$(dpkg-query -W -f '${Version}' mesa-vulkan-drivers 2>/dev/null) && dpkg --compare-versions "$version" ge 25
}
if has_mesa_25; then exit 0; fi
if [ "$(id -u)" != 0 ]; then
  echo "installing Vulkan needs root: sudo sh deploy/vulkan.sh" >&2
  exit 1
fi
. /etc/os-release
if [ "${VERSION_CODENAME:-}" = bookworm ] && ! apt-cache policy | grep -q bookworm-backports; then
  # The same mirror and key as the machine's own sources name.
  mirror=$(sed -n 's/^URIs: *\([^ ]*\/debian\)\/\{0,1\} *$/\1/p' /etc/apt/sources.list.d/debian.sources 2>/dev/null | head -n 1)
  mirror=${mirror:-$(sed -n 's/^deb \(\[[^]]*\] \)\{0,1\}\([^ ]*\) bookworm main.*/\2/p' /etc/apt/sources.list 2>/dev/null | head -n 1)}
  if [ -z "$mirror" ]; then echo "found no Debian mirror in apt's sources; add bookworm-backports by hand" >&2; exit 1; fi
  cat >/etc/apt/sources.list.d/headrace-backports.sources <<SOURCES
Types: deb
URIs: $mirror
Suites: bookworm-backports
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
SOURCES
fi
apt-get update -qq
export DEBIAN_FRONTEND=noninteractive
suite=$([ "${VERSION_CODENAME:-}" = bookworm ] && echo "-t bookworm-backports" || true)
apt-get install -y -qq --no-install-recommends libvulkan1 libegl1 libgl1 >/dev/null
# shellcheck disable=SC2086 # several options
apt-get install -y -qq --no-install-recommends $suite mesa-vulkan-drivers >/dev/null
