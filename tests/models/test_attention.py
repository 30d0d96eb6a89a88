"""Attention over segments against one dense product in which unseen pairs are struck out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from stages.batch import Segment
from stages.models import attention, products
from stages.models.attention import GROWTH, Alone, Cache, Segments, Tile, segment_attention
from stages.models.products import Options, attended

CPU = torch.device("cpu")
HEADS, SHARED, WIDTH = 4, 2, 3


def trees(*shapes: tuple[int, ...]) -> tuple[Segment, ...]:
    """Segments of rankings; a shape is the prompt's length and those of its answers."""
    row: list[Segment] = []
    start = 0
    for shape in shapes:
        root = len(row)
        for n, length in enumerate(shape):
            row.append(Segment(start, start + length, root if n else None))
            start += length
    return tuple(row)


ROWS = {
    "one text": trees((7,)),
    "one token": trees((1,)),
    "texts of all sizes": trees((1,), (9,), (2,), (30,), (1,), (17,), (3,)),
    "trees": trees((5, 3, 1, 8), (2, 2, 2), (20, 4, 1)),
    "an empty prompt": trees((0, 3, 5), (4, 2)),
    "an empty answer and an empty text": trees((4, 0, 3), (0,), (6,)),
    "many of one size": trees(*[(4,)] * 12),
    "a long prompt with short answers": trees((40, 1, 2, 3), (2, 33)),
}


def tensors(row: tuple[Segment, ...], seed: int = 0) -> list[torch.Tensor]:
    """Queries of HEADS, keys and values of SHARED heads, for the tokens of a row."""
    generator = torch.Generator().manual_seed(seed)
    length = row[-1].stop
    return [
        torch.randn(1, heads, length, WIDTH, generator=generator, dtype=torch.float64)
        .requires_grad_()
        for heads in (HEADS, SHARED, SHARED)
    ]  # fmt: skip


def dense(row, query, key, value, options: Options) -> torch.Tensor:
    """``[1, N, H, D]``, pair by pair from the definition of a tree."""
    n = row[-1].stop
    seen, place = torch.zeros(n, n, dtype=torch.bool), torch.zeros(n, dtype=torch.int64)
    for segment in row:
        own = list(range(segment.start, segment.stop))
        parent = [] if segment.parent is None else list(range(*row[segment.parent][:2]))
        line = [*parent, *own]
        for token in own:
            place[token] = line.index(token)
            before = line[: line.index(token) + 1]
            if options.window is not None:
                before = before[-options.window :]
            seen[token, before] = True
    keys, values = (t.repeat_interleave(HEADS // SHARED, dim=1) for t in (key, value))
    scores = query @ keys.transpose(2, 3) * options.scaling
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return (weights @ values).transpose(1, 2)


def assert_equal_with_gradients(row, options: Options) -> Segments:
    inputs = tensors(row)
    plan = Segments(row, CPU)
    ours = plan.attend(nn.Identity(), *inputs, options)
    theirs = dense(row, *inputs, options)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    weight = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1), dtype=ours.dtype)
    got = torch.autograd.grad((ours * weight).sum(), inputs)
    expected = torch.autograd.grad((theirs * weight).sum(), inputs)
    for mine, other in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-11)
    return plan


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("window", [None, 1, 3, 6, 500])
@pytest.mark.parametrize("bounds", [(256, 320), (1, 4), (8, 12), (0, 0)], ids=str)
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_segments_attend_as_the_definition_says(row, bounds, window, softcap, monkeypatch):
    monkeypatch.setattr(attention, "TILE_BELOW", bounds[0])
    monkeypatch.setattr(products, "SDPA_ABOVE", bounds[1])
    assert_equal_with_gradients(row, Options(0.6, 0.0, softcap, window))


@pytest.mark.parametrize("seed", range(20))
def test_any_row_of_trees_attends_as_the_definition_says(seed, monkeypatch):
    rng = np.random.default_rng(seed)
    monkeypatch.setattr(attention, "TILE_BELOW", int(rng.integers(1, 30)))
    monkeypatch.setattr(products, "SDPA_ABOVE", int(rng.integers(1, 30)))
    shapes = [
        tuple(int(n) for n in rng.integers(0, 18, rng.integers(1, 5)))
        for _ in range(rng.integers(1, 6))
    ]
    row = trees((3,), *shapes)
    window = None if seed % 2 else int(rng.integers(1, 20))
    assert_equal_with_gradients(row, Options(0.5, 0.0, None, window))


def test_short_segments_share_products_and_long_ones_stay_alone(monkeypatch):
    monkeypatch.setattr(attention, "TILE_BELOW", 8)
    plan = Segments(trees((3,), (3,), (4,), (30,), (40,)), CPU)
    assert [type(part) for part in plan.parts] == [Tile, Alone, Alone]


