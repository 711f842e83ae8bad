"""One thread for each process: the tests are small, and the thread pools of parallel workers would
slow each other down."""

import torch

torch.set_num_threads(1)
