"""Offsets by hand, where the golden cases have alpha 1."""

from __future__ import annotations

import math

import pytest
import torch

from stages.functional.odpo import offsets


@pytest.mark.parametrize(("scale", "expected"), [("log", 2.0), ("identity", 2 * math.e)])
def test_an_offset_is_alpha_times_the_gap_or_its_logarithm(scale, expected):
    gap = torch.tensor([math.e], dtype=torch.float64)
    assert float(offsets(gap, alpha=2.0, scale=scale)) == pytest.approx(expected, rel=1e-12)
