"""A conversation: what the policy reads, what it answers, and what the reward model says of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

import stages.sample
from rlhf_cli.commands.options import reward_terms
from stages.chat import Chat, ChatOptions, Reply
from stages.config.shared import PromptData
from stages.conversation import Question
from stages.data import store
from stages.data.chat_template import CHATML
from stages.data.records import from_json, to_json
from stages.data.store import LoadSpec
from stages.data.templates import make_codec
from stages.errors import CheckpointError, ConfigError, TrainingError
from stages.runtime.reporter import SilentReporter
from tests.families import POSITIONS, save_tiny
from tests.stages.project import (
    END_ID,
    PROMPTS,
    Listener,
    Project,
    enter,
    ids_of,
    letter_tokenizer,
    make_models,
)
from tests.stages.results import classifier, raw_score

T = 6
TURN_END = letter_tokenizer().convert_tokens_to_ids("<|im_end|>")
ROOM = POSITIONS - T


@pytest.fixture(scope="module", autouse=True)
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """Models that no test changes: two policies in plain text, two that are asked in turns."""
    with pytest.MonkeyPatch.context() as patch:
        found = enter(tmp_path_factory.mktemp("chat"), patch)
        make_models(found)
        found.model("other", dtype=torch.float64, seed=7)
        turns = letter_tokenizer()
        turns.chat_template = CHATML
        for name, seed in (("turns", 2), ("more", 3)):
            save_tiny(found.folder / name, "llama", turns, dtype=torch.float64, seed=seed)
        yield found


def chat(policy: str = "base", listener: Listener | None = None, **changes: Any) -> Chat:
    options = {"max_new_tokens": T, "precision": "fp64", "device": "cpu", **changes}
    if "reward" in options:
        options["reward"] = reward_terms(options["reward"])
    return Chat(ChatOptions(policy, **options), listener or SilentReporter())


def answer(session: Chat, questions: list[Question]) -> Reply:
    """The first policy's answer; the others answer as well."""
    replies = [session.answer(question, lambda _: None) for question in questions]
    return replies[0]


def say(session: Chat, *texts: str) -> list[Reply]:
    return [answer(session, session.ask(text)) for text in texts]


def drawn(reply: Reply) -> list[int]:
    return reply.ids.tolist()


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_answers_are_those_that_sampling_draws_for_the_same_prompts_and_noise() -> None:
    lines: list[str] = []
    wanted = stages.sample.SampleOptions(
        "base", "prompts.jsonl", k=2, max_new_tokens=T, seed=3, precision="fp64"
    )
    stages.sample.run(wanted, SilentReporter(), write=lines.append)
    session = chat(seed=3)
    for record, line in zip(PROMPTS, map(json.loads, lines), strict=True):
        first, second = line["responses"]
        told: list[str] = []
        [question] = session.ask(record["prompt"])
        reply = session.answer(question, told.append)
        assert "".join(told) == reply.response == first["text"]
        assert drawn(reply) == first["ids"]
        assert reply.ended == (first["flags"] == [])
        assert drawn(answer(session, session.ask_again())) == second["ids"]


def test_a_policy_asked_in_turns_reads_what_every_stage_makes_of_the_same_messages() -> None:
    session = chat("turns", system="be kind.")
    first, second = say(session, "ab:", "b:")
    messages = [
        message("system", "be kind."),
        message("user", "ab:"),
        message("assistant", first.response),
        message("user", "b:"),
    ]
    assert to_json(second.prompt) == messages
    [again] = session.ask_again()
    tokenizer = letter_tokenizer()
    by_transformers = tokenizer.apply_chat_template(
        messages, chat_template=CHATML, add_generation_prompt=True, return_dict=True
    )
    assert again.ids.tolist() == by_transformers["input_ids"]
    Path("messages.jsonl").write_text(json.dumps({"prompt": messages}))
    codec = make_codec(tokenizer, chat_template="chatml", as_messages=False)
    spec = LoadSpec(kind="prompts", data=PromptData(train="messages.jsonl"), max_positions=256)
    assert again.ids.tolist() == store.load(spec, codec).train[0].ids.tolist()


def test_a_policy_trained_on_plain_text_reads_each_text_alone_and_says_so() -> None:
    listener = Listener()
    session = chat(listener=listener)
    say(session, "ab:")
    [question] = session.ask("b:")
    assert question.prompt == "b:"
    assert question.ids.tolist() == ids_of("b:")
    assert any("in plain text" in note for note in listener.notes)


@pytest.mark.parametrize(
    ("form", "text"),
    [("text", "b:"), ("messages", "<|im_start|>user\nb:<|im_end|>\n<|im_start|>assistant\n")],
)
def test_a_form_that_is_asked_for_wins_over_the_folder(form: Any, text: str) -> None:
    [question] = chat("turns", form=form).ask("b:")
    assert question.ids.tolist() == ids_of(text)


