"""One or more schedules of every class, for tests that must hold for each of them."""

import math

from normcontrol import constant, cosine, eta_times, linear, lr_times, piecewise, trace

SCHEDULES = [
    constant(0.3),
    linear(1.0, 2.0, steps=100),
    linear(0.1 + 0.2, 1 / 3, steps=math.pi),
    cosine(1.0, 0.5, steps=1e6),
    piecewise((0, 1.0), (10, 2.5), (30, 0.5)),
    trace([1.0, 1.2, 1.1], steps=[0, 5, 20]),
    trace([1.0, 2.0]),
]
FOLLOW_LR = [lr_times(0.1), eta_times(1e-2)]
