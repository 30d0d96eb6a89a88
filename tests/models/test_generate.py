"""Sampling: the tokens that the distribution and the answer's own numbers say, and no others."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from stages.models import generate as generation
from stages.models.generate import Answer, Sampling, generate, noise, pick
from stages.models.network import Network
from tests.families import FAMILIES, network_of, tiny_policy
from tests.models.alone import other_config, tokens, twin

ALL = (*FAMILIES, "falcon", "bloom", "gemma2", "cohere")
LENGTHS = (5, 1, 9, 5, 3, 14, 2)
T = 12

each_family = pytest.mark.parametrize("family", ALL)


def network(family: str) -> Network:
    if family in FAMILIES:
        return tiny_policy(family)
    return network_of(other_config(family), "policy")


def native(network: Network) -> Network:
    """The same weights, decoded by transformers with the family's own attention."""
    return Network(twin(network), "policy", "padded", cached=False)


def prompts(lengths=LENGTHS, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [tokens(rng, n) for n in lengths]


def uniforms(rows: int, seed: int = 0, length: int = T) -> torch.Tensor:
    return noise(seed, [(row, 0) for row in range(rows)], length)


def sampling(**changes) -> Sampling:
    """About a third of the vocabulary ends an answer, so that most end on their way."""
    return Sampling(**{"max_new_tokens": T, "stop_ids": (1, 4, 9, 16, 25, 36), **changes})


def plainly(network: Network, prompt, row, drawn: Sampling) -> Answer:
    """One answer by the definition: a whole forward pass and a sum of probabilities a token."""
    module, ids = twin(network), list(prompt)
    for uniform in row.tolist():
        logits = module(input_ids=torch.tensor([ids])).logits[0, -1].detach().numpy()
        weights = np.exp((logits - logits.max()) / drawn.temperature)
        cumulative = np.cumsum(weights / weights.sum())
        ids.append(int(np.argmax(cumulative > uniform)))
        if ids[-1] in drawn.stop_ids:
            break
    return Answer(np.array(ids[len(prompt) :]), ids[-1] in drawn.stop_ids)


def assert_same(got: list[Answer], expected: list[Answer]) -> None:
    assert len(got) == len(expected)
    for mine, other in zip(got, expected, strict=True):
        assert mine.ids.tolist() == other.ids.tolist()
        assert mine.ended == other.ended


@each_family
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_answers_are_those_of_one_forward_pass_a_token(family, temperature):
    policy, drawn = network(family), sampling(temperature=temperature)
    texts, rows = prompts(), uniforms(len(LENGTHS))
    expected = [plainly(policy, p, row, drawn) for p, row in zip(texts, rows, strict=True)]
    assert_same(generate(policy, texts, rows, drawn), expected)
    assert {answer.ended for answer in expected} == {True, False}


@each_family
def test_answers_are_those_of_transformers_own_loop(family):
    policy, drawn = network(family), sampling(top_p=0.9, top_k=30, temperature=0.8)
    texts, rows = prompts(), uniforms(len(LENGTHS), seed=1)
    expected = generate(native(policy), texts, rows, drawn)
    assert_same(generate(policy, texts, rows, drawn), expected)


@each_family
def test_temperature_zero_is_the_greedy_search_of_transformers(family):
    policy, texts = network(family), prompts()
    got = generate(policy, texts, uniforms(len(texts)), sampling(temperature=0.0))
    near = generate(policy, texts, uniforms(len(texts)), sampling(temperature=1e-5))
    module = twin(policy)
    for prompt, answer in zip(texts, got, strict=True):
        ids = torch.from_numpy(prompt)[None]
        out = module.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False,
            max_new_tokens=T, eos_token_id=list(sampling().stop_ids), pad_token_id=0,
        )  # fmt: skip
        assert answer.ids.tolist() == out[0, len(prompt) :].tolist()
    assert_same(near, got)


