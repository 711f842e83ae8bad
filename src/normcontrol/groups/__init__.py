"""Parameter groups: settings and their checks, which weights are controlled, sets that share a
norm, the state that is saved.

Nothing here makes a step. How weights are measured and multiplied is in ``steppers``.
"""
