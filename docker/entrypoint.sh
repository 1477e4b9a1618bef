#!/bin/sh
# Says what is wrong with the data folder before anything else fails on it, then becomes the command.
set -eu

data=${LOHAN_DATA_DIR:-/data}
if ! [ -d "$data" ] || ! [ -w "$data" ]; then
  echo "lohan: the data folder $data cannot be written by user $(id -u)." >&2
  echo "lohan: on the host, give the mounted folder to that user: chown $(id -u):$(id -g) FOLDER" >&2
  exit 78
fi
exec "$@"
