#!/usr/bin/env bash
# Starts a container engine on a bare Debian machine, as root, and makes the base images of our Dockerfiles without a
# registry of images: `bash ci/container_engine.sh up|base|down`. integration_tests/compose calls it where no engine
# answers; DOCKER_ENGINE_SCRIPT names another script with the same three commands.
#
#   up    installs dockerd, compose and buildx from Debian's packages, and starts dockerd
#   base  makes python:3.11-slim and redis:7-alpine from Debian 12's packages (a stand-in: glibc, no Alpine)
#   down  stops dockerd and removes the network rules that it made; containers must have ended
#
# DOCKER_WORK has packages, images and the engine's data: .cache/docker of the checkout. Images made here hold this
# machine's certificates: never publish them. There is no `docker pull` here: a Dockerfile's FROM must name a base above.
set -euo pipefail

work=${DOCKER_WORK:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.cache/docker}
export DOCKER_CONFIG=${DOCKER_CONFIG:-$work/config}
mkdir -p "$work" "$DOCKER_CONFIG/cli-plugins"
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
# The mirror that this machine is set up for, whatever form its list of sources has.
archive=$(apt-get indextargets --format '$(SITE)' | awk '!/security/ && !found {print; found = 1}')

answers() { docker info >/dev/null 2>&1; }

