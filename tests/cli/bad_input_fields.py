"""A value of the wrong type in every field of every data format, as lines of bad input.

Each case is a file of two records: a good one, and one that is spoilt in a single field.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.cli.bad_input import Bad, lines

GONE = object()
STRING, LIST, OBJECT = "must be a string, not", "must be a list, not", "must be an object, not"
NUMBER = "must be a number or null, not"


class Spoilt(NamedTuple):
    """A field, the value that it gets, and what is said of it.

    ``where`` is the place after ``file:line:`` where it is not the field itself.
    """

    field: str
    value: object
    what: str
    where: str = ""


class Kind(NamedTuple):
    """A format, the command line that reads it, a good record, and what is spoilt in it."""

    format: str
    argv: str
    good: dict[str, Any]
    spoilt: list[Spoilt]


SFT, RM, PPO = "sft sft.yaml", "train-rm rm.yaml", "ppo ppo.yaml"
CHAT = " data.chat_template=chatml"
TURNS = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]
OTHER_TURNS = [TURNS[0], {"role": "assistant", "content": "e"}]

KINDS = [
    Kind(
        "canonical",
        SFT,
        {"prompt": "ab:", "response": "cd", "flags": ["cut"]},
        [
            Spoilt("response", None, f"{STRING} null"),
            Spoilt("response", ["cd"], f"{STRING} a list"),
            Spoilt("response", True, f"{STRING} true"),
            Spoilt("prompt", 7, f"{LIST} a number"),
            Spoilt("prompt", {"text": "ab"}, f"{LIST} an object"),
            Spoilt("prompt", [], "no messages"),
            Spoilt("prompt", None, f"{LIST} null"),
            Spoilt("prompt", GONE, "the field is missing"),
            Spoilt("flags", 3, f"{LIST} a number"),
            Spoilt("flags[0]", 1, f"{STRING} a number"),
        ],
    ),
    Kind(
        "canonical",
        RM,
        {
            "prompt": "ab:",
            "responses": [
                {"text": "cd", "rank": 1},
                {"text": "e", "rank": 2, "ids": [4], "flags": ["cut"]},
            ],
        },
        [
            Spoilt("responses", {"a": 1}, f"{LIST} an object"),
            Spoilt("responses", "cd", f"{LIST} a string"),
            Spoilt("responses[1]", 5, f"{OBJECT} a number"),
            Spoilt("responses[1].text", None, f"{STRING} null"),
            Spoilt("responses[1].text", GONE, "the field is missing"),
            Spoilt("responses[1].rank", "2", f"{NUMBER} a string"),
            Spoilt("responses[1].rank", True, f"{NUMBER} true"),
            Spoilt("responses[1].rank", 0, "must be a whole number from 1 = best, not 0"),
            Spoilt("responses[1].rank", 1.5, "must be a whole number from 1 = best, not 1.5"),
            Spoilt("responses[1].rank", 10**20, "must be 2147483647 at most, not 1000"),
            Spoilt("responses[1].score", "high", f"{NUMBER} a string"),
            Spoilt("responses[1].score", [1], f"{NUMBER} a list"),
            Spoilt("responses[1].ids", 4, f"{LIST} a number"),
            Spoilt("responses[1].ids[0]", 1.5, "must be a token id, not 1.5"),
            Spoilt("responses[1].ids[0]", -1, "must be a token id, not -1"),
            Spoilt("responses[1].ids[0]", True, "must be a token id, not True"),
            Spoilt("responses[1].vocabulary", 5, f"{STRING} a number"),
            Spoilt("responses[1].flags", "cut", f"{LIST} a string"),
            Spoilt("responses[1].flags[0]", None, f"{STRING} null"),
            Spoilt("margin", "wide", f"{NUMBER} a string"),
            Spoilt("source", 5, f"{STRING} a number"),
        ],
    ),
    Kind(
        "prompts",
        PPO,
        {"prompt": "ab:"},
        [
            Spoilt("prompt", 5, f"{LIST} a number"),
            Spoilt("prompt", None, f"{LIST} null"),
            Spoilt("prompt", [5], f"{OBJECT} a number", "prompt[0]"),
        ],
    ),
    Kind(
        "text",
        SFT,
        {"text": "abc"},
        [
            Spoilt("text", 5, f"{STRING} a number"),
            Spoilt("text", GONE, "the field is missing"),
        ],
    ),
    Kind(
        "messages",
        SFT + CHAT,
        {"messages": TURNS},
        [
            Spoilt("messages", "hello", f"{LIST} a string"),
            Spoilt("messages", [], "no messages"),
            Spoilt("messages[0]", 1, f"{OBJECT} a number"),
            Spoilt("messages[0].role", None, f"{STRING} null"),
            Spoilt("messages[0].role", "wizard", "unknown role 'wizard'"),
            Spoilt("messages[0].role", "tool", "tool calls and their results"),
            Spoilt("messages[0].content", 7, f"{STRING} a number"),
            Spoilt("messages[0].content", [5], f"{OBJECT} a number", "messages[0].content[0]"),
            Spoilt(
                "messages[0].content",
                [{"type": "image"}],
                "only text can be read, not 'image'",
                "messages[0].content[0].type",
            ),
            Spoilt("messages[1].tool_calls", [{"id": 1}], "tool calls and their results"),
        ],
    ),
    Kind(
        "sharegpt",
        SFT + CHAT,
        {
            "conversations": [{"from": "human", "value": "ab"}, {"from": "gpt", "value": "cd"}],
            "system": "c",
        },
        [
            Spoilt("conversations", 5, f"{LIST} a number"),
            Spoilt("conversations[1].from", 5, f"{STRING} a number"),
            Spoilt("conversations[1].value", 5, f"{STRING} a number"),
            Spoilt("system", 5, f"{STRING} a number"),
        ],
    ),
    Kind(
        "prompt_completion",
        SFT,
        {"prompt": "ab:", "completion": "cd"},
        [
            Spoilt("completion", 5, "must be messages where the completion is", "prompt"),
            Spoilt("completion", GONE, "the field is missing"),
            Spoilt("prompt", 5, f"{LIST} a number"),
        ],
    ),
    Kind(
        "alpaca",
        SFT,
        {"instruction": "ab", "input": "c", "output": "cd"},
        [
            Spoilt("instruction", 5, f"{STRING} a number"),
            Spoilt("input", [5], f"{STRING} a list"),
            Spoilt("output", {}, f"{STRING} an object"),
        ],
    ),
    Kind(
        "dolly",
        SFT,
        {"instruction": "ab", "context": "c", "response": "cd"},
        [
            Spoilt("instruction", None, f"{STRING} null"),
            Spoilt("context", 5, f"{STRING} a number"),
            Spoilt("response", 5, f"{STRING} a number"),
        ],
    ),
    Kind(
        "nectar",
        RM,
        {"prompt": "ab:", "answers": [{"answer": "cd", "rank": 1.0}, {"answer": "e", "rank": 2.0}]},
        [
            Spoilt("prompt", 5, f"{STRING} a number"),
            Spoilt("answers", 5, f"{LIST} a number"),
            Spoilt("answers[0]", 5, f"{OBJECT} a number"),
            Spoilt("answers[0].answer", None, f"{STRING} null"),
            Spoilt("answers[1].rank", "second", f"{NUMBER} a string"),
            Spoilt("answers[1].rank", 0.0, "must be a whole number from 1 = best"),
        ],
    ),
    Kind(
        "ultrafeedback",
        RM,
        {
            "instruction": "ab:",
            "completions": [
                {"response": "cd", "overall_score": 4},
                {"response": "e", "overall_score": 2},
            ],
        },
        [
            Spoilt("instruction", 5, f"{LIST} a number"),
            Spoilt("completions", 5, f"{LIST} a number"),
            Spoilt("completions[0]", 5, f"{OBJECT} a number"),
            Spoilt("completions[0].response", 5, f"{STRING} a number"),
        ],
    ),
    Kind(
        "distilabel",
        RM,
        {"instruction": "ab:", "generations": ["cd", "e"], "ratings": [4, 2]},
        [
            Spoilt("instruction", 5, f"{LIST} a number"),
            Spoilt("generations", 5, f"{LIST} a number"),
            Spoilt("generations[0]", 5, f"{STRING} a number"),
            Spoilt("ratings", 5, f"{LIST} a number"),
            Spoilt("ratings", [1], "1 ratings for 2 generations"),
        ],
    ),
    Kind(
        "summarize_from_feedback",
        RM,
        {"info": {"post": "ab"}, "summaries": [{"text": "cd"}, {"text": "e"}], "choice": 0},
        [
            Spoilt("info", 5, f"{OBJECT} a number"),
            Spoilt("info.post", 5, f"{STRING} a number"),
            Spoilt("summaries", 5, f"{LIST} a number"),
            Spoilt("summaries[0]", 5, f"{OBJECT} a number"),
            Spoilt("summaries[0].text", 5, f"{STRING} a number"),
            Spoilt("summaries", [{"text": "cd"}], "must be two summaries, not 1"),
            Spoilt("choice", 2, "must be 0 or 1, not 2"),
            Spoilt("choice", True, "must be 0 or 1, not True"),
            Spoilt("choice", "0", "must be 0 or 1, not '0'"),
        ],
    ),
    Kind(
        "arena",
        RM + CHAT,
        {"conversation_a": TURNS, "conversation_b": OTHER_TURNS, "winner": "model_a"},
        [
            Spoilt("conversation_a", 5, f"{LIST} a number"),
            Spoilt("conversation_b[1].content", 5, f"{STRING} a number"),
            Spoilt("winner", 5, f"{STRING} a number"),
            Spoilt("winner", "nobody", "must be model_a, model_b or a tie, not 'nobody'"),
        ],
    ),
    Kind(
        "shp",
        RM,
        {
            "history": "ab:",
            "human_ref_A": "cd",
            "human_ref_B": "e",
            "labels": 1,
            "score_A": 5,
            "score_B": 2,
        },
        [
            Spoilt("history", 5, f"{STRING} a number"),
            Spoilt("human_ref_A", 5, f"{STRING} a number"),
            Spoilt("human_ref_B", None, f"{STRING} null"),
            Spoilt("labels", 2, "must be 0 or 1, not 2"),
            Spoilt("score_A", "many", f"{NUMBER} a string"),
        ],
    ),
    Kind(
        "webgpt",
        RM,
        {"question": "ab:", "answer_0": "cd", "answer_1": "e", "score_0": 1, "score_1": -1},
        [
            Spoilt("question", 5, f"{STRING} a number"),
            Spoilt("answer_1", 5, f"{STRING} a number"),
            Spoilt("score_0", "x", f"{NUMBER} a string"),
        ],
    ),
    Kind(
        "hh",
        RM,
        {
            "chosen": "\n\nHuman: ab\n\nAssistant: cd",
            "rejected": "\n\nHuman: ab\n\nAssistant: e",
        },
        [
            Spoilt("chosen", 5, f"{STRING} a number"),
            Spoilt("rejected", "nobody speaks", 'no "Assistant:" turn in the dialogue'),
        ],
    ),
    Kind(
        "pairs",
        RM,
        {"prompt": "ab:", "chosen": "cd", "rejected": "e"},
        [
            Spoilt("chosen", 5, f"{LIST} a number"),
            Spoilt("rejected", 5, f"{LIST} a string", "chosen"),
            Spoilt("prompt", 5, f"{LIST} a number"),
            Spoilt("margin", "x", f"{NUMBER} a string"),
            Spoilt("score_chosen", "x", f"{NUMBER} a string"),
        ],
    ),
    Kind(
        "oasst",
        RM + CHAT,
        {
            "prompt": {
                "role": "prompter",
                "text": "ab",
                "replies": [
                    {"role": "assistant", "text": "cd", "rank": 0},
                    {"role": "assistant", "text": "e", "rank": 1},
                ],
            }
        },
        [
            Spoilt("prompt", 5, f"{OBJECT} a number"),
            Spoilt("prompt.text", 5, f"{STRING} a number"),
            Spoilt("prompt.role", "user", "unknown role 'user'"),
            Spoilt("prompt.replies", 5, f"{LIST} a number"),
            Spoilt("prompt.replies[1].text", None, f"{STRING} null"),
            Spoilt("prompt.replies[1].rank", "x", f"{NUMBER} a string"),
            Spoilt("prompt.replies[1].rank", -1, "must be a whole number from 0 = best, not -1"),
        ],
    ),
    Kind(
        "oasst_flat",
        RM + CHAT,
        {"message_id": "m", "parent_id": None, "text": "ab", "role": "prompter"},
        [
            Spoilt("message_id", 5, f"{STRING} a number"),
            Spoilt("parent_id", 5, f"{STRING} a number"),
        ],
    ),
]


def spoil(record: dict[str, Any], field: str, value: object) -> dict[str, Any]:
    """A copy of a record with another value in a field such as ``answers[0].rank``."""
    found = copy.deepcopy(record)
    *path, last = field.replace("[", ".[").split(".")
    inner: Any = found
    for name in path:
        inner = inner[_key(name)]
    if value is GONE:
        del inner[_key(last)]
    else:
        inner[_key(last)] = value
    return found


def _key(name: str) -> str | int:
    return int(name.strip("[]")) if name.startswith("[") else name


def cases() -> Iterator[Bad]:
    """A case for every spoilt field."""
    for kind in KINDS:
        for field, value, what, where in kind.spoilt:
            shown = "left out" if value is GONE else repr(value)
            stage = kind.argv.split()[0]
            yield Bad(
                f"{kind.format} of {stage}: {field} is {shown}",
                f"{kind.argv} data.train=spoilt.jsonl data.format={kind.format}",
                3,
                f"spoilt.jsonl:2:{where or field}",
                (what,),
                "",
                lines("spoilt.jsonl", kind.good, spoil(kind.good, field, value)),
                as_check=False,
            )


FIELDS = list(cases())
