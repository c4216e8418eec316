"""For every test: torch keeps to one thread, since tests are small and several processes share the machine."""

import torch

torch.set_num_threads(1)
