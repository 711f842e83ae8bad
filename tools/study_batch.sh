#!/usr/bin/env bash
# Run studies on a machine that is available for minutes, in calls of a few minutes each. They run in the background from
# one call to the next, beside each other: while one compiles or evaluates, another trains.
#
#   bash tools/study_batch.sh start transfer small --only lr   # returns at once; again for further studies
#   bash tools/study_batch.sh collect OUT 570                  # waits for so many seconds, or until all are done
#
# Make every call with both lines. A study that still runs is not started again; on a fresh machine, which knows nothing
# of the calls before, it is.
#
# What stands behind the scale is passed to `normcontrol study`. OUT gets a folder STUDY-SCALE of two files for each
# study, and logs; `normcontrol study STUDY --scale SCALE --merge OUT/STUDY-SCALE --pack` takes the records over at home.
#
# DATA   folder with train.bin.xz and val.bin.xz (tokens, uint16); without it, the study's own data
# ALSO   another such folder with val.bin.xz, to validate on after the last step
# LIBS   a folder with Python packages that the machine lacks (tyro), for PYTHONPATH
# BATCH  where the studies live (default /tmp/batch): with a copy of this checkout, which may be replaced between calls
set -euo pipefail
cd "$(dirname "$0")/.."
BATCH=${BATCH:-/tmp/batch} PYTHON=${PYTHON:-python3}
SOURCE=$BATCH/source
verb=${1:?start or collect}
shift

start() {
    local study=$1 scale=$2 arguments=() kind folder packed
    shift 2
    local name=$study-$scale
    if is_running "$BATCH/pids/$name"; then
        echo "$name goes on"
        return
    fi
    if [ ! -d "$SOURCE" ]; then
        mkdir -p "$SOURCE" "$BATCH/studies" "$BATCH/logs" "$BATCH/pids"
        tar --create --exclude=./.venv . | tar --extract --directory "$SOURCE"
    fi
    cd "$SOURCE"
    for kind in DATA ALSO; do
        folder=${!kind:-}
        [ -z "$folder" ] && continue
        for packed in "$folder"/*.bin.xz; do
            [ -e "${packed%.xz}" ] || xz --decompress --keep --threads=0 "$packed"
        done
        [ "$kind" = DATA ] && arguments+=(--data "$folder") || arguments+=(--also-validate "$folder")
    done
    [ -d "$BATCH/studies/$name" ] || [ ! -d "results/$name" ] || cp -r "results/$name" "$BATCH/studies/"
    PYTHONPATH="src:${LIBS:-}" PYTHONUNBUFFERED=1 setsid nohup "$PYTHON" -m normcontrol.lab study "$study" --scale "$scale" \
        --out "$BATCH/studies/$name" "${arguments[@]}" "$@" >"$BATCH/logs/$name.txt" 2>&1 &
    echo $! >"$BATCH/pids/$name"
}

is_running() { [ -e "$1" ] && kill -0 "$(cat "$1")" 2>/dev/null; }

running() {
    local pid
    for pid in "$BATCH"/pids/*; do
        is_running "$pid" && return 0
    done
    return 1
}

collect() {
    local out=$1 seconds=$2 folder name
    if [ ! -d "$BATCH/pids" ]; then
        echo "No study was started here: $BATCH is not there. This may be another machine than before." >&2
        exit 1
    fi
    mkdir -p "$out"
    out=$(realpath "$out")
    while [ $SECONDS -lt "$seconds" ] && running; do sleep 2; done
    cd "$SOURCE"
    for folder in "$BATCH"/studies/*/study.json; do
        folder=$(dirname "$folder")
        name=$(basename "$folder")
        rm -rf "${out:?}/$name" && mkdir "$out/$name"
        cp -r "$folder"/study.json "$folder"/records.jsonl.xz "$folder"/cells "$out/$name" 2>/dev/null || true
        PYTHONPATH="src:${LIBS:-}" "$PYTHON" -m normcontrol.lab study "${name%-*}" --scale "${name##*-}" --out "$out/$name" \
            --pack || continue # nothing is finished yet
        rm -f "$out/$name/.lock"
        tr '\r' '\n' <"$BATCH/logs/$name.txt" | tail -3 | cut -c1-160
    done
    cp -r "$BATCH/logs" "$out"
}

"$verb" "$@"
