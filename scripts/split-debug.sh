#!/usr/bin/env bash
# Moves a program's debug information and the names of its functions into a file beside it: PROGRAM.debug. With that file
# there, or in /usr/lib/debug, backtraces have names, files and lines. A program that has no debug information any more is
# left alone.
#
#   scripts/split-debug.sh target/release/shoal
set -euo pipefail

readonly PROGRAM=$1

readelf --section-headers --wide "$PROGRAM" | grep -qF ' .debug_info' || exit 0
# The program may be a hard link of Cargo's, or be running: it is replaced, not changed.
objcopy --only-keep-debug --compress-debug-sections=zlib "$PROGRAM" "$PROGRAM.debug"
chmod -x "$PROGRAM.debug"
objcopy --strip-all --add-gnu-debuglink="$PROGRAM.debug" "$PROGRAM" "$PROGRAM.split"
mv "$PROGRAM.split" "$PROGRAM"
