"""torch's variable-length kernel, and the tiles, against the definition in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from stages.batch import Segment
from stages.models import varlen
from stages.models.attention import Segments
from stages.models.products import Options
from tests.gpu.device import DEVICE, cuda_only, on_gpu
from tests.models.test_attention import ROWS, dense, trees

pytestmark = on_gpu
LONG = trees((600, 70, 1, 300), (33,), (1000,), (5, 128, 129))
CASES = {**ROWS, "long trees": LONG}


def inputs(row: tuple[Segment, ...], dtype: torch.dtype, width: int = 64) -> list[Tensor]:
    """Queries of four heads, keys and values of two, rounded to a dtype."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(1, heads, row[-1].stop, width, generator=generator).to(dtype)
        for heads in (4, 2, 2)
    ]


def outcome(attend, tensors: list[Tensor], dtype: torch.dtype, device: torch.device):
    """The output and the three gradients, in float64 on the CPU."""
    leaves = [t.to(device, dtype).requires_grad_() for t in tensors]
    out = attend(*leaves)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    return [
        t.detach().double().cpu() for t in (out, *torch.autograd.grad((out * weight).sum(), leaves))
    ]


def errors(got: list[Tensor], truth: list[Tensor]) -> list[float]:
    """The largest difference of each tensor, relative to the largest number in it."""
    return [
        float((g - t).abs().max() / t.abs().max().clamp(min=1.0))
        for g, t in zip(got, truth, strict=True)
    ]


def plan_of(row: tuple[Segment, ...], options: Options):
    plan = Segments(row, DEVICE)
    return lambda *tensors: plan.attend(nn.Identity(), *tensors, options)


@cuda_only
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("window", [None, 1, 3, 200])
@pytest.mark.parametrize("row", CASES.values(), ids=CASES)
def test_the_kernel_is_as_exact_as_the_tiles_in_half_precision(row, window, dtype, monkeypatch):
    options, tensors = Options(0.125, 0.0, None, window), inputs(row, dtype)
    truth = outcome(lambda *t: dense(row, *t, options), tensors, torch.float64, torch.device("cpu"))
    query, value = (tensors[n].to(DEVICE) for n in (0, 2))
    assert varlen.suits(query, value, dropout=0.0, softcap=None), "the kernel is not chosen"
    kernel = errors(outcome(plan_of(row, options), tensors, dtype, DEVICE), truth)
    monkeypatch.setattr(varlen, "suits", lambda *_, **__: False)
    tiles = errors(outcome(plan_of(row, options), tensors, dtype, DEVICE), truth)
    rounding = torch.finfo(dtype).eps
    for mine, theirs in zip(kernel, tiles, strict=True):
        assert mine <= 2 * theirs + 2 * rounding


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("row", CASES.values(), ids=CASES)
def test_the_tiles_are_exact_in_fp32(row, window):
    options, tensors = Options(0.125, 0.0, None, window), inputs(row, torch.float32)
    truth = outcome(lambda *t: dense(row, *t, options), tensors, torch.float64, torch.device("cpu"))
    got = outcome(plan_of(row, options), tensors, torch.float32, DEVICE)
    assert max(errors(got, truth)) <= 2e-5
