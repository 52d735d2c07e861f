#!/bin/sh
# as_service.sh COMMAND…: runs it as user 10001. Where the container was started as root, that user has the capabilities
# of HEADRACE_CAPABILITIES, by default those by which it gives users' code another user id, and the container must have
# these (cap_add); else it has none.
[ "$(id -u)" = 0 ] || exec "$@"
kept=-all
for capability in ${HEADRACE_CAPABILITIES:-chown dac_override fowner kill setgid setuid sys_ptrace}; do
  kept=$kept,+$capability
done
exec setpriv --reuid 10001 --regid 10001 --clear-groups --inh-caps "$kept" --ambient-caps "$kept" -- "$@"
