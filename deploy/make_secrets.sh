# Makes the secrets that are missing in a folder: make_secrets.sh FOLDER. Each is a file that its owner alone can read.
set -eu
umask 077
cd "$1"

make() {
    [ -s "$1" ] && return
    head -c 32 /dev/urandom | base64 | tr -d '=\n' | tr '+/' '-_' >".$1"
    mv ".$1" "$1"
}

make fleet-token    # between the services
make http-token     # of the HTTP API
make redis-password
printf 'requirepass %s\n' "$(cat redis-password)" >redis.conf
