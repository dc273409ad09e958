#!/bin/sh
# Builds and runs a program with what pkg-config says about the installed pmoe.
# pkgconfig.sh shared|static CC PKG_CONFIG LIBDIR PROGRAM.c FOLDER
set -eu
kind=$1 cc=$2 pkg_config=$3 libdir=$4 source=$5 folder=$6

export PKG_CONFIG_PATH="$libdir/pkgconfig"
mkdir -p "$folder"
cd "$folder"
if [ "$kind" = static ]; then
  # Out of reach of libpmoe.so, which the linker would prefer.
  cp "$libdir/libpmoe.a" .
  libs="-L. $("$pkg_config" --static --libs pmoe)"
else
  libs="$("$pkg_config" --libs pmoe) -Wl,-rpath,$("$pkg_config" --variable=libdir pmoe)"
fi
# shellcheck disable=SC2046,SC2086 # the flags are words
"$cc" -std=c11 -Wall -Wextra -Wpedantic -Werror $("$pkg_config" --cflags pmoe) "$source" $libs -o program

needed=$(readelf -d program | grep -c 'NEEDED.*libpmoe' || true)
case $kind:$needed in
shared:1 | static:0) ./program ;;
*) echo "program was linked with the wrong kind of libpmoe: $kind, but $needed libpmoe needed" >&2 && exit 1 ;;
esac
