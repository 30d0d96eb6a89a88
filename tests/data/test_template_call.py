"""The prompt builder beside transformers' own template call, whose result is a mapping."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from stages.data.chat_template import CHATML
from stages.data.encode import encode_demonstration
from stages.data.fit import Limits
from stages.data.records import Demonstration, Message, Response, to_json

PROMPTS = [
    (Message("user", "hello"),),
    (Message("system", "be kind"), Message("user", "name three colors")),
]


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_a_prompt_has_the_ids_of_the_template_call_and_its_mask_their_number(
    tokenizer, chat, prompt
):
    called = tokenizer.apply_chat_template(
        to_json(prompt), chat_template=CHATML, add_generation_prompt=True, tokenize=True
    )
    assert isinstance(called, Mapping)
    ids = list(called["input_ids"])
    assert isinstance(chat.render(prompt), str)
    assert list(chat.encode_prompt(prompt).ids) == ids
    record = Demonstration(prompt, Response("rainbow"), "f.jsonl:1")
    example = encode_demonstration(record, chat, Limits())
    assert example.targets[0] == len(ids)
    assert len(example.ids) - len(example.targets) == len(ids)
