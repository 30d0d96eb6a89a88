"""The store: what is kept, left out, held out, cached and refused."""

from __future__ import annotations

import os

import numpy as np
import pytest

from stages.batch import Example, Group
from stages.data import build, store
from stages.data.encode import encode_demonstration
from stages.data.fit import Limits
from stages.data.records import Demonstration, Message, Response
from stages.data.store import LoadSpec, load
from stages.data.templates import make_codec
from stages.errors import ConfigError, DataError, ResourceError
from tests.data.conftest import build_tokenizer, section, write_lines


def demonstrations(n, start=0):
    return [{"prompt": f"prompt {i}", "response": f"answer {i}"} for i in range(start, start + n)]


def rankings(n):
    answers = [{"text": "the cat", "rank": 1}, {"text": "a mat", "rank": 2}]
    return [{"prompt": f"prompt {i}", "responses": answers} for i in range(n)]


@pytest.fixture
def lines(tmp_path):
    """Write a data file, by default ten demonstrations."""

    def write(records=None, name="data.jsonl"):
        return write_lines(tmp_path / name, demonstrations(10) if records is None else records)

    return write


@pytest.fixture
def builds(monkeypatch):
    """How many times records were tokenised."""
    calls = []
    chunks = build.stored_chunks

    def counted(*args):
        calls.append(args[0])
        return chunks(*args)

    monkeypatch.setattr(store, "stored_chunks", counted)
    return calls


def spec(path, kind="demonstrations", *, changes=None, **fields):
    return LoadSpec(kind, section(path, **(changes or {})), **fields)


def test_what_is_stored_is_what_was_encoded(lines, plain):
    splits = load(spec(lines(demonstrations(1200))), plain)
    record = Demonstration("prompt 1100", Response("answer 1100"), "")
    expected = encode_demonstration(record, plain, Limits())
    item = splits.train[1100]
    assert isinstance(item, Example)
    assert list(item.ids) == list(expected.ids)
    assert list(item.targets) == list(expected.targets)
    assert splits.train.origin(1100).endswith("data.jsonl:1101")
    assert len(splits.train) == len(list(splits.train)) == 1200
    assert splits.train.lengths[1100] == len(expected.ids)


def test_rankings_come_back_as_groups(lines, plain):
    scored = [
        {"text": "the cat", "score": 2.5},
        {"text": "", "score": 1},
        {"text": "a", "score": 1},
    ]
    path = lines([{"prompt": "hello", "responses": scored}])
    (group,) = load(spec(path, "rankings", margin="data"), plain).train
    assert isinstance(group, Group)
    assert group.ranks == (1, 2, 2)
    assert [plain.decode(ids) for ids in group.answers] == ["the cat", "", "a"]
    np.testing.assert_allclose(group.margins, [[0, 1.5, 1.5], [0, 0, 0], [0, 0, 0]])


def test_a_group_without_margin_has_none_and_counts_its_prompt_once(lines, plain):
    splits = load(spec(lines(rankings(1)), "rankings"), plain)
    group = splits.train[0]
    assert group.margins is None
    assert splits.train.lengths[0] == len(group.prompt) + sum(map(len, group.answers))


def test_judged_rankings_keep_scores_source_and_labeler(lines, plain):
    answers = [{"text": "the cat", "score": 2.5}, {"text": "a", "score": 1}]
    told = {"source": "web", "labeler": "ann"}
    unscored = [{"text": "a", "rank": 2}, {"text": "the", "rank": 1}, {"text": "hello"}]
    tied = [{"text": "a", "rank": 1}, {"text": "the", "rank": 1}]
    path = lines(
        [
            {"prompt": "hello", "responses": answers, **told},
            {"prompt": "two", "responses": unscored},
            {"prompt": "cat", "responses": tied},
        ]
    )
    splits = load(spec(path, "judged"), plain)
    first, second = splits.train
    assert (first.scores, first.source, first.labeler) == ((2.5, 1.0), "web", "ann")
    assert first.group.ranks == (1, 2)
    assert (second.scores, second.source, second.labeler) == (None, None, None)
    assert second.group.ranks == (2, 1)
    (role,) = splits.report.roles
    assert role.dropped == {"all answers tied": 1}
    assert role.answers == {2: 2}


