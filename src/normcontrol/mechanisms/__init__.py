"""Mechanisms that only some published methods need: another size than the norm, a later start, a
look at the update."""
