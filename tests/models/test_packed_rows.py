"""One packed row, or a tree, gives the numbers of separate sequences in transformers itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stages.batch import Example, Group, behind, pack, pack_groups
from stages.models import attention, forward, products
from stages.models.forward import response_logps, response_values, scores
from tests.families import FAMILIES, WITH_DROPOUT, network_of, tiny_policy, tiny_reward
from tests.models.alone import (
    assert_close,
    assert_same_gradients,
    entropy_alone,
    examples,
    gradients,
    logps_alone,
    other_config,
    score_alone,
    states_alone,
    tokens,
    twin,
    weights_like,
)

SHAPES = ((5, 4), (3, 9), (1, 1), (12, 2), (2, 14), (4, 0))
DTYPES = (torch.float64, torch.float32)

both_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_family = pytest.mark.parametrize("family", FAMILIES)


def ranking(prompt: int, *answers: int, seed: int = 0) -> Group:
    rng = np.random.default_rng(seed)
    texts = tuple(tokens(rng, n) for n in answers)
    return Group(tokens(rng, prompt), texts, tuple(range(1, len(answers) + 1)))


def apart(groups: list[Group]) -> list[Example]:
    return [behind(group.prompt, answer) for group in groups for answer in group.answers]


GROUPS = [ranking(5, 4, 9, 1, seed=1), ranking(1, 6, 3, seed=2), ranking(11, 2, seed=3)]


@both_dtypes
@each_family
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_invariant_4_logps_of_a_packed_row_are_those_of_each_sequence_alone(
    family, dtype, temperature
):
    network, data = tiny_policy(family, dtype=dtype), examples(*SHAPES)
    got = response_logps(network, pack(data), temperature=temperature, entropy="gradient")
    module = twin(network)
    for row, example in enumerate(data):
        n = len(example.targets)
        assert_close(
            got.logp[row, :n], logps_alone(module, example, temperature=temperature), dtype
        )
        spread = entropy_alone(module, example, temperature=temperature)
        assert_close(got.entropy[row, :n], spread, dtype)
        assert bool((got.logp[row, n:] == 0).all())


@both_dtypes
@each_family
def test_invariant_4_gradients_of_a_packed_row_are_those_of_each_sequence_alone(family, dtype):
    network, data = tiny_policy(family, dtype=dtype), examples(*SHAPES)
    batch, module = pack(data), twin(network)
    got = response_logps(network, batch, temperature=0.7, entropy="gradient")
    alone = torch.cat([logps_alone(module, e, temperature=0.7) for e in data])
    spread = torch.cat([entropy_alone(module, e, temperature=0.7) for e in data])
    a, b = weights_like([alone, spread])
    ours = (a * got.logp[batch.mask]).sum() + (b * got.entropy[batch.mask]).sum()
    theirs = (a * alone).sum() + (b * spread).sum()
    assert_same_gradients(gradients(network.module, ours), gradients(module, theirs), dtype)


@both_dtypes
@each_family
@pytest.mark.parametrize("after_last", [False, True])
def test_values_and_their_gradients_are_those_of_each_sequence_alone(family, dtype, after_last):
    network = tiny_reward(family, dtype=dtype, kind="critic", mean=0.4, std=2.5)
    data = examples(*SHAPES)
    batch, module = pack(data), twin(network)
    got = response_values(network, batch, after_last=after_last)
    width, expected, taken = got.shape[1], [], []
    for row, example in enumerate(data):
        n = len(example.targets)
        states = (states_alone(module, example) - 0.4) / 2.5
        alone = states[len(example.ids) - n - 1 : len(example.ids) - 1]
        if after_last and 0 < n < width:
            alone = torch.cat([alone, states[-1:]])
        assert bool((got[row, len(alone) :] == 0).all())
        expected.append(alone)
        taken.append(got[row, : len(alone)])
    ours, theirs = torch.cat(taken), torch.cat(expected)
    assert_close(ours, theirs, dtype)
    (a,) = weights_like([theirs])
    grads = gradients(network.module, (a * ours).sum()), gradients(module, (a * theirs).sum())
    assert_same_gradients(*grads, dtype)


@both_dtypes
@each_family
def test_scores_and_their_gradients_are_the_logits_of_the_classifier(family, dtype):
    network = tiny_reward(family, dtype=dtype, mean=-1.5, std=0.5)
    data = examples(*SHAPES)
    module = twin(network)
    ours = scores(network, pack(data))
    theirs = torch.stack([(score_alone(module, e) + 1.5) / 0.5 for e in data])
    assert_close(ours, theirs, dtype)
    (a,) = weights_like([theirs])
    grads = gradients(network.module, (a * ours).sum()), gradients(module, (a * theirs).sum())
    assert_same_gradients(*grads, dtype)


@both_dtypes
@each_family
def test_scores_of_a_tree_are_those_of_each_answer_behind_its_prompt(family, dtype):
    network = tiny_reward(family, dtype=dtype)
    assert network.mode == "tree"
    module, data = twin(network), apart(GROUPS)
    ours = scores(network, pack_groups(GROUPS).batch)
    theirs = torch.stack([score_alone(module, e) for e in data])
    assert_close(ours, theirs, dtype)
    (a,) = weights_like([theirs])
    grads = gradients(network.module, (a * ours).sum()), gradients(module, (a * theirs).sum())
    assert_same_gradients(*grads, dtype)


@both_dtypes
@each_family
def test_logps_of_a_tree_are_those_of_each_answer_behind_its_prompt(family, dtype):
    network, data = tiny_policy(family, dtype=dtype), apart(GROUPS)
    module, batch = twin(network), pack_groups(GROUPS).batch
    ours = response_logps(network, batch).logp[batch.mask]
    theirs = torch.cat([logps_alone(module, e) for e in data])
    assert_close(ours, theirs, dtype)
    (a,) = weights_like([theirs])
    grads = gradients(network.module, (a * ours).sum()), gradients(module, (a * theirs).sum())
    assert_same_gradients(*grads, dtype)


@each_family
def test_every_value_of_a_tree_is_that_of_the_answer_alone(family):
    network, data = tiny_reward(family, kind="critic"), apart(GROUPS)
    module, batch = twin(network), pack_groups(GROUPS).batch
    theirs = [states_alone(module, e)[e.targets - 1] for e in data]
    assert_close(response_values(network, batch)[batch.mask], torch.cat(theirs), torch.float64)


@each_family
def test_invariant_4_row_order_and_company_change_no_number(family):
    network, data = tiny_policy(family), examples(*SHAPES)
    together = response_logps(network, pack(data)).logp
    turned = response_logps(network, pack(data[::-1])).logp.flip(0)
    assert_close(turned, together, torch.float64)
    for row, example in enumerate(data):
        alone = response_logps(network, pack([example])).logp[0]
        assert_close(together[row, : len(alone)], alone, torch.float64)


def padded(module, data: list[Example], *, left: bool, content: int) -> torch.Tensor:
    """Scores of a padded batch by transformers; the pad id is 0, ``content`` fills the padding."""
    width = max(len(e.ids) for e in data) + 3
    ids, mask = torch.full((len(data), width), content), torch.zeros(len(data), width).long()
    for row, example in enumerate(data):
        at = slice(width - len(example.ids), None) if left else slice(0, len(example.ids))
        ids[row, at], mask[row, at] = torch.from_numpy(example.ids), 1
    options = {}
    if module.config.model_type != "opt":  # it counts positions by the mask
        options["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    return module(input_ids=ids, attention_mask=mask, **options).logits[:, 0]


@both_dtypes
@each_family
def test_invariant_9_a_score_is_the_same_alone_batched_padded_packed_and_in_a_tree(family, dtype):
    network, data = tiny_reward(family, dtype=dtype), apart(GROUPS)
    module = twin(network)
    with torch.no_grad():
        truth = torch.stack([score_alone(module, e) for e in data])
        ways = {
            "one by one": torch.cat([scores(network, pack([e])) for e in data]),
            "packed": scores(network, pack(data)),
            "packed in another order": scores(network, pack(data[::-1])).flip(0),
            "a tree": scores(network, pack_groups(GROUPS).batch),
            "padded on the right": padded(module, data, left=False, content=0),
            "padded on the left": padded(module, data, left=True, content=0),
        }
    for way, got in ways.items():
        assert float((got - truth).abs().max()) < (1e-9 if dtype == torch.float64 else 2e-5), way


@both_dtypes
@each_family
def test_invariant_9_a_score_is_the_same_in_padded_rows_of_ours_whatever_fills_them(
    family, dtype, monkeypatch
):
    network, data = tiny_reward(family, dtype=dtype), examples(*SHAPES)
    truth = scores(network, pack(data)).detach()
    network.module.set_attn_implementation("sdpa")
    network.mode = "padded"
    with torch.no_grad():
        zeros = scores(network, pack(data))
        pad = forward.pad

        def filled(row):
            ids, mask, place = pad(row)
            return ids.masked_fill(~mask, 55), mask, place

        monkeypatch.setattr(forward, "pad", filled)
        others = scores(network, pack(data))
    assert_close(zeros, truth, dtype)
    assert torch.equal(zeros, others)


def test_a_score_is_read_at_the_last_real_token_even_if_it_is_the_pad_or_end_token():
    network = tiny_reward("llama")
    module = twin(network)
    for last in (0, 1):
        example = behind(np.array([5, 6, 7]), np.array([8, 9, last]))
        expected = states_alone(module, example)[-1]
        assert_close(scores(network, pack([example]))[0], expected, torch.float64)


def test_an_empty_answer_is_scored_at_the_last_token_of_its_prompt():
    group = ranking(4, 3, 0, 2)
    network = tiny_reward("gpt2")
    module = twin(network)
    got = scores(network, pack_groups([group]).batch)
    theirs = torch.stack([states_alone(module, e)[-1] for e in apart([group])])
    assert_close(got, theirs, torch.float64)


@each_family
def test_answers_to_an_empty_prompt_are_scored_as_sequences_of_their_own(family):
    group = ranking(0, 3, 5, 1)
    network = tiny_reward(family)
    module = twin(network)
    got = scores(network, pack_groups([group, ranking(2, 4)]).batch)[:3]
    assert_close(got, torch.stack([score_alone(module, e) for e in apart([group])]), torch.float64)


def test_a_target_with_nothing_before_it_is_no_silent_number():
    batch = pack([behind(np.array([], dtype=np.int64), np.array([3, 4]))])
    with pytest.raises(AssertionError, match="no token before"):
        response_logps(tiny_policy("llama"), batch)


def test_targets_in_the_middle_of_a_sequence_get_their_own_log_probabilities():
    ids = tokens(np.random.default_rng(0), 12)
    data = [Example(ids, np.array([2, 3, 7, 11])), Example(ids[:6], np.array([5]))]
    network = tiny_policy("gpt_neox")
    module = twin(network)
    batch = pack(data)
    got = response_logps(network, batch).logp[batch.mask]
    assert_close(got, torch.cat([logps_alone(module, e) for e in data]), torch.float64)


@pytest.mark.parametrize("chunk", [97, 97 * 4, 97 * 1000])
def test_log_probabilities_and_gradients_do_not_depend_on_the_chunk_of_logits(chunk, monkeypatch):
    network, batch = tiny_policy("llama"), pack(examples(*SHAPES))
    whole = response_logps(network, batch, entropy="gradient")
    expected = gradients(network.module, (whole.logp * 2 + whole.entropy).sum())
    monkeypatch.setattr(forward, "CHUNK", chunk)
    parts = response_logps(network, batch, entropy="gradient")
    got = gradients(network.module, (parts.logp * 2 + parts.entropy).sum())
    assert_close(parts.logp, whole.logp, torch.float64)
    assert_same_gradients(got, expected, torch.float64)


def test_entropy_as_a_value_carries_no_gradient_and_none_is_zero():
    network, batch = tiny_policy("llama"), pack(examples(*SHAPES))
    none = response_logps(network, batch).entropy
    value = response_logps(network, batch, entropy="value").entropy
    live = response_logps(network, batch, entropy="gradient").entropy
    assert float(none.abs().max()) == 0.0
    assert not value.requires_grad
    assert live.requires_grad
    assert torch.equal(value, live)


@pytest.mark.parametrize("family", WITH_DROPOUT)
def test_recomputing_activations_changes_neither_values_nor_gradients_under_dropout(family):
    batch = pack(examples(*SHAPES))

    def run(*, recompute: bool):
        network = tiny_policy(family, dropout=0.1)
        network.module.train()
        if recompute:
            network.module.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(3)
        logp = response_logps(network, batch).logp
        return logp.detach(), gradients(network.module, logp.sum())

    (kept, expected), (again, got) = run(recompute=False), run(recompute=True)
    assert torch.equal(kept, again)
    assert_same_gradients(got, expected, torch.float64)


@pytest.mark.parametrize("family", WITH_DROPOUT)
def test_dropout_acts_in_training_mode_alone(family):
    network, batch = tiny_policy(family, dropout=0.1), pack(examples(*SHAPES))
    quiet = response_logps(network, batch).logp
    assert torch.equal(quiet, response_logps(network, batch).logp)
    network.module.train()
    first, second = response_logps(network, batch).logp, response_logps(network, batch).logp
    assert not torch.equal(first, second)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_under_bf16_autocast_log_probabilities_are_fp32_and_near_the_exact_ones(family):
    data = examples(*SHAPES)
    exact = response_logps(tiny_policy(family), pack(data)).logp
    network = tiny_policy(family, dtype=torch.float32)
    network.compute = torch.bfloat16
    half = response_logps(network, pack(data)).logp
    reward = tiny_reward(family, dtype=torch.float32)
    reward.compute = torch.bfloat16
    assert half.dtype == scores(reward, pack(data)).dtype == torch.float32
    assert 0.0 < float((half - exact).detach().abs().mean()) < 0.1


@each_family
def test_long_and_short_texts_agree_with_separate_ones_in_every_branch_of_attention(
    family, monkeypatch
):
    monkeypatch.setattr(attention, "TILE_BELOW", 8)
    monkeypatch.setattr(products, "SDPA_ABOVE", 12)
    groups = [ranking(3, 2, 4, 30), ranking(40, 3, 1, 50, seed=4), ranking(6, 1, 2, seed=5)]
    network, batch = tiny_policy(family), pack_groups(groups).batch
    module = twin(network)
    ours = response_logps(network, batch).logp[batch.mask]
    theirs = torch.cat([logps_alone(module, e) for e in apart(groups)])
    assert_close(ours, theirs, torch.float64)
    (a,) = weights_like([theirs])
    grads = gradients(network.module, (a * ours).sum()), gradients(module, (a * theirs).sum())
    assert_same_gradients(*grads, torch.float64)


@both_dtypes
@pytest.mark.parametrize("family", ["gemma2", "cohere", "granite"])
def test_a_family_that_changes_its_logits_or_caps_its_attention_gives_its_own_numbers(
    family, dtype
):
    network = network_of(other_config(family), "policy", dtype=dtype)
    batch, module = pack_groups(GROUPS).batch, twin(network)
    assert network.mode == "tree"
    ours = response_logps(network, batch).logp[batch.mask]
    theirs = torch.cat([logps_alone(module, e) for e in apart(GROUPS)])
    limit = 1e-6 if dtype == torch.float64 else 2e-5  # its norms or its softmax go through fp32
    assert_close(ours, theirs, dtype, limit=limit)
    (a,) = weights_like([theirs])
    grads = gradients(network.module, (a * ours).sum()), gradients(module, (a * theirs).sum())
    assert_same_gradients(*grads, dtype, limit=limit)