def test_prompts_keep_what_was_written_and_come_once(lines, chat):
    turns = [{"role": "user", "content": "hello"}]
    path = lines([{"prompt": turns}, {"prompt": "hello"}, {"prompt": turns}, {"prompt": "two"}])
    splits = load(spec(path, "prompts"), chat)
    first, last = splits.train
    assert first.prompt == (Message("user", "hello"),)
    assert first.text == chat.render(first.prompt)
    assert last.prompt == last.text == "two"
    (role,) = splits.report.roles
    assert (role.records, role.kept, role.dropped) == (4, 2, {"duplicate prompt": 2})


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("p.txt", "one\ntwo\n\none\n"),
        ("p.jsonl", '{"prompt": "one"}\n{"prompt": "two"}\n'),
        ("p.csv", "prompt,note\none,x\ntwo,y\n"),
    ],
)
def test_prompts_are_read_from_any_file(tmp_path, plain, name, data):
    (tmp_path / name).write_text(data, encoding="utf-8")
    splits = load(spec(tmp_path / name, "prompts"), plain)
    assert [item.prompt for item in splits.train] == ["one", "two"]


def test_rankings_serve_as_demonstrations_prompts_and_documents(lines, plain):
    path = lines(rankings(2))
    best = load(spec(path), plain).train
    assert [plain.decode(item.ids[item.targets]) for item in best] == ["the cat"] * 2
    assert [item.prompt for item in load(spec(path, "prompts"), plain).train] == [
        "prompt 0",
        "prompt 1",
    ]
    documents = load(spec(path, "documents", max_tokens=64), plain).train
    assert plain.decode(documents[0].ids) == "prompt 0the cat"


def test_documents_are_cut_into_pieces(lines, plain):
    splits = load(spec(lines([{"text": "xyzxyz"}]), "documents", max_tokens=4), plain)
    assert [len(item.ids) for item in splits.train] == [4, 3]


def test_texts_are_answers_to_an_empty_prompt(lines, plain):
    (item,) = load(spec(lines([{"text": "xyz"}])), plain).train
    assert plain.decode(item.ids, special=True) == "xyz<|end|>"
    assert list(item.targets) == [1, 2, 3]


def test_several_files_of_several_formats_are_one_data_set(lines, plain, tmp_path):
    lines(name="a.jsonl")
    lines([{"instruction": "x", "output": "y"}], name="b.jsonl")
    splits = load(spec([f"{tmp_path}/*.jsonl"]), plain)
    (role,) = splits.report.roles
    assert len(splits.train) == 11
    assert role.format == "canonical, alpaca"
    assert [row["file"][-7:] for row in splits.report.rows()] == ["a.jsonl", "b.jsonl"]


def test_foreign_columns_are_renamed(lines, plain):
    path = lines([{"question": "x", "answer": "y"}])
    columns = {"question": "prompt", "answer": "response"}
    splits = load(spec(path, changes={"columns": columns}), plain)
    assert plain.decode(splits.train[0].ids) == "xy"
    with pytest.raises(DataError, match="'query'"):
        load(spec(path, changes={"columns": {"query": "prompt"}}), plain)


def test_limit_takes_the_first_records(lines, plain):
    splits = load(spec(lines(), changes={"limit": 3}), plain)
    assert len(splits.train) == 3
    assert splits.report.roles[0].records == 3


