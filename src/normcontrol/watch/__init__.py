"""Norms over time: traces, the report, averages of weights, and loggers. Nothing here changes how a
step is made."""