@each_family
def test_an_answer_does_not_depend_on_neighbours_order_or_chunks(family, monkeypatch):
    policy, drawn = network(family), sampling()
    texts, rows = prompts(), uniforms(len(LENGTHS))
    together = generate(policy, texts, rows, drawn)
    alone = [generate(policy, [p], rows[n : n + 1], drawn)[0] for n, p in enumerate(texts)]
    assert_same(alone, together)
    assert_same(generate(policy, texts[::-1], rows.flip(0), drawn)[::-1], together)
    monkeypatch.setattr(generation, "CACHE_TOKENS", 40)
    assert_same(generate(policy, texts, rows, drawn), together)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("share", [0.0, 0.5, 1.01])
def test_an_answer_does_not_depend_on_when_ended_rows_leave(family, share, monkeypatch):
    policy, texts, rows = network(family), prompts(), uniforms(len(LENGTHS))
    usual = generate(policy, texts, rows, sampling())
    monkeypatch.setattr(generation, "COMPACT_AT", share)
    assert_same(generate(policy, texts, rows, sampling()), usual)


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_longer_than_the_first_buffer_go_on_as_they_would_alone(family):
    policy, length = network(family), 80
    drawn = sampling(max_new_tokens=length, stop_ids=(97,))  # a token that is never drawn
    texts, rows = prompts((3, 7)), uniforms(2, length=length)
    got = generate(policy, texts, rows, drawn)
    assert {len(answer.ids) for answer in got} == {length}
    assert_same(got, generate(native(policy), texts, rows, drawn))


def test_samples_of_one_prompt_share_its_prefill(monkeypatch):
    policy, seen = network("llama"), []
    run_row = generation.run_row

    def counting(network, row, plan):
        seen.append(len(row.ids))
        return run_row(network, row, plan)

    monkeypatch.setattr(generation, "run_row", counting)
    a, b = prompts((6, 9))
    rows = uniforms(7)
    got = generate(policy, [a, a, b, a, b, a, a], rows, sampling())
    assert seen == [15]
    expected = [generate(policy, [p], rows[n : n + 1], sampling())[0]
                for n, p in enumerate([a, a, b, a, b, a, a])]  # fmt: skip
    assert_same(got, expected)
    assert len({tuple(answer.ids) for answer in got}) > 2


@pytest.mark.parametrize("family", ["llama", "gpt2", "falcon", "bloom"])
def test_stop_tokens_in_the_prompt_end_nothing(family):
    policy, drawn = network(family), sampling(stop_ids=(1,))
    texts = [np.array([1, 1, 1, 1]), np.array([5, 1]), np.array([1])]
    rows = uniforms(3)
    expected = [plainly(policy, p, row, drawn) for p, row in zip(texts, rows, strict=True)]
    got = generate(policy, texts, rows, drawn)
    assert_same(got, expected)
    assert max(len(answer.ids) for answer in got) > 1


@pytest.mark.parametrize("family", ["llama", "gpt2", "falcon", "bloom"])
def test_an_immediate_stop_is_an_answer_of_the_stop_token_alone(family):
    policy = network(family)
    everything = sampling(stop_ids=tuple(range(97)))
    for answer in generate(policy, prompts(), uniforms(len(LENGTHS)), everything):
        assert len(answer.ids) == 1
        assert answer.ended


@pytest.mark.parametrize("family", ["llama", "bloom"])
def test_an_answer_cut_at_the_limit_has_not_ended_and_one_that_stops_there_has(family):
    policy, texts, rows = network(family), prompts(), uniforms(len(LENGTHS))
    whole = generate(policy, texts, rows, sampling())
    for row, answer in enumerate(whole):
        n = len(answer.ids)
        exact = generate(policy, texts[row : row + 1], rows[row : row + 1, :n],
                         sampling(max_new_tokens=n))[0]  # fmt: skip
        assert exact.ids.tolist() == answer.ids.tolist()
        assert exact.ended == (answer.ids[-1] in sampling().stop_ids)


@pytest.mark.parametrize("family", ["gpt2", "falcon", "bloom"])
@pytest.mark.parametrize("training", [True, False])
def test_sampling_restores_the_mode_and_leaves_the_random_state_untouched(family, training):
    policy = network(family)
    policy.module.train(training)
    before = torch.random.get_rng_state()
    generate(policy, prompts(), uniforms(len(LENGTHS)), sampling())
    assert policy.module.training is training
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(p.grad is None and p.requires_grad for _, p in policy.parameters())


