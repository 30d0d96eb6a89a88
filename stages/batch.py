"""The tensors that data and models exchange: packed rows.

A micro-batch is one row of N tokens without padding. The row is cut into segments. A plain
sequence is one segment; a ranking is a tree: one segment for the prompt and one for each answer,
whose parent is the prompt, so that a prompt of P tokens with K answers costs P + T_1 + … + T_K
tokens. A token attends to its parent segment and, causally, to its own.

Which row tokens are of interest is said once, by ``Batch.targets`` of shape ``[B, T]``: column t of
a response tensor belongs to response token t of sequence b. Every model pass returns that shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

Ids = np.ndarray  # token ids or token positions of one example, a one-dimensional integer array


class Example(NamedTuple):
    """One encoded sequence: all its token ids, and the positions of the tokens that are targets."""

    ids: Ids
    targets: Ids


class Group(NamedTuple):
    """One encoded ranking: a prompt and its K answers, with rank 1 the best and equal ranks tied.

    ``margins`` is the ``[K, K]`` margin of each pair (preferred, other), or None.
    """

    prompt: Ids
    answers: tuple[Ids, ...]
    ranks: tuple[int, ...]
    margins: np.ndarray | None = None

    @property
    def tokens(self) -> int:
        """What it costs as a tree: its prompt once and all its answers."""
        return len(self.prompt) + sum(len(answer) for answer in self.answers)


class Segment(NamedTuple):
    """Tokens ``start:stop`` of a row; ``parent`` is the segment read before them, by index."""

    start: int
    stop: int
    parent: int | None = None


def parent_of(segment: Segment, row: tuple[Segment, ...]) -> range:
    """The tokens of the segment that is read before this one; none for a root."""
    if segment.parent is None:
        return range(0)
    parent = row[segment.parent]
    return range(parent.start, parent.stop)


@dataclass(frozen=True)
class PackedRow:
    """Token ids ``[N]``, positions ``[N]`` (restarted for each root segment) and the segments."""

    ids: Tensor
    positions: Tensor
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class Batch:
    """B sequences in one row.

    Attributes:
        row: the packed tokens.
        targets: ``[B, T]`` row index of target token t of sequence b (0 where ``mask`` is False).
        mask: ``[B, T]`` bool, True = a real target.
        ends: ``[B]`` row index of the last real token of sequence b, where its score is read.
    """

    row: PackedRow
    targets: Tensor
    mask: Tensor
    ends: Tensor

    def to(self, device: torch.device) -> Batch:
        """The same batch on another device."""
        row = PackedRow(self.row.ids.to(device), self.row.positions.to(device), self.row.segments)
        return Batch(row, self.targets.to(device), self.mask.to(device), self.ends.to(device))


@dataclass(frozen=True)
class GroupBatch:
    """P prompts with up to K ranked answers each, in one row.

    Attributes:
        batch: all answers as B = Σ K_p sequences, prompt by prompt; every answer token is a target.
        members: ``[P, K]`` index into the B sequences (0 where ``mask`` is False).
        ranks: ``[P, K]`` integer ranks, 1 = best.
        mask: ``[P, K]`` bool, True = a real answer.
        margins: ``[P, K, K]`` margin of each pair, or None.
    """

    batch: Batch
    members: Tensor
    ranks: Tensor
    mask: Tensor
    margins: Tensor | None

    def by_prompt(self, values: Tensor) -> Tensor:
        """``[P, K]`` from one value for each of the B sequences."""
        members = self.members.to(values.device)
        return values.index_select(0, members.flatten()).view(members.shape)


def behind(prompt: Ids, answer: Ids) -> Example:
    """An answer behind its prompt; every answer token is a target."""
    ids = np.concatenate([prompt, answer])
    return Example(ids, np.arange(len(prompt), len(ids)))


def pack(examples: Sequence[Example]) -> Batch:
    """Lay B sequences end to end in one row, each a segment of its own."""
    lengths = [len(example.ids) for example in examples]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    segments = tuple(Segment(int(a), int(b)) for a, b in pairwise(starts))
    row = PackedRow(
        ids=_long(np.concatenate([example.ids for example in examples])),
        positions=_long(np.concatenate([np.arange(n) for n in lengths])),
        segments=segments,
    )
    placed = [start + example.targets for start, example in zip(starts[:-1], examples, strict=True)]
    return _batch(row, placed, ends=starts[1:] - 1)


def pack_groups(groups: Sequence[Group]) -> GroupBatch:
    """Lay P rankings in one row as trees: each prompt once, then its answers."""
    ids: list[Ids] = []
    positions: list[Ids] = []
    segments: list[Segment] = []
    start = 0
    for group in groups:
        root = len(segments)
        for n, tokens in enumerate((group.prompt, *group.answers)):
            segments.append(Segment(start, start + len(tokens), root if n else None))
            ids.append(tokens)
            positions.append(np.arange(len(tokens)) + (len(group.prompt) if n else 0))
            start += len(tokens)
    row = PackedRow(_long(np.concatenate(ids)), _long(np.concatenate(positions)), tuple(segments))
    answers = [segment for segment in segments if segment.parent is not None]
    placed = [np.arange(segment.start, segment.stop) for segment in answers]
    ends = [s.stop - 1 if s.stop > s.start else segments[s.parent or 0].stop - 1 for s in answers]
    batch = _batch(row, placed, ends=np.array(ends))
    sizes = [len(group.answers) for group in groups]
    firsts = np.concatenate([[0], np.cumsum(sizes)])
    members, mask = _padded([np.arange(a, a + n) for a, n in zip(firsts[:-1], sizes, strict=True)])
    ranks, _ = _padded([np.array(group.ranks) for group in groups])
    return GroupBatch(batch, members, ranks, mask, margin_table(groups, mask.shape[1]))


def _batch(row: PackedRow, placed: Sequence[Ids], ends: np.ndarray) -> Batch:
    targets, mask = _padded(placed)
    return Batch(row, targets, mask, _long(ends))


def _padded(rows: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
    """Integer rows of unequal length as one tensor filled with 0, and the mask of real entries."""
    width = max((len(row) for row in rows), default=0)
    values = np.zeros((len(rows), width), dtype=np.int64)
    mask = np.zeros((len(rows), width), dtype=bool)
    for n, row in enumerate(rows):
        values[n, : len(row)] = row
        mask[n, : len(row)] = True
    return torch.from_numpy(values), torch.from_numpy(mask)


def margin_table(groups: Sequence[Group], width: int) -> Tensor | None:
    """``[P, K, K]`` margin of each pair for K = ``width``, 0 beyond a record's answers, or None."""
    if all(group.margins is None for group in groups):
        return None
    table = np.zeros((len(groups), width, width))
    for n, group in enumerate(groups):
        if group.margins is not None:
            k = len(group.answers)
            table[n, :k, :k] = group.margins
    return torch.from_numpy(table)


