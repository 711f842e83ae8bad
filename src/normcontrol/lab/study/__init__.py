"""The engine that runs experiments: cells, records, the runner, statistics, claims and verdicts. It
does not know any particular study; those are in ``normcontrol.lab.studies``."""
