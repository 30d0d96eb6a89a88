"""Packed rows by hand: ids, positions, segments, targets; back to separate and padded rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stages.batch import Example, Group, Segment, behind, pack, pack_groups, pad, separate


def array(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


def test_an_answer_stands_behind_its_prompt_and_is_all_target():
    example = behind(array(5, 6), array(7, 8, 1))
    assert example.ids.tolist() == [5, 6, 7, 8, 1]
    assert example.targets.tolist() == [2, 3, 4]


def test_three_sequences_lie_end_to_end():
    batch = pack([
        behind(array(10, 11), array(12, 13)),
        Example(array(20, 21, 22), array(1)),
        behind(array(30), array()),
    ])  # fmt: skip
    assert batch.row.ids.tolist() == [10, 11, 12, 13, 20, 21, 22, 30]
    assert batch.row.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 0]
    assert batch.row.segments == (Segment(0, 4), Segment(4, 7), Segment(7, 8))
    assert batch.targets.tolist() == [[2, 3], [5, 0], [0, 0]]
    assert batch.mask.tolist() == [[True, True], [True, False], [False, False]]
    assert batch.ends.tolist() == [3, 6, 7]


MARGINS = np.array([[0.0, 1.0, 2.0], [0.0, 0.0, 0.5], [0.0, 0.0, 0.0]])
FIRST = Group(array(10, 11), (array(12), array(13, 14), array()), (2, 1, 2), MARGINS)
SECOND = Group(array(20), (array(21, 22, 23), array(24)), (1, 2))


def test_two_rankings_lie_as_trees_with_each_prompt_once():
    groups = pack_groups([FIRST, SECOND])
    row = groups.batch.row
    assert row.ids.tolist() == [10, 11, 12, 13, 14, 20, 21, 22, 23, 24]
    assert row.positions.tolist() == [0, 1, 2, 2, 3, 0, 1, 2, 3, 1]
    assert row.segments == (
        Segment(0, 2), Segment(2, 3, 0), Segment(3, 5, 0), Segment(5, 5, 0),
        Segment(5, 6), Segment(6, 9, 4), Segment(9, 10, 4),
    )  # fmt: skip
    assert groups.batch.targets.tolist() == [[2, 0, 0], [3, 4, 0], [0, 0, 0], [6, 7, 8], [9, 0, 0]]
    assert groups.batch.mask.sum(1).tolist() == [1, 2, 0, 3, 1]
    assert groups.batch.ends.tolist() == [2, 4, 1, 8, 9]
    assert groups.members.tolist() == [[0, 1, 2], [3, 4, 0]]
    assert groups.ranks.tolist() == [[2, 1, 2], [1, 2, 0]]
    assert groups.mask.tolist() == [[True, True, True], [True, True, False]]


def test_margins_are_kept_where_a_ranking_has_them():
    assert pack_groups([SECOND]).margins is None
    margins = pack_groups([FIRST, SECOND]).margins
    assert margins is not None
    assert margins[0].tolist() == MARGINS.tolist()
    assert not bool(margins[1].any())
    twofold = Group(array(1), (array(2), array(3)), (1, 2), np.array([[0.0, 4.0], [0.0, 0.0]]))
    margins = pack_groups([FIRST, twofold]).margins
    assert margins is not None
    assert margins[1].tolist() == [[0.0, 4.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]


def test_each_answer_of_a_tree_gets_a_copy_of_its_prompt():
    row = pack_groups([FIRST, SECOND]).batch.row
    flat, index = separate(row)
    assert flat.ids.tolist() == [10, 11, 12, 10, 11, 13, 14, 10, 11, 20, 21, 22, 23, 20, 24]
    assert flat.positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 0, 1, 0, 1, 2, 3, 0, 1]
    assert [s[:2] for s in flat.segments] == [(0, 3), (3, 7), (7, 9), (9, 13), (13, 15)]
    assert {segment.parent for segment in flat.segments} == {None}
    assert index.tolist() == [0, 1, 2, 5, 6, 9, 10, 11, 12, 14]
    assert torch.equal(flat.ids[index], row.ids)
    assert torch.equal(flat.positions[index], row.positions)


def test_a_row_without_trees_is_its_own_separation():
    row = pack([behind(array(1, 2), array(3)), behind(array(4), array(5, 6))]).row
    flat, index = separate(row)
    assert torch.equal(flat.ids, row.ids)
    assert flat.segments == row.segments
    assert index.tolist() == list(range(6))


def test_padded_rows_are_filled_on_the_right_and_every_token_is_found_again():
    row = pack([behind(array(1, 2), array(3)), behind(array(4), array()), behind(array(5), array(6))
                ]).row  # fmt: skip
    ids, mask, place = pad(row)
    assert ids.tolist() == [[1, 2, 3], [4, 0, 0], [5, 6, 0]]
    assert mask.tolist() == [[True, True, True], [True, False, False], [True, True, False]]
    assert torch.equal(ids.flatten()[place], row.ids)


@pytest.mark.parametrize("seed", range(10))
def test_any_row_of_trees_survives_separation_and_padding(seed):
    rng = np.random.default_rng(seed)
    groups = []
    for _ in range(rng.integers(1, 5)):
        answers = tuple(rng.integers(2, 90, rng.integers(1, 7)) for _ in range(rng.integers(1, 5)))
        ranks = tuple(range(1, len(answers) + 1))
        groups.append(Group(rng.integers(2, 90, rng.integers(1, 6)), answers, ranks))
    row = pack_groups(groups).batch.row
    flat, index = separate(row)
    ids, mask, place = pad(flat)
    assert torch.equal(ids.flatten()[place][index], row.ids)
    texts = [r[m].tolist() for r, m in zip(ids, mask, strict=True)]
    assert texts == [[*g.prompt, *a] for g in groups for a in g.answers]


def test_a_batch_keeps_its_content_on_another_device():
    batch = pack([behind(array(1, 2), array(3))])
    moved = batch.to(torch.device("meta"))
    assert moved.row.segments == batch.row.segments
    tensors = (moved.row.ids, moved.row.positions, moved.targets, moved.mask, moved.ends)
    assert {t.device.type for t in tensors} == {"meta"}
