#!/bin/sh
# Runs the command, and when the container stops gives its runs the time to finish their step.
#
# Supervisors and trainers are sessions of their own and outlive the worker on purpose; a container, though, ends with its first process.
# So after the command has ended, SIGTERM goes to whatever is left, and this waits: as long as docker's stop_grace_period allows.
set -u

data=${LOHAN_DATA_DIR:-/data}
if ! [ -d "$data" ] || ! [ -w "$data" ]; then
  echo "lohan: the data folder $data cannot be written by user $(id -u)." >&2
  echo "lohan: on the host, give the mounted folder to that user: chown $(id -u):$(id -g) FOLDER" >&2
  exit 78
fi

"$@" &
child=$!
trap 'kill -TERM "$child" 2>/dev/null' TERM INT
# A wait that a signal interrupts returns early: the child's own status is that of the wait after which it is gone.
while :; do
  wait "$child"
  status=$?
  kill -0 "$child" 2>/dev/null || break
done

others() {
  for stat in /proc/[0-9]*/stat; do
    pid=${stat#/proc/}
    pid=${pid%/stat}
    [ "$pid" = 1 ] || [ "$pid" = $$ ] && continue
    read -r line 2>/dev/null <"$stat" || continue
    case ${line##*) } in [ZX]*) ;; *) return 0 ;; esac
  done
  return 1
}
# Every process of the container but the first and this one.
kill -TERM -1 2>/dev/null
while others; do sleep 0.2; done
exit "$status"
