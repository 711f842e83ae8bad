#!/usr/bin/env bash
# Run a batch of a study's cells on a machine that is available for minutes, and pack the records.
#
#   STUDY=transfer SCALE=small DATA=data TOTAL=570 OUT=out bash tools/study_batch.sh [TEXT...]
#
# TEXT...  only cells whose part or name contains one of these texts; all cells if none is given
# DATA     folder with train.bin.xz and val.bin.xz (tokens, uint16); without it, the study's own data
# ALSO     another such folder with val.bin.xz, to validate on after the last step
# FOLDER   the study's folder; records of earlier batches in it are continued (default results/STUDY-SCALE)
# TOTAL    seconds that the script may take; no cell is started that would not end in time
# OUT      where the records, as a folder STUDY-SCALE of two files, and the log are written; `normcontrol study STUDY
#          --scale SCALE --merge OUT/STUDY-SCALE --pack` takes them over at home
# LIBS     a folder with Python packages that the machine lacks (tyro), for PYTHONPATH
set -uo pipefail
cd "$(dirname "$0")/.."
SECONDS=0
STUDY=${STUDY:?name a study}
SCALE=${SCALE:-tiny} TOTAL=${TOTAL:-570} OUT=${OUT:-out} PYTHON=${PYTHON:-python3}
FOLDER=${FOLDER:-results/$STUDY-$SCALE}
export PYTHONPATH="src:${LIBS:-}" PYTHONUNBUFFERED=1
mkdir -p "$OUT" "$FOLDER"

home="$OUT/$STUDY-$SCALE"
pack() {  # a copy, so that a batch that is stopped can be continued
    mkdir -p "$home"
    cp -r "$FOLDER"/study.json "$FOLDER"/records.jsonl.xz "$FOLDER"/cells "$home" 2>/dev/null
    "$PYTHON" -m normcontrol.lab study "$STUDY" --scale "$SCALE" --out "$home" --pack && rm -f "$home/.lock"
}
trap pack EXIT

arguments=()
for kind in DATA ALSO; do
    folder=${!kind:-}
    [ -z "$folder" ] && continue
    for packed in "$folder"/*.bin.xz; do
        [ -e "${packed%.xz}" ] || xz --decompress --keep --threads=0 "$packed" || exit 1
    done
    [ "$kind" = DATA ] && arguments+=(--data "$folder") || arguments+=(--also-validate "$folder")
done
[ $# -gt 0 ] && arguments+=(--only "$@")

left=$((TOTAL - SECONDS))
timeout -s TERM -k 10 $((left - 5)) "$PYTHON" -m normcontrol.lab study "$STUDY" --scale "$SCALE" --out "$FOLDER" \
    --limit-minutes "$(((left - 20) / 60)).$((((left - 20) % 60) * 10 / 60))" "${arguments[@]}" 2>&1 | tee "$OUT/log.txt"
status=$?
"$PYTHON" -m normcontrol.lab verdict "$FOLDER" 2>&1 | tail -40 | tee -a "$OUT/log.txt"
exit $status