@pytest.mark.parametrize("cached", [True, False])
def test_dropout_does_not_reach_answers_of_a_network_in_training(cached):
    still, lively = tiny_policy("gpt2"), tiny_policy("gpt2", dropout=0.1)
    if not cached:
        still, lively = native(still), native(lively)
    lively.module.train()
    texts, rows = prompts(), uniforms(len(LENGTHS))
    assert_same(generate(lively, texts, rows, sampling()), generate(still, texts, rows, sampling()))


def test_an_error_while_sampling_restores_the_mode(monkeypatch):
    policy = network("llama")
    policy.module.train()

    def broken(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(generation, "run_row", broken)
    with pytest.raises(RuntimeError):
        generate(policy, prompts(), uniforms(len(LENGTHS)), sampling())
    assert policy.module.training


@pytest.mark.parametrize("family", ["llama", "falcon", "bloom"])
def test_generation_settings_of_the_base_model_do_not_alter_answers(family):
    policy, texts, rows = network(family), prompts(), uniforms(len(LENGTHS))
    expected = generate(policy, texts, rows, sampling())
    settings = policy.module.generation_config
    settings.repetition_penalty, settings.no_repeat_ngram_size = 5.0, 1
    settings.temperature, settings.do_sample, settings.top_k = 0.1, True, 2
    settings.min_new_tokens, settings.suppress_tokens = 6, list(range(40))
    settings.num_beams = 3
    assert_same(generate(policy, texts, rows, sampling()), expected)


@each_family
def test_an_answer_that_is_listened_to_is_the_answer(family):
    policy, texts, rows = network(family), prompts(), uniforms(len(LENGTHS))
    for n, expected in enumerate(generate(policy, texts, rows, sampling())):
        for listened in (policy, native(policy)):
            heard: list[int] = []
            answer = generate(
                listened, texts[n : n + 1], rows[n : n + 1], sampling(), hear=heard.append
            )
            assert_same(answer, [expected])
            assert heard == expected.ids.tolist()


@pytest.mark.parametrize("cached", [True, False])
def test_a_listener_can_end_the_answer_and_the_mode_is_restored(cached):
    policy = network("llama") if cached else native(network("llama"))
    policy.module.train()
    heard: list[int] = []

    def hear(token: int) -> None:
        heard.append(token)
        if len(heard) == 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        generate(policy, prompts((3,)), uniforms(1), sampling(stop_ids=(97,)), hear=hear)
    assert len(heard) == 2
    assert policy.module.training


def test_several_answers_cannot_be_listened_to_at_once():
    with pytest.raises(AssertionError, match="one answer at a time"):
        generate(network("llama"), prompts((3, 4)), uniforms(2), sampling(), hear=print)


def test_no_prompts_give_no_answers():
    assert generate(network("llama"), [], torch.zeros(0, T), sampling()) == []


@pytest.mark.parametrize("family", ["llama", "falcon"])
def test_a_prompt_without_a_token_gives_no_silent_answer(family):
    empty = np.array([], dtype=np.int64)
    with pytest.raises(AssertionError, match="no token"):
        generate(network(family), [*prompts((3,)), empty], uniforms(2), sampling())


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> tuple[float, int]:
    """The statistic and its degrees of freedom, rare tokens taken together."""
    expected = probabilities * counts.sum()
    rare = expected < 5
    seen = np.append(counts[~rare], counts[rare].sum())
    meant = np.append(expected[~rare], expected[rare].sum())
    keep = meant > 0
    return float((((seen - meant) ** 2)[keep] / meant[keep]).sum()), int(keep.sum()) - 1


@pytest.mark.parametrize(
    ("temperature", "compute"), [(1.0, None), (2.0, None), (0.5, None), (1.0, torch.bfloat16)]
)
def test_sampled_tokens_follow_the_softmax_at_the_temperature(temperature, compute):
    policy, (prompt,) = network("llama"), prompts((6,))
    if compute is not None:
        policy = tiny_policy("llama", dtype=torch.float32)
        policy.compute = compute
    count = 5000
    rows = noise(11, [(0, k) for k in range(count)], 1)
    drawn = sampling(max_new_tokens=1, temperature=temperature)
    first = [int(a.ids[0]) for a in generate(policy, [prompt] * count, rows, drawn)]
    logits = twin(policy)(input_ids=torch.from_numpy(prompt)[None]).logits[0, -1]
    probabilities = (logits.detach() / temperature).softmax(0).numpy()
    statistic, freedom = chi_square(np.bincount(first, minlength=97), probabilities)
    assert freedom > 10
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)


