"""Settings for all tests: one thread for each process, since the tests are small and the thread pools
of parallel workers would slow each other down, and little optimization by JAX's compiler, which
takes longer than it saves. Small sets are folded too, so that their tests are tests of large ones."""

import os

import torch

from normcontrol.steppers import folded

torch.set_num_threads(1)
folded.FEWEST = 0
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
