"""The variable-length plan against tiles, with a stand-in that keeps the kernel's contract.

The kernel itself needs a GPU: ``tests/gpu`` holds it against the same definition there.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from stages.batch import Segment, pack, pack_groups
from stages.models import attention, varlen
from stages.models.attention import Segments
from stages.models.forward import response_logps, scores
from stages.models.generate import generate
from stages.models.products import Options
from stages.models.varlen import Varlen
from tests.families import tiny_policy, tiny_reward
from tests.models.alone import examples
from tests.models.test_attention import ROWS, dense, tensors, trees
from tests.models.test_generate import (
    LENGTHS,
    assert_same,
    native,
    prompts,
    sampling,
    uniforms,
)
from tests.models.test_packed_rows import GROUPS

CPU = torch.device("cpu")


def contract(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_bounds: Tensor,
    key_bounds: Tensor,
    longest_query: int,
    longest_key: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """What ``varlen_attn`` documents, sequence by sequence.

    Queries ``[N, H, D]``, keys and values ``[M, G, D]``; with fewer queries than keys the last of
    both are aligned; a query sees ``window_size[0]`` keys before itself (-1: all) and
    ``window_size[1]`` after.
    """
    for bounds in (query_bounds, key_bounds):
        assert bounds.dtype == torch.int32
        assert bounds.is_contiguous()
    assert all(t.stride(-1) == 1 for t in (query, key, value))
    assert longest_query == int(query_bounds.diff().max())
    assert longest_key == int(key_bounds.diff().max())
    assert (int(query_bounds[-1]), int(key_bounds[-1])) == (len(query), len(key))
    assert enable_gqa or query.shape[1] == key.shape[1]
    assert query.shape[1] % key.shape[1] == 0
    left, right = window_size
    parts = []
    for n in range(len(query_bounds) - 1):
        q = query[query_bounds[n] : query_bounds[n + 1]].transpose(0, 1)
        k, v = (
            t[key_bounds[n] : key_bounds[n + 1]]
            .transpose(0, 1)
            .repeat_interleave(query.shape[1] // key.shape[1], dim=0)
            for t in (key, value)
        )
        at = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
        column = torch.arange(k.shape[1])
        seen = (column <= at + right) & ((column >= at - left) | (left < 0))
        scores = (q @ k.transpose(1, 2) * scale).masked_fill(~seen, float("-inf"))
        parts.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(parts)


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "kernel", lambda: contract)


def assert_equals_tiles(row: tuple[Segment, ...], window: int | None) -> None:
    """Values and gradients, to the tile path and to the definition of a tree."""
    options = Options(0.6, 0.0, None, window)
    inputs = tensors(row)
    query, key, value = (t[0] for t in inputs)
    ours = Varlen(row, CPU).attend(query, key, value, scaling=0.6, window=window)
    tiles = Segments(row, CPU).attend(nn.Identity(), *inputs, options)[0]
    torch.testing.assert_close(ours, tiles, rtol=0, atol=1e-12)
    torch.testing.assert_close(ours, dense(row, *inputs, options)[0], rtol=0, atol=1e-12)
    weight = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1), dtype=ours.dtype)
    got = torch.autograd.grad((ours * weight).sum(), inputs)
    expected = torch.autograd.grad((tiles * weight).sum(), inputs)
    for mine, other in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("window", [None, 1, 3, 6, 500])
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_the_plan_gives_the_numbers_of_the_tiles(row, window):
    assert_equals_tiles(row, window)


@pytest.mark.parametrize("seed", range(10))
def test_any_row_of_trees_gives_the_numbers_of_the_tiles(seed):
    rng = np.random.default_rng(seed)
    shapes = [tuple(rng.integers(0, 18, rng.integers(1, 5)).tolist()) for _ in range(4)]
    assert_equals_tiles(trees((3,), *shapes), None if seed % 2 else int(rng.integers(1, 20)))


def test_a_row_without_trees_is_attended_without_a_copy_of_its_keys():
    assert Varlen(trees((4,), (2,), (7,)), CPU).keys is None


def test_an_answer_reads_its_prompt_and_then_itself():
    plan = Varlen(trees((2, 1, 2), (3,)), CPU)
    assert plan.keys is not None
    assert plan.keys.tolist() == [0, 1, 0, 1, 2, 0, 1, 3, 4, 5, 6, 7]
    assert plan.query_bounds.tolist() == [0, 2, 3, 5, 8]
    assert plan.key_bounds.tolist() == [0, 2, 5, 9, 12]
    assert (plan.longest_query, plan.longest_key) == (3, 4)


def test_queries_that_rotary_positions_left_in_fp32_are_cast_as_autocast_would():
    row = trees((3, 2, 4))
    query, key, value = (t[0].detach().float() for t in tensors(row))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plan = Varlen(row, CPU)
        out = plan.attend(query, key, value.bfloat16(), scaling=1.0, window=None)
    assert out.dtype == torch.bfloat16


def test_a_row_with_a_gap_is_a_mistake():
    with pytest.raises(AssertionError, match="gap"):
        Varlen((Segment(0, 2), Segment(3, 4)), CPU)


class OnGpu:
    """What is asked of a tensor before the kernel is chosen, as if it were on a GPU."""

    is_cuda = True
    device = CPU

    def __init__(self, dtype: torch.dtype, width: int) -> None:
        self.dtype, self.shape = dtype, torch.Size((4, 10, width))


@pytest.mark.parametrize(
    ("dtype", "width", "dropout", "softcap", "expected"),
    [
        (torch.bfloat16, 64, 0.0, None, True),
        (torch.float16, 128, 0.0, None, True),
        (torch.float32, 64, 0.0, None, False),
        (torch.float64, 64, 0.0, None, False),
        (torch.bfloat16, 64, 0.1, None, False),
        (torch.bfloat16, 64, 0.0, 50.0, False),
        (torch.bfloat16, 12, 0.0, None, False),
        (torch.bfloat16, 256, 0.0, None, False),
    ],
)
def test_the_kernel_is_chosen_only_for_what_it_can_do(
    dtype, width, dropout, softcap, expected, monkeypatch
):
    monkeypatch.setattr(varlen, "available", lambda device: True)
    tensor = OnGpu(dtype, width)
    assert varlen.suits(tensor, tensor, dropout=dropout, softcap=softcap) is expected  # type: ignore[arg-type]


def test_no_tensor_of_a_cpu_is_given_to_the_kernel():
    tensor = torch.zeros(1, 4, 10, 64, dtype=torch.bfloat16)
    assert not varlen.suits(tensor, tensor, dropout=0.0, softcap=None)


@pytest.mark.parametrize("window", [None, 3])
def test_torchs_kernel_takes_these_arguments_and_gives_this_shape(window, monkeypatch):
    """On the meta device: shapes, dtypes and names of arguments, without a number."""
    monkeypatch.undo()
    if varlen.kernel() is None:
        pytest.skip("this torch has no such kernel")
    monkeypatch.setattr(varlen, "computed_in", lambda value: value.dtype)  # no autocast on meta
    row, meta = trees((5, 3, 1), (4,)), torch.device("meta")
    query, key, value = (
        torch.empty(heads, 13, 16, dtype=torch.bfloat16, device=meta, requires_grad=True)
        for heads in (4, 2, 2)
    )
    out = Varlen(row, meta).attend(query, key, value, scaling=0.25, window=window)
    assert (out.shape, out.dtype) == ((13, 4, 16), torch.bfloat16)
    gradients = torch.autograd.grad(out.sum(), (query, key, value))
    assert [g.shape for g in gradients] == [(4, 13, 16), (2, 13, 16), (2, 13, 16)]


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row goes to the kernel, as on a GPU."""
    monkeypatch.setattr(varlen, "suits", lambda *_, **__: True)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "mistral"])
