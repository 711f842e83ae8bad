"""Arithmetic on tensors: their norms, multiplication by a factor, and rounding to low precision.

Nothing here knows optimizers, parameter groups, targets or processes.
"""