def test_another_source_is_read_whole_and_in_its_own_format(lines, plain):
    texts = lines([{"text": "a b c"}] * 5, name="texts.jsonl")
    changes = {"limit": 2, "eval": 0.5, "format": "canonical"}
    splits = load(spec(lines(), "documents", changes=changes, source=str(texts)), plain)
    assert len(splits.train) == 5
    assert splits.eval is None


def test_the_report_counts_reasons_lengths_and_answers(lines, plain):
    three = [{"text": t, "rank": n} for n, t in enumerate("xyz", start=1)]
    tied = [{"text": t, "rank": 1} for t in "xy"]
    records = [
        *rankings(2),
        {"prompt": "x", "responses": three},
        {"prompt": "x", "responses": tied},
        {"prompt": "x", "responses": three[:1]},
    ]
    splits = load(spec(lines(records), "rankings"), plain)
    (role,) = splits.report.roles
    assert role.answers == {2: 2, 3: 1}
    assert role.dropped == {"no strict pair": 1, "fewer than two ranked answers": 1}
    assert role.first["no strict pair"].endswith("data.jsonl:4")
    assert role.response_tokens["max"] == len(plain.encode_response("the cat"))
    assert splits.report.notes[0].startswith("train: 3 of 5 records, format canonical; left out:")


def test_a_share_is_held_out_by_prompt_and_never_on_both_sides(lines, plain):
    records = demonstrations(200) + [
        {"prompt": f"prompt {i}", "response": "another"} for i in range(200)
    ]
    splits = load(spec(lines(records), changes={"eval": 0.25}), plain)

    def prompts(side):
        return {plain.decode(np.delete(item.ids, item.targets)) for item in side}

    assert not prompts(splits.train) & prompts(splits.eval)
    assert len(splits.train) + len(splits.eval) == 400
    assert 50 <= len(splits.eval) <= 150
    assert [role.kept for role in splits.report.roles] == [len(splits.train), len(splits.eval)]


def test_a_conversation_and_its_continuation_are_on_one_side(lines, chat):
    def turns(*texts):
        roles = ("user", "assistant") * len(texts)
        return [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]

    records = [{"messages": turns(f"q{i}", "a")} for i in range(40)]
    records += [{"messages": turns(f"q{i}", "a", "more", "b")} for i in range(40)]
    splits = load(spec(lines(records), changes={"eval": 0.3}), chat)
    train = {splits.train.keys[n] for n in range(len(splits.train))}
    held = {splits.eval.keys[n] for n in range(len(splits.eval))}
    assert len(train) + len(held) == 40


def test_the_side_of_a_prompt_does_not_depend_on_the_other_records(lines, plain):
    few = load(spec(lines(demonstrations(50), "a.jsonl"), changes={"eval": 0.3}), plain)
    many = load(spec(lines(demonstrations(100), "b.jsonl"), changes={"eval": 0.3}), plain)
    assert set(few.eval.keys) <= set(many.eval.keys)


@pytest.mark.parametrize("share", [0.05, 0.5, 0.99])
@pytest.mark.parametrize("n", [1, 2, 3, 12])
def test_tiny_data_leave_something_to_learn_from(lines, plain, n, share):
    splits = load(spec(lines(demonstrations(n)), changes={"eval": share}), plain)
    assert len(splits.train) >= 1
    assert len(splits.train) + (len(splits.eval) if splits.eval else 0) == n
    if share * n >= 0.5 and n > 1:
        assert len(splits.eval) >= 1


def test_held_out_records_may_have_a_file_of_their_own(lines, plain):
    held = lines(demonstrations(4, start=8), name="held.jsonl")
    splits = load(spec(lines(), changes={"eval": str(held)}), plain)
    assert (len(splits.train), len(splits.eval)) == (10, 4)
    assert [role.role for role in splits.report.roles] == ["train", "eval"]
    assert "2 of 4" in splits.report.notes[-1]