LOGITS = torch.tensor([[0.15, 0.5, 0.05, 0.3]], dtype=torch.float64).log()
GRID = torch.arange(2000, dtype=torch.float64) / 2000


def shares(drawn: Sampling) -> list[float]:
    """The share of each token when the uniform number runs over [0, 1)."""
    picked = pick(LOGITS.expand(len(GRID), 4), GRID, drawn)
    return [float((picked == token).double().mean()) for token in range(4)]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [0.15, 0.5, 0.05, 0.3]),
        ({"top_k": 1}, [0, 1, 0, 0]),
        ({"top_k": 2}, [0, 0.625, 0, 0.375]),
        ({"top_k": 3}, [0.15 / 0.95, 0.5 / 0.95, 0, 0.3 / 0.95]),
        ({"top_k": 4}, [0.15, 0.5, 0.05, 0.3]),
        ({"top_k": 99}, [0.15, 0.5, 0.05, 0.3]),
        ({"top_p": 0.4}, [0, 1, 0, 0]),
        ({"top_p": 0.7}, [0, 0.625, 0, 0.375]),
        ({"top_p": 0.81}, [0.15 / 0.95, 0.5 / 0.95, 0, 0.3 / 0.95]),
        ({"top_p": 1e-9}, [0, 1, 0, 0]),
        ({"top_p": 0.8, "top_k": 3}, [0, 0.625, 0, 0.375]),
        ({"temperature": 0.5}, [0.0616, 0.6849, 0.0068, 0.2466]),
        ({"temperature": 0.0}, [0, 1, 0, 0]),
    ],
    ids=str,
)
def test_top_k_and_top_p_cut_the_distribution_as_their_papers_say(changes, expected):
    """Fan et al. 2018 and Holtzman et al. 2020: the kept tokens share all probability."""
    assert shares(sampling(**changes)) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("changes", [{}, {"top_k": 2}, {"top_p": 0.7}], ids=str)
def test_a_token_of_probability_zero_is_never_drawn(changes):
    scores = torch.tensor([[-math.inf, 1.0, 0.5, 0.0, -math.inf]], dtype=torch.float64)
    for uniform in (0.0, 1.0 - 2**-53):
        token = pick(scores, torch.tensor([uniform], dtype=torch.float64), sampling(**changes))
        assert int(token) in (1, 2, 3)


def test_a_sharp_distribution_and_a_huge_logit_do_not_overflow():
    scores = torch.tensor([[1e30, 0.0, -1e30], [3e38, 3e38, 0.0]])
    got = pick(scores, torch.tensor([0.7, 0.7], dtype=torch.float64), sampling())
    assert got.tolist() == [0, 1]


def test_noise_depends_on_its_name_alone():
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first = noise(3, [(0, 0), (7, 2), (7, 1)], 40)
    torch.manual_seed(6)
    again = noise(3, [(7, 1), (0, 0)], 40)
    assert torch.equal(first[2], again[0])
    assert torch.equal(first[0], again[1])
    torch.manual_seed(5)
    assert torch.equal(torch.random.get_rng_state(), before)
    rows = noise(3, [(p, s) for p in range(20) for s in range(5)], 8)
    assert len({tuple(row.tolist()) for row in rows}) == 100
    assert not torch.equal(noise(4, [(0, 0)], 40)[0], first[0])


def test_noise_is_uniform_on_zero_to_one():
    numbers = noise(0, [(p, 0) for p in range(200)], 100).flatten()
    assert numbers.dtype == torch.float64
    assert float(numbers.min()) >= 0.0
    assert float(numbers.max()) < 1.0
    counts = torch.histc(numbers, 20, 0.0, 1.0).numpy()
    statistic, freedom = chi_square(counts, np.full(20, 0.05))
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)
