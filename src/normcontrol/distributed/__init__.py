"""Weights on several processes: where the pieces of a tensor lie, sums over ranks, and layouts that
are recognised.

Only this folder knows meshes, placements and process groups.
"""
