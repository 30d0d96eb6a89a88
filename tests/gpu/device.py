"""Where the tests of this folder run: a CUDA device, else they are skipped with a reason.

With ``RLHF_GPU_TESTS_ON=cuda`` they fail where there is none; with ``cpu`` those that can run there
do, to see that the tests themselves work.
"""

from __future__ import annotations

import os

import pytest
import torch

ASKED = os.environ.get("RLHF_GPU_TESTS_ON")
DEVICE = torch.device(ASKED or "cuda")
MISSING = ASKED is None and not torch.cuda.is_available()

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(MISSING, reason="there is no CUDA device"),
]
"""The marks of every file here."""

cuda_only = pytest.mark.skipif(DEVICE.type != "cuda", reason="the kernel runs on CUDA only")
