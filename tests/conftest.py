"""One thread a process: the tests are small, and parallel workers with a thread pool each only get
in each other's way."""

import torch

torch.set_num_threads(1)
