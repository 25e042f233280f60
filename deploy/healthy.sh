#!/bin/bash
# Asks port $1, a plane's --metrics-port, whether it serves; the exit code is 0 if it does. $2 is
# another path: /health for an engine. It runs every few seconds while a container lives, so it
# starts nothing but bash.
exec 3<>"/dev/tcp/127.0.0.1/$1" || exit 1
printf 'GET %s HTTP/1.0\r\n\r\n' "${2:-/ready}" >&3
IFS= read -r -t 5 status <&3
[[ $status == *" 200 "* ]]