def _long(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64))


def separate(row: PackedRow) -> tuple[PackedRow, Tensor]:
    """The row without trees: each answer behind a copy of its prompt.

    Returns:
        The row of root segments only, and ``[N]``: where each token of the old row stands in it (a
        prompt token of several answers: in the copy of the first).
    """
    parents = {segment.parent for segment in row.segments}
    index = torch.zeros(len(row.ids), dtype=torch.int64)
    pieces: list[Tensor] = []
    segments: list[Segment] = []
    start = 0
    for n, segment in enumerate(row.segments):
        if n in parents:
            continue
        own = torch.arange(segment.start, segment.stop)
        prompt = row.segments[segment.parent] if segment.parent is not None else Segment(0, 0)
        piece = torch.cat([torch.arange(prompt.start, prompt.stop), own])
        first = segment.parent is None or row.segments[n - 1].parent != segment.parent
        new = piece if first else own
        index[new] = torch.arange(start + len(piece) - len(new), start + len(piece))
        pieces.append(piece)
        segments.append(Segment(start, start + len(piece)))
        start += len(piece)
    taken = torch.cat(pieces).to(row.ids.device)
    flat = PackedRow(row.ids[taken], row.positions[taken], tuple(segments))
    return flat, index.to(row.ids.device)


def pad(row: PackedRow) -> tuple[Tensor, Tensor, Tensor]:
    """A row of root segments as padded rows.

    Returns:
        ids ``[R, S]`` (0 in padding, on the right), attention mask ``[R, S]`` and ``[N]``: where
        each token of the row stands in the flattened ``[R · S]``.
    """
    lengths = torch.tensor([segment.stop - segment.start for segment in row.segments])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    place = mask.flatten().nonzero()[:, 0].to(row.ids.device)
    ids = row.ids.new_zeros(mask.numel()).scatter(0, place, row.ids)
    return ids.view(mask.shape), mask.to(row.ids.device), place
