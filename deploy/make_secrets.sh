# Makes the secrets that are missing in a folder: make_secrets.sh FOLDER, which has a folder for each, a volume of its own.
# Each is a file that its owner alone can read.
set -eu
umask 077
cd "$1"

make() {
    [ -s "$1" ] && return
    head -c 32 /dev/urandom | base64 | tr -d '=\n' | tr '+/' '-_' >"$1.new"
    mv "$1.new" "$1"
}

make fleet/fleet-token    # between the services
make http/http-token      # of the HTTP API
make redis/redis-password
printf 'requirepass %s\n' "$(cat redis/redis-password)" >redis/redis.conf