@pytest.mark.parametrize("seed", range(5))
def test_padding_of_tiles_stays_within_its_bound(seed):
    lengths = np.random.default_rng(seed).integers(1, 200, 40)
    row = trees(*[(int(n),) for n in lengths])
    for part in Segments(row, CPU).parts:
        if isinstance(part, Tile):
            real = int(part.real.sum(1).square().sum())  # t · s of root segments
            assert part.queries.shape[1] * part.keys.numel() <= attention.WASTE * real


def test_every_token_is_computed_exactly_once():
    for row in ROWS.values():
        tokens = np.concatenate([part.tokens for part in Segments(row, CPU).parts])
        assert np.sort(tokens[tokens >= 0]).tolist() == list(range(row[-1].stop))


def test_attention_dropout_acts_in_training_mode_alone_and_keeps_the_mean():
    row = trees((4,), (6,), (30,))
    layer, (query, key, _) = nn.Identity(), tensors(row)
    ones = torch.ones(1, SHARED, row[-1].stop, WIDTH, dtype=torch.float64)
    plan = Segments(row, CPU)

    def means(count: int) -> torch.Tensor:
        torch.manual_seed(0)
        outs = [
            segment_attention(layer, query, key, ones, None, plan=plan, dropout=0.5)[0]
            for _ in range(count)
        ]
        return torch.stack(outs).detach()

    layer.eval()
    assert float((means(1) - 1.0).abs().max()) < 1e-12
    layer.train()
    dropped = means(300)
    assert float(dropped.std(0).min()) > 0.1
    assert abs(float(dropped.mean()) - 1.0) < 0.02


def test_the_scaling_is_one_over_the_root_of_the_width_unless_a_family_gives_its_own():
    row = trees((5,))
    inputs, layer = tensors(row), nn.Identity().eval()
    plan = Segments(row, CPU)
    default, weights = segment_attention(layer, *inputs, None, plan=plan)
    given, _ = segment_attention(layer, *inputs, None, plan=plan, scaling=0.9)
    assert weights is None
    expected = dense(row, *inputs, Options(WIDTH**-0.5, 0.0, None, None))
    torch.testing.assert_close(default, expected, rtol=0, atol=1e-12)
    expected = dense(row, *inputs, Options(0.9, 0.0, None, None))
    torch.testing.assert_close(given, expected, rtol=0, atol=1e-12)


def test_bf16_weights_come_from_a_softmax_in_fp32():
    """Two hundred equal weights of 1/200 sum to 1 in fp32; a bf16 sum would stop growing."""
    query, key = torch.zeros(1, 1, 1, 8).bfloat16(), torch.zeros(1, 1, 200, 8).bfloat16()
    seen = torch.zeros(1, 1, 1, 200, dtype=torch.bool)
    out = attended(query, key, torch.ones_like(key), seen, Options(1.0, 0.0, None, None))
    assert out.dtype == torch.bfloat16
    assert abs(float(out.mean()) - 1.0) < 0.01


@pytest.mark.parametrize("window", [None, 4])
def test_decoding_token_by_token_attends_as_the_whole_text_would(window):
    """Three texts of unequal length grow past the cache's first buffer; one leaves in between."""
    prompts, grown, left = (3, 7, 1), GROWTH + 5, 1
    row = trees(*[(n + grown,) for n in prompts])
    query, key, value = (t.detach() for t in tensors(row))
    options = Options(0.5, 0.0, None, window)
    truth = dense(row, query, key, value, options)
    starts = torch.tensor([segment.start for segment in row])
    short = torch.cat([torch.arange(n) + s for n, s in zip(prompts, starts, strict=True)])
    lengths = torch.tensor(prompts)
    columns = torch.arange(max(prompts))
    first = torch.tensor([0, 3, 10])
    source = torch.where(columns < lengths[:, None], first[:, None] + columns, 0)
    layer, cache = nn.Identity(), Cache(source, lengths)
    plan = Segments(trees(*[(n,) for n in prompts]), CPU, cache)
    prefill = plan.attend(layer, *(t[:, :, short] for t in (query, key, value)), options)
    torch.testing.assert_close(prefill, truth[:, short], rtol=0, atol=1e-12)
    running = torch.arange(3)
    for step in range(grown):
        if step == GROWTH // 2:
            kept = running != left
            cache.keep(kept.nonzero()[:, 0])
            running = running[kept]
        at = starts[running] + lengths[running] + step
        now = [t[0, :, at].transpose(0, 1)[:, :, None] for t in (query, key, value)]
        out = cache.attend(layer, *now, options)
        cache.advance()
        torch.testing.assert_close(out[:, 0], truth[0, at], rtol=0, atol=1e-12)
    assert cache.lengths.tolist() == [3 + grown, 1 + grown]
