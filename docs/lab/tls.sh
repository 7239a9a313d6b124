#!/bin/sh
# One certificate for scheduler, workers and trainers, in the folder given: whoever has its key is let in, nobody else.
set -eu
umask 077
mkdir -p "$1"
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -noenc -days 365 -subj /CN=metaloom \
    -keyout "$1/key.pem" -out "$1/cert.pem"
