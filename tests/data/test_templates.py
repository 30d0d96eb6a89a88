"""The prompt builder: seams, end tokens, begin tokens, earlier answers, hashes."""

from __future__ import annotations

import numpy as np
import pytest

from stages.data.records import Message
from stages.data.templates import make_codec
from stages.errors import CheckpointError, ConfigError
from tests.data.conftest import build_tokenizer

END, BOS, IM_START, IM_END = range(4)
DIALOGUE = (
    Message("system", "be kind"),
    Message("user", "hello"),
    Message("assistant", "the cat"),
    Message("user", "colors"),
)
TRIMMED = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def ids_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_prompt_and_answer_are_tokenised_apart_where_the_tokenizer_would_merge(tokenizer, plain):
    merged = ids_of(tokenizer, "he")
    assert len(merged) == 1
    apart = [*plain.encode_prompt("h").ids, *plain.encode_response("e")]
    assert apart == [*ids_of(tokenizer, "h"), *ids_of(tokenizer, "e"), END]


def test_a_string_prompt_goes_in_as_it_is(tokenizer, plain):
    assert list(plain.encode_prompt(" hello\n").ids) == ids_of(tokenizer, " hello\n")
    assert plain.render(" hello\n") == " hello\n"


def test_the_begin_token_stands_once_before_a_string_prompt_and_no_end_token_after_it():
    codec = make_codec(build_tokenizer(bos=True), chat_template=None, as_messages=False)
    for prompt in ("hello", "<s>hello", ""):
        ids = list(codec.encode_prompt(prompt).ids)
        assert ids[0] == BOS
        assert ids.count(BOS) == 1
        assert END not in ids


def test_the_begin_token_of_a_template_is_not_doubled():
    tokenizer = build_tokenizer(bos=True)
    tokenizer.chat_template = "{{ bos_token }}" + TRIMMED
    codec = make_codec(tokenizer, chat_template=None, as_messages=True)
    assert list(codec.encode_prompt("hello").ids).count(BOS) == 1


def test_a_tokenizer_that_also_ends_texts_adds_no_end_token_to_a_prompt():
    from tokenizers import processors

    tokenizer = build_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A <|end|>", special_tokens=[("<s>", BOS), ("<|end|>", END)]
    )
    codec = make_codec(tokenizer, chat_template=None, as_messages=False)
    assert codec.prefix == (BOS,)
    assert END not in codec.encode_prompt("hello").ids


@pytest.mark.parametrize("text", ["cat", "cat<|end|>", "cat<|end|><|end|>", ""])
def test_an_answer_has_exactly_one_end_token(plain, text):
    ids = list(plain.encode_response(text))
    assert ids.count(END) == 1
    assert ids[-1] == END


def test_a_cut_answer_has_no_end_token(plain):
    assert END not in plain.encode_response("cat", cut=True)


def test_the_end_token_of_a_templated_prompt_is_the_template_s_end_of_turn(chat):
    assert chat.end_id == IM_END
    assert chat.eos_id == END
    assert chat.stop_ids == (IM_END, END)
    assert chat.end_of("a string") == END
    assert chat.end_of((Message("user", "a turn"),)) == IM_END


def test_extra_stop_tokens_are_added_once(tokenizer):
    codec = make_codec(tokenizer, chat_template=None, as_messages=False, extra_stop_ids=(7, END, 7))
    assert codec.stop_ids == (END, 7)


def test_chatml_on_a_vocabulary_without_its_tokens_ends_turns_with_the_end_token():
    codec = make_codec(build_tokenizer(chat=False), chat_template="chatml", as_messages=True)
    assert codec.end_id == codec.eos_id == END
    assert codec.render("hello").startswith("<|im_start|>user\nhello<|end|>")


