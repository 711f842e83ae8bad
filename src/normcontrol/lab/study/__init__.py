"""The engine of experiments: cells and grids, records, the runner, statistics, claims and
verdicts."""
