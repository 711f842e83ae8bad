"""Settings for all tests: one thread for each process, since the tests are small and the thread pools
of parallel workers would slow each other down, and little optimization by JAX's compiler, which
takes longer than it saves."""

import os

import torch

torch.set_num_threads(1)
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