install_engine() {
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends docker.io iptables mmdebstrap >/dev/null
  if [ -x "$work/packages/usr/sbin/dockerd" ]; then return; fi
  # Debian 12's dockerd knows no compose v2 and no buildx. Those of Debian 13 are unpacked, not installed.
  mkdir -p "$work/apt/lists/partial" "$work/apt/cache/archives/partial"
  echo "deb [signed-by=$keyring] $archive trixie main" >"$work/apt/trixie.list"
  local options=(-qq -o "Dir::Etc::SourceList=$work/apt/trixie.list" -o Dir::Etc::SourceParts=/dev/null
    -o "Dir::State::Lists=$work/apt/lists" -o "Dir::Cache=$work/apt/cache" -o APT::Sandbox::User=root)
  apt-get "${options[@]}" update
  (cd "$work/apt" && apt-get "${options[@]}" download docker.io/trixie docker-compose/trixie docker-buildx/trixie)
  for package in "$work"/apt/*.deb; do dpkg-deb -x "$package" "$work/packages.new"; done
  cp "$work"/packages.new/usr/libexec/docker/cli-plugins/docker-{compose,buildx} "$DOCKER_CONFIG/cli-plugins/"
  mv "$work/packages.new" "$work/packages"
}

start_engine() {
  sysctl -qw net.ipv4.ip_forward=1 # where it is set already, dockerd leaves the FORWARD policy at ACCEPT
  answers && return
  PATH="$work/packages/usr/sbin:$PATH" setsid dockerd --data-root "$work/data" >"$work/dockerd.log" 2>&1 </dev/null &
  echo $! >"$work/dockerd.pid"
  for _ in $(seq 240); do
    answers && return
    sleep 0.25
  done
  echo "dockerd does not answer after 60 s; the end of $work/dockerd.log:" >&2
  tail -n 20 "$work/dockerd.log" >&2
  exit 1
}

make_python() {
  if [ ! -s "$work/python.tar" ]; then
    nice mmdebstrap --mode=root --variant=minbase \
      --include=ca-certificates,python3,python3-venv,python3-pip,curl,redis-server \
      --aptopt='APT::Install-Recommends "false"' --aptopt='APT::Sandbox::User "root"' --dpkgopt=force-unsafe-io \
      --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
      --customize-hook='rm -f "$1"/usr/lib/python3*/EXTERNALLY-MANAGED' \
      --customize-hook='ln -sf python3 "$1"/usr/bin/python' \
      --customize-hook='mkdir -p "$1"/data; chroot "$1" chown redis:redis /data' \
      --customize-hook='cp /usr/local/share/ca-certificates/*.crt "$1"/usr/local/share/ca-certificates/ 2>/dev/null || true' \
      --customize-hook='chroot "$1" update-ca-certificates' \
      --customize-hook='printf "[global]\ncert = /etc/ssl/certs/ca-certificates.crt\n" >"$1"/etc/pip.conf' \
      bookworm "$work/python.new.tar" "$archive"
    mv "$work/python.new.tar" "$work/python.tar"
  fi
  local bundle=/etc/ssl/certs/ca-certificates.crt
  docker import --change 'CMD ["python3"]' \
    --change "ENV LANG=C.UTF-8 SSL_CERT_FILE=$bundle REQUESTS_CA_BUNDLE=$bundle" "$work/python.tar" python:3.11-slim
}

make_redis() { # with the real image's user, volume and command line
  mkdir -p "$work/redis"
  cat >"$work/redis/docker-entrypoint.sh" <<'SCRIPT'
#!/bin/sh
set -e
case "$1" in -* | *.conf) set -- redis-server "$@" ;; esac
if [ "$1" = redis-server ]; then
  case " $* " in *" --protected-mode "*) ;; *) set -- "$@" --protected-mode no ;; esac
fi
exec "$@"
SCRIPT
  chmod +x "$work/redis/docker-entrypoint.sh"
  cat >"$work/redis/Dockerfile" <<'DOCKERFILE'
FROM python:3.11-slim
COPY docker-entrypoint.sh /usr/local/bin/
VOLUME /data
WORKDIR /data
USER redis
EXPOSE 6379
ENTRYPOINT ["docker-entrypoint.sh"]
CMD ["redis-server"]
DOCKERFILE
  docker build -q -t redis:7-alpine "$work/redis"
}

stop_engine() {
  local pid
  pid=$(cat "$work/dockerd.pid")
  kill -TERM "$pid" 2>/dev/null || true
  while kill -0 "$pid" 2>/dev/null; do sleep 0.2; done
  rm -f "$work/dockerd.pid"
}

remove_rules() { # what dockerd added to the host's network, and nothing else
  local chain rule
  for chain in DOCKER-USER DOCKER-ISOLATION-STAGE-1; do
    while iptables -D FORWARD -j "$chain" 2>/dev/null; do :; done
  done
  # shellcheck disable=SC2086 # a rule is several words
  iptables -S FORWARD | grep -- docker0 | sed 's/^-A/-D/' | while read -r rule; do iptables $rule; done || true
  for chain in DOCKER-USER DOCKER-ISOLATION-STAGE-1 DOCKER-ISOLATION-STAGE-2 DOCKER; do
    iptables -F "$chain" 2>/dev/null || true
  done
  for chain in DOCKER-USER DOCKER-ISOLATION-STAGE-1 DOCKER-ISOLATION-STAGE-2 DOCKER; do
    iptables -X "$chain" 2>/dev/null || true
  done
  # shellcheck disable=SC2086
  iptables -t nat -S | grep -E '^-A (PREROUTING|OUTPUT) .*-j DOCKER$|^-A POSTROUTING -s 172\.17\.' | sed 's/^-A/-D/' |
    while read -r rule; do iptables -t nat $rule; done || true
  iptables -t nat -F DOCKER 2>/dev/null || true
  iptables -t nat -X DOCKER 2>/dev/null || true
  ip link del docker0 2>/dev/null || true
  umount /run/docker/netns/default 2>/dev/null || true
}

case "${1:-}" in
up)
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    echo "$0 up needs root and Debian's apt-get; start an engine of your own instead" >&2
    exit 1
  fi
  install_engine
  start_engine
  docker version --format 'dockerd {{.Server.Version}}'
  docker compose version
  ;;
base)
  make_python
  make_redis
  ;;
down)
  [ -f "$work/dockerd.pid" ] || exit 0 # an engine that answers is not ours
  stop_engine
  remove_rules
  ;;
*)
  echo "usage: $0 up|base|down" >&2
  exit 2
  ;;
esac