def test_a_model_gives_the_same_numbers_whichever_way_it_attends(family, monkeypatch):
    """Shared keys, windows and a scaling of the family's own, through transformers' layers."""
    policy, reward = tiny_policy(family), tiny_reward(family)
    batch, groups = pack(examples((5, 4), (3, 9), (1, 1), (12, 2))), pack_groups(GROUPS)
    outcomes = []
    for kernel in (False, True):
        monkeypatch.setattr(varlen, "suits", lambda *_, kernel=kernel, **__: kernel)
        attention.plan_of.cache_clear()
        logp, score = response_logps(policy, batch).logp, scores(reward, groups.batch)
        gradient = torch.autograd.grad(score.sum(), next(iter(reward.module.parameters())))[0]
        outcomes.append((logp, score, gradient))
    for ours, tiles in zip(*outcomes, strict=True):
        torch.testing.assert_close(ours, tiles, rtol=0, atol=1e-10)


def test_decoding_goes_on_from_a_prompt_that_the_kernel_read(chosen):
    policy, drawn = tiny_policy("mistral"), sampling(temperature=0.8)
    texts, rows = prompts(), uniforms(len(LENGTHS))
    expected = generate(native(policy), texts, rows, drawn)
    assert_same(generate(policy, texts, rows, drawn), expected)


def test_no_tile_is_made_for_a_row_that_the_kernel_reads(chosen):
    row = trees((5, 3), (4,))
    plan = Segments(row, CPU)
    plan.attend(nn.Identity(), *tensors(row), Options(1.0, 0.0, None, None))
    assert "parts" not in vars(plan)
