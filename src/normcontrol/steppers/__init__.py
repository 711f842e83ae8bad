"""How one step is carried out, and how the weights are measured and multiplied.

Nothing here knows targets, rates or laws: a stepper receives the factor and applies it.
"""