def test_another_answer_takes_the_place_of_the_last_one() -> None:
    session = chat("turns")
    first, second = say(session, "ab:", "b:")
    replies = [answer(session, session.ask_again()) for _ in range(3)]
    assert len({tuple(drawn(reply)) for reply in [second, *replies]}) > 1
    assert all(reply.prompt == second.prompt for reply in replies)
    [question] = session.ask("d:")
    said = [turn.content for turn in question.prompt]
    assert said == ["ab:", first.response, "b:", replies[-1].response, "d:"]


def test_equal_sessions_repeat_and_a_reset_begins_again() -> None:
    texts = ("ab:", "b:", "cab:")
    session = chat("turns", seed=5)
    first = [drawn(reply) for reply in say(session, *texts)]
    assert [drawn(reply) for reply in say(chat("turns", seed=5), *texts)] == first
    assert [drawn(reply) for reply in say(chat("turns", seed=6), *texts)] != first
    session.reset()
    assert [drawn(reply) for reply in say(session, *texts)] == first


def test_temperature_0_takes_the_most_likely_token_every_time() -> None:
    session = chat(temperature=0.0)
    [reply] = say(session, "ab:")
    assert drawn(answer(session, session.ask_again())) == drawn(reply)


def test_a_second_policy_answers_the_same_turns_with_the_same_noise_and_answers_of_its_own() -> (
    None
):
    session = chat("turns", seed=1)
    say(session, "ab:")
    session.compare("turns")
    twice = [session.answer(question, lambda _: None) for question in session.ask("b:")]
    assert drawn(twice[0]) == drawn(twice[1])
    session.compare("more")
    pair = [session.answer(question, lambda _: None) for question in session.ask("d:")]
    assert [reply.policy for reply in pair] == ["turns", "more"]
    assert pair[0].prompt == pair[1].prompt
    assert drawn(pair[0]) != drawn(pair[1])
    following = session.ask("cab:")
    own = [question.prompt[-2].content for question in following]
    assert own == [reply.response for reply in pair]
    session.compare_no_more()
    assert len(session.ask("cab:")) == 1
    lone = chat("turns", seed=1)
    assert drawn(say(lone, "ab:", "b:", "d:")[-1]) == drawn(pair[0]), "nobody disturbs the first"


def test_a_score_is_that_of_the_reward_model_alone() -> None:
    reward = classifier("reward")
    session = chat(reward="reward")
    session.compare("other")
    for text in ("ab:", "b:", "d:"):
        for question in session.ask(text):
            reply = session.answer(question, lambda _: None)
            expected = raw_score(reward, ids_of(text) + drawn(reply))
            assert reply.score == pytest.approx(expected, rel=1e-6)


def test_a_score_that_is_no_number_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    session = chat(reward="reward")
    nan = torch.tensor([float("nan")])
    monkeypatch.setattr("stages.runtime.rewards.model.scores", lambda *_: nan)
    with pytest.raises(TrainingError, match="1 of its scores are not finite"):
        say(session, "ab:")


