#!/bin/sh
# expect.sh STATUS PATTERN COMMAND...: the command must exit with STATUS and print something that PATTERN matches.
status=$1 pattern=$2
shift 2
output=$("$@" 2>&1)
got=$?
printf '%s\n' "$output"
[ "$got" -eq "$status" ] || { echo "expect: exit status $got, not $status"; exit 1; }
printf '%s\n' "$output" | tr '\n' ' ' | grep -Eq -- "$pattern" || { echo "expect: no match for: $pattern"; exit 1; }