def test_chatml_reads_as_published(chat):
    expected = (
        "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
        "<|im_start|>assistant\nthe cat<|im_end|>\n<|im_start|>user\ncolors<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert chat.render(DIALOGUE) == expected
    assert chat.decode(chat.encode_prompt(DIALOGUE).ids, special=True) == expected


def test_a_string_becomes_one_user_turn_with_as_messages(tokenizer):
    codec = make_codec(tokenizer, chat_template="chatml", as_messages=True)
    turn = codec.encode_prompt((Message("user", "hello"),))
    assert list(codec.encode_prompt("hello").ids) == list(turn.ids)


def test_a_conversation_starts_with_the_ids_of_its_shorter_self_and_its_answer(chat):
    before = chat.encode_prompt(DIALOGUE[:2]).ids
    answer = chat.encode_response("the cat")
    longer = chat.encode_prompt(DIALOGUE)
    joined = np.concatenate([before, answer])
    assert list(longer.ids[: len(joined)]) == list(joined)
    assert longer.spans == ((len(before), len(joined)),)


def test_earlier_answers_are_tokenised_apart_even_where_they_would_merge(tokenizer, tmp_path):
    glued = tmp_path / "glued.jinja"
    glued.write_text("{% for m in messages %}{{ m.content }}{% endfor %}", encoding="utf-8")
    codec = make_codec(tokenizer, chat_template=str(glued), as_messages=False)
    turns = (Message("user", "h"), Message("assistant", "e"), Message("user", "x"))
    expected = [token for text in ("h", "e", "x") for token in ids_of(tokenizer, text)]
    assert list(codec.encode_prompt(turns).ids) == expected


def test_spans_follow_a_template_that_trims(tokenizer, tmp_path):
    path = tmp_path / "trimmed.jinja"
    path.write_text(TRIMMED, encoding="utf-8")
    codec = make_codec(tokenizer, chat_template=str(path), as_messages=False)
    turns = (Message("user", "a"), Message("assistant", "  cat "), Message("user", "b"))
    encoded = codec.encode_prompt(turns)
    (span,) = encoded.spans
    assert codec.decode(encoded.ids[span.start : span.stop], special=True) == "cat<|im_end|>"


def test_an_answer_that_looks_like_its_surroundings_is_found(chat):
    turns = (
        Message("user", "assistant"),
        Message("assistant", "user"),
        Message("user", "user"),
        Message("assistant", ""),
        Message("user", "b"),
    )
    encoded = chat.encode_prompt(turns)
    texts = [chat.decode(encoded.ids[s.start : s.stop], special=True) for s in encoded.spans]
    assert texts == ["user<|im_end|>", "<|im_end|>"]


def test_messages_without_a_template_name_the_key_to_set(plain):
    with pytest.raises(ConfigError) as caught:
        plain.encode_prompt(DIALOGUE)
    assert caught.value.where == "data.chat_template"
    assert caught.value.exit_code == 2


def test_as_messages_without_a_template_is_refused_at_once(tokenizer):
    with pytest.raises(ConfigError, match="chat template"):
        make_codec(tokenizer, chat_template=None, as_messages=True)


@pytest.mark.parametrize(
    "template",
    ["{% for %}", "{{ raise_exception('only one turn') }}", "{{ messages[0].content + 3 }}"],
)
def test_a_broken_template_is_a_config_error(tokenizer, tmp_path, template):
    path = tmp_path / "t.jinja"
    path.write_text(template, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        make_codec(tokenizer, chat_template=str(path), as_messages=True)
    assert caught.value.where == "data.chat_template"


def test_a_missing_template_file_is_named(tokenizer):
    with pytest.raises(ConfigError, match=r"nowhere\.jinja"):
        make_codec(tokenizer, chat_template="nowhere.jinja", as_messages=True)


def test_a_tokenizer_without_end_token_is_refused():
    tokenizer = build_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(CheckpointError, match="end token"):
        make_codec(tokenizer, chat_template=None, as_messages=False)


def test_decoding_leaves_out_stop_tokens_and_shows_them_on_demand(chat):
    ids = chat.encode_response("the cat")
    assert chat.decode(ids) == "the cat"
    assert chat.decode(ids, special=True) == "the cat<|im_end|>"


def test_hashes_change_with_what_they_stand_for(tokenizer, plain, chat):
    again = make_codec(build_tokenizer(), chat_template="chatml", as_messages=False)
    wrapped = make_codec(tokenizer, chat_template="chatml", as_messages=True)
    other = build_tokenizer()
    other.add_tokens(["newcomer"])
    grown = make_codec(other, chat_template="chatml", as_messages=False)
    assert again.template_hash == chat.template_hash
    assert again.vocabulary_hash == chat.vocabulary_hash
    assert len({plain.template_hash, chat.template_hash, wrapped.template_hash}) == 3
    assert grown.vocabulary_hash != chat.vocabulary_hash