def test_the_oldest_turns_are_left_out_when_the_conversation_outgrows_the_model() -> None:
    listener = Listener()
    session = chat("turns", listener, system="be kind.")
    texts = [letter * 50 + ":" for letter in "abcdefg"]
    replies = say(session, *texts)
    asked = [to_json(reply.prompt) for reply in replies]
    assert len(asked[1]) == 4, "two turns fit"
    for n, turns in enumerate(asked):
        assert turns[0] == message("system", "be kind.")
        assert [turn["role"] for turn in turns[1:]] == (
            ["user", "assistant"] * (len(turns) // 2 - 1) + ["user"]
        )
        assert turns[-1] == message("user", texts[n])
    [last] = session.ask_again()
    assert len(last.ids) <= ROOM
    longer = to_json(last.prompt)
    longer[1:1] = [message("user", texts[3]), message("assistant", replies[3].response)]
    count = len(session.conversations[0].speaker.codec.encode_prompt(from_json(longer)).ids)
    assert texts[4] in str(last.prompt) or count > ROOM, "no more is left out than must be"
    assert sum("outgrown" in note for note in listener.notes) == 1


@pytest.mark.parametrize("policy", ["base", "turns"])
def test_a_text_that_does_not_fit_alone_is_refused_and_changes_nothing(policy: str) -> None:
    session = chat(policy)
    say(session, "ab:")
    before = [question.prompt for question in session.ask("b:")]
    with pytest.raises(ConfigError, match="tokens, and 250 fit beside an answer"):
        session.ask("a" * 251)
    assert [question.prompt for question in session.ask("b:")] == before


def test_an_answer_that_is_ended_by_the_person_keeps_what_was_said() -> None:
    session = chat("turns", temperature=0.0)
    text = next(text for text in "abcdefghij" if len(say(session, text)[0].ids) == T)
    session.reset()
    [whole] = say(session, text)
    session.reset()
    pieces: list[str] = []
    [question] = session.ask(text)
    reply = session.answer(question, pieces.append, lambda: len(pieces) == 3)
    assert drawn(reply) == drawn(whole)[:3]
    assert (reply.ended, reply.interrupted, reply.score) == (False, True, None)
    assert session.ask("b:")[0].prompt[1].content == reply.response
    assert drawn(answer(session, session.ask_again())) == drawn(whole)
    pieces.clear()
    [again] = session.ask_again()
    late = session.answer(again, pieces.append, lambda: len(pieces) == T)
    assert (drawn(late), late.interrupted) == (drawn(whole), False), "there is nothing left to end"


def test_an_answer_that_ends_by_itself_is_not_one_that_was_cut() -> None:
    replies = say(chat(), *["ab:"] * 20)
    assert {reply.ended for reply in replies} == {True, False}
    for reply in replies:
        assert reply.ended == (drawn(reply)[-1] == END_ID)
        assert reply.ended or len(reply.ids) == T


@pytest.mark.parametrize(
    ("policy", "changes", "error", "words"),
    [
        ("reward", {}, CheckpointError, "is a reward model, and a policy is needed"),
        ("nowhere", {}, CheckpointError, "no such folder"),
        ("base", {"reward": "other"}, CheckpointError, "has no reward head"),
        ("base", {"reward": "nowhere"}, CheckpointError, "no such folder"),
        ("base", {"system": "be kind."}, ConfigError, "base has no chat template"),
        ("base", {"form": "messages"}, ConfigError, "base has no chat template"),
        ("turns", {"form": "text", "system": "a"}, ConfigError, "has no place for a system text"),
        ("base", {"max_new_tokens": 256}, ConfigError, "leaves no room for a prompt in 256"),
    ],
)
def test_what_cannot_talk_is_refused_in_one_sentence(
    project: Project, policy: str, changes: dict[str, Any], error: type, words: str
) -> None:
    with pytest.raises(error, match=words):
        chat(policy, **changes)


def test_a_second_policy_that_cannot_talk_leaves_the_session_as_it_was(project: Project) -> None:
    session = chat("turns", system="be kind.", reward="reward")
    for other, words in (("base", "no chat template"), ("reward", "is a reward model")):
        with pytest.raises((ConfigError, CheckpointError), match=words):
            session.compare(other)
    assert len(session.ask("ab:")) == 1


def test_a_template_without_a_place_for_a_system_text_is_told(project: Project) -> None:
    tokenizer = letter_tokenizer()
    refusal = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    )
    tokenizer.chat_template = refusal + CHATML
    save_tiny(project.folder / "stern", "llama", tokenizer, dtype=torch.float64)
    session = chat("stern")
    with pytest.raises(ConfigError, match="stern takes no system text") as caught:
        session.set_system("be kind.")
    assert caught.value.where == "/system"
    assert session.ask("ab:")[0].prompt[0].role == "user"


def test_the_default_length_leaves_half_of_a_short_model_for_the_prompt() -> None:
    assert chat(max_new_tokens=None).max_new_tokens == POSITIONS // 2


def test_there_is_no_other_answer_before_the_first() -> None:
    with pytest.raises(ConfigError, match="no answer yet"):
        chat().ask_again()


def test_a_reward_model_of_other_tokens_reads_the_text(project: Project) -> None:
    save_tiny(project.folder / "bytes", "llama", kind="reward", dtype=torch.float64)
    model, tokenizer = classifier("bytes"), AutoTokenizer.from_pretrained("bytes")
    session = chat("base", reward="bytes")
    for text in ("ab:", "b:"):
        [reply] = say(session, text)
        ids = tokenizer(text + reply.response, add_special_tokens=False).input_ids
        end = [tokenizer.eos_token_id] if reply.ended else []
        assert reply.score == pytest.approx(raw_score(model, ids + end), rel=1e-6)


def test_turns_are_read_by_the_template_of_the_reward_model_or_of_the_policy(
    project: Project,
) -> None:
    plain = letter_tokenizer()
    plain.chat_template = "{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}"
    save_tiny(project.folder / "own", "llama", plain, kind="reward", dtype=torch.float64)
    codec = chat("turns").conversations[0].speaker.codec
    for reward, asked in (("reward", None), ("own", [*ids_of("ab:"), TURN_END])):
        [reply] = say(chat("turns", reward=reward), "ab:")
        prompt = codec.encode_prompt(reply.prompt).ids.tolist() if asked is None else asked
        expected = raw_score(classifier(reward), prompt + drawn(reply))
        assert reply.score == pytest.approx(expected, rel=1e-6)
    with pytest.raises(ConfigError, match="tokenizer of bytes has no chat template"):
        chat("turns", reward="bytes")


def test_the_terms_of_a_file_score_an_answer(project: Project) -> None:
    Path("mine.py").write_text(
        "def score(prompts, answers, records):\n"
        "    assert records == [{'prompt': prompt} for prompt in prompts]\n"
        "    return [None if p == 'b:' else len(a) for p, a in zip(prompts, answers)]\n"
    )
    Path("terms.yaml").write_text("- {type: python, path: mine.py, weight: 2}")
    session = chat("base", reward="terms.yaml")
    asked, unjudged = say(session, "ab:", "b:")
    assert asked.score == 2 * len(asked.response)
    assert unjudged.score is None
