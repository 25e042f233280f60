#!/bin/sh
# Makes the certificates of the TLS tests, good for a century and for nothing else: an authority,
# the server "kvplane.test" and the client "tenant-a".
set -eu
cd "$(dirname "$0")"

key() { openssl ecparam -name prime256v1 -genkey -noout -out "$1.key"; }

key ca
openssl req -x509 -new -key ca.key -days 36500 -subj "/CN=kvplane test authority" -out ca.pem
for name in server client; do
  key "$name"
  case $name in
    server) subject="/CN=kvplane.test" extension="subjectAltName=DNS:kvplane.test" ;;
    client) subject="/CN=tenant-a" extension="extendedKeyUsage=clientAuth" ;;
  esac
  echo "$extension" > extension.txt
  openssl req -new -key "$name.key" -subj "$subject" |
    openssl x509 -req -CA ca.pem -CAkey ca.key -CAcreateserial -days 36500 \
      -extfile extension.txt -out "$name.pem"
done
rm -f ca.key ca.srl extension.txt
