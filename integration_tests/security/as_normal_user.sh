#!/bin/sh
# as_normal_user.sh USER PYTHON FOLDER COMMAND...: runs COMMAND as that user, with the capabilities CAPABILITIES alone,
# in mounts of its own in which the Python in the folder PYTHON can be reached, also below a closed home. Needs root.
set -e
export HEADRACE_USER="$1" HEADRACE_PYTHON="$2" HOME="$3"
shift 3
exec unshare --mount sh -ec '
    kept=$(mktemp -d)
    mount --bind "$HEADRACE_PYTHON" "$kept"
    folder=$HEADRACE_PYTHON closed=
    while folder=$(dirname "$folder") && [ "$folder" != / ]; do
        case $(stat -c %A "$folder") in *x|*t) ;; *) closed=$folder ;; esac
    done
    if [ -n "$closed" ]; then
        mount -t tmpfs -o mode=755 tmpfs "$closed"
        mkdir -p "$HEADRACE_PYTHON"
    fi
    mount --bind "$kept" "$HEADRACE_PYTHON"
    umount "$kept"
    cd "$HOME"
    exec setpriv --reuid "$HEADRACE_USER" --regid "$HEADRACE_USER" --clear-groups \
        ${CAPABILITIES:+--inh-caps "$CAPABILITIES" --ambient-caps "$CAPABILITIES"} "$@"' as_normal_user "$@"
