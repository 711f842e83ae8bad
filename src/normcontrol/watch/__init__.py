"""Norms over time: traces, the report, averages of weights, and trackers.

Nothing in this folder may change how a step is carried out.
"""
