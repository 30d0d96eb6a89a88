"""The operations a work needs, against numbers worked out by hand."""

from __future__ import annotations

from benchmarks import cost
from benchmarks.cost import Load, Shape

CONFIG = {
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
    "num_hidden_layers": 3,
    "vocab_size": 100,
}


def test_the_shape_counts_every_matrix_once() -> None:
    # A layer: q and o 8×8 each, k and v 8×4 each, three MLP matrices 8×16.
    layer = 64 + 64 + 32 + 32 + 3 * 128
    assert cost.shape_of(CONFIG) == Shape(layers=3, width=8, body=3 * layer, output=800)


def test_a_head_size_of_its_own_widens_the_attention() -> None:
    # Four heads of 5: q and o 8×20, k and v 8×10.
    layer = 160 + 160 + 80 + 80 + 3 * 128
    found = cost.shape_of({**CONFIG, "head_dim": 5})
    assert (found.width, found.body) == (20, 3 * layer)


def test_a_sequence_attends_to_itself_and_what_came_before() -> None:
    # Five tokens: 1 + 2 + 3 + 4 + 5 keys.
    assert cost.sequence(prompt=3, answer=2) == Load(tokens=5, targets=2, keys=15)


def test_the_answers_of_a_ranking_share_their_prompt() -> None:
    # The prompt: 1 + 2 + 3. Answers of 2 and 1 behind it: 4 + 5 and 4.
    assert cost.ranking(3, [2, 1]) == Load(tokens=6, targets=2, keys=19)


def test_training_costs_three_forward_passes() -> None:
    shape, load = Shape(layers=2, width=4, body=100, output=30), Load(10, 3, 55)
    forward = 2 * (100 * 10 + 30 * 3 + 2 * 2 * 4 * 55)
    assert cost.flops(shape, load, cost.FORWARD) == forward == 3940
    assert cost.flops(shape, load, cost.TRAINING) == 3 * forward


def test_an_iteration_of_ppo_is_five_readings_and_two_updates_an_epoch() -> None:
    policy, load = Shape(layers=1, width=1, body=10, output=5), Load(4, 2, 10)
    critic = policy._replace(output=0)
    # Forward: 2·(40 + 10 + 20) = 140 with the output layer, 2·(40 + 20) = 120 without.
    assert cost.ppo_flops(policy, critic, load, epochs=1) == 3 * 140 + 2 * 120 + 3 * (140 + 120)
    assert cost.ppo_flops(policy, critic, load, epochs=4) == 3 * 140 + 2 * 120 + 12 * (140 + 120)