def test_nothing_left_names_every_reason_and_its_first_place(lines, plain):
    records = [{"prompt": "x", "response": "y" * 99}, {"prompt": "x", "response": ""}]
    with pytest.raises(DataError) as caught:
        load(spec(lines(records), changes={"max_response_tokens": 5, "max_dropped": 1.0}), plain)
    assert "1 × answer over max_response_tokens" in caught.value.what
    assert "data.jsonl:2" in caught.value.what
    assert caught.value.exit_code == 3


def test_more_unusable_records_than_allowed_are_an_error(lines, plain):
    records = [*demonstrations(2), *[{"prompt": "x", "response": ""}] * 2]
    assert len(load(spec(lines(records), changes={"max_dropped": 0.5}), plain).train) == 2
    with pytest.raises(DataError, match="2 of 4 records"):
        load(spec(lines(records), changes={"max_dropped": 0.4}), plain)


def test_duplicates_are_not_counted_as_unusable(lines, plain):
    splits = load(spec(lines([{"prompt": "x"}] * 9), "prompts", changes={"max_dropped": 0}), plain)
    assert len(splits.train) == 1


@pytest.mark.parametrize(
    ("record", "kind", "what"),
    [
        ({"prompt": "x", "response": "y"}, "rankings", "a demonstration"),
        ({"text": "x"}, "rankings", "a bare text"),
        ({"prompt": "x"}, "rankings", "a prompt without an answer"),
        ({"prompt": "x"}, "demonstrations", "a prompt without an answer"),
    ],
)
def test_a_file_of_another_kind_is_refused(lines, plain, record, kind, what):
    with pytest.raises(DataError, match=what) as caught:
        load(spec(lines([record]), kind), plain)
    assert caught.value.where.endswith("data.jsonl:1")


