"""Shared by all tests: one thread for torch, so that forked children compute like their parent."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # looking for a device must not forbid forking

import torch
import torch._dynamo  # optimizers load it when first made: once here, not in every forked child
from hypothesis import settings

settings.register_profile("everstep", deadline=None)  # machines are shared: no test is right or wrong by the clock
settings.load_profile("everstep")

torch.set_num_threads(1)
torch.set_flush_denormal(True)
