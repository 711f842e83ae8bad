"""Rewrite records in which ratios refer to the norm before init_gain: they refer to the initial
weights now. The final gain, which follows from it, is added. Nothing else changes.

    python tools/ratios_of_the_start.py results/transfer-small
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from normcontrol.lab.study import records

folder = Path(sys.argv[1])
for path in sorted((folder / records.CELLS).glob("*.jsonl")):
    cell, record = json.loads(path.read_text().splitlines()[0])["cell"], records.read(path)
    gain, (steps, ratios) = record.config.get("init_gain"), record.curves["ratio"]
    if gain is None or "gain" in record.final or not ratios:
        continue
    assert steps[0] == 0
    ratios = [ratio / ratios[0] for ratio in ratios]
    record.curves["ratio"] = (steps, ratios)
    record.final.update(ratio=ratios[-1], gain=gain * ratios[-1])
    records.write(folder, record, cell)