def test_a_conversation_without_answer_is_left_out(lines, chat):
    user, answer = {"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}
    path = lines([{"messages": [user, answer]}, {"messages": [user]}])
    (role,) = load(spec(path), chat).report.roles
    assert role.dropped == {"no answer": 1}


def test_unranked_answers_leave_nothing_to_learn_from(lines, plain):
    path = lines([{"prompt": "x", "responses": [{"text": "y"}, {"text": "z"}]}])
    with pytest.raises(DataError, match="fewer than two ranked answers"):
        load(spec(path, "rankings"), plain)


def test_messages_without_template_name_the_key_and_the_record(lines, plain):
    path = lines([{"prompt": [{"role": "user", "content": "x"}], "response": "y"}])
    with pytest.raises(ConfigError, match="no chat template") as caught:
        load(spec(path), plain)
    assert "data.chat_template" in caught.value.where
    assert "data.jsonl:1" in caught.value.where
    assert caught.value.exit_code == 2


def test_a_broken_line_in_the_middle_stops_the_load_and_leaves_no_cache(lines, plain, cache_folder):
    path = lines()
    path.write_text(path.read_text(encoding="utf-8") + "{broken\n", encoding="utf-8")
    with pytest.raises(DataError) as caught:
        load(spec(path), plain)
    assert caught.value.where == f"{path}:11"
    assert not list((cache_folder / "data").iterdir())


def test_the_second_load_reads_the_cache_and_reports_the_same(lines, plain, builds):
    path = lines()
    first, second = load(spec(path), plain), load(spec(path), plain)
    assert len(builds) == 1
    assert first.report == second.report
    assert [list(item.ids) for item in first.train] == [list(item.ids) for item in second.train]


def test_a_changed_file_takes_effect_even_with_size_and_time_unchanged(lines, plain):
    path = lines([{"prompt": "x", "response": "old"}])
    before = os.stat(path)
    load(spec(path), plain)
    path.write_text(path.read_text(encoding="utf-8").replace("old", "new"), encoding="utf-8")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert plain.decode(load(spec(path), plain).train[0].ids) == "xnew"


def test_whatever_decides_the_tokens_decides_the_cache(lines, tokenizer, plain, builds):
    path = lines()
    other = build_tokenizer()
    other.add_tokens(["answer"])
    codecs = [
        make_codec(tokenizer, chat_template="chatml", as_messages=False),
        make_codec(tokenizer, chat_template="chatml", as_messages=True),
        make_codec(other, chat_template=None, as_messages=False),
    ]
    load(spec(path), plain)
    for codec in codecs:
        load(spec(path), codec)
    for change in ({"max_prompt_tokens": 99}, {"overlong": "truncate"}, {"limit": 5}):
        load(spec(path, changes=change), plain)
    load(spec(path, train_on="all"), plain)
    load(spec(path, max_positions=99), plain)
    assert len(builds) == 9
    load(spec(path, changes={"eval": 0.5, "max_dropped": 0.9}), plain)
    assert len(builds) == 9


@pytest.mark.parametrize("damage", ["cut", "flip", "about", "gone"])
def test_a_damaged_cache_is_built_again(lines, plain, cache_folder, builds, damage):
    path = lines()
    expected = [list(item.ids) for item in load(spec(path), plain).train]
    (records,) = cache_folder.rglob("records.arrow")
    data = bytearray(records.read_bytes())
    if damage == "cut":
        records.write_bytes(data[: len(data) // 2])
    elif damage == "flip":
        data[len(data) // 2] ^= 255
        records.write_bytes(data)
    elif damage == "about":
        records.with_name("about.json").write_text("{", encoding="utf-8")
    else:
        records.unlink()
    again = load(spec(path), plain)
    assert [list(item.ids) for item in again.train] == expected
    load(spec(path), plain)
    assert len(builds) == 2


def test_the_cache_goes_to_the_run_folder_where_its_own_cannot_be_written(
    lines, plain, tmp_path, monkeypatch
):
    blocked = tmp_path / "a-file"
    blocked.write_text("", encoding="utf-8")
    monkeypatch.setenv("RLHF_CACHE", str(blocked))
    output = tmp_path / "run"
    splits = load(spec(lines(), output=output), plain)
    assert len(splits.train) == 10
    assert list(output.rglob("records.arrow"))
    with pytest.raises(ResourceError, match="tokenised records"):
        load(spec(lines(), changes={"limit": 3}), plain)


def test_a_cache_folder_that_can_never_be_made_is_one_that_cannot_be_written(
    lines, plain, tmp_path, monkeypatch
):
    monkeypatch.setenv("RLHF_CACHE", "/proc/1/x")
    output = tmp_path / "run"
    assert len(load(spec(lines(), output=output), plain).train) == 10
    assert list(output.rglob("records.arrow"))


def test_nothing_is_written_beside_the_data(plain, tmp_path):
    folder = tmp_path / "theirs"
    folder.mkdir()
    path = write_lines(folder / "data.jsonl", demonstrations(3))
    load(spec(path), plain)
    assert [entry.name for entry in folder.iterdir()] == ["data.jsonl"]


def test_other_processes_wait_for_the_main_one_and_open_its_cache(lines, plain, builds):
    path = lines()
    load(spec(path, main=False, wait=lambda: load(spec(path), plain)), plain)
    assert len(builds) == 1


def test_no_process_is_left_waiting_when_the_load_fails(lines, plain):
    path = lines([{"prompt": 3, "response": "y"}])
    waits = []
    for main in (True, False):
        with pytest.raises(DataError, match="must be a list"):
            load(spec(path, main=main, wait=lambda: waits.append(1)), plain)
    assert len(waits) == 2


def test_sampled_answers_find_their_way_back_by_their_ids(lines, plain):
    ids = [5, 6, 0]
    answers = [
        {"text": "?", "rank": 1, "ids": ids, "vocabulary": plain.vocabulary_hash},
        {"text": "x", "rank": 2},
    ]
    (group,) = load(spec(lines([{"prompt": "x", "responses": answers}]), "rankings"), plain).train
    assert list(group.answers[0]) == ids
