"""Tone-count: a small writing task whose answers can be judged by a rule.

A prompt asks for a tone, a noun and a number of words, such as ``Be polite: mention the kettle in 6
words.`` A good answer is `` Please keep the kettle warm today.``: it mentions the noun, has that
many words, carries the right tone marker and is well formed. The demonstrations of the task are
sloppy on purpose, so a model that imitates them leaves something for reinforcement learning to
gain, and the rule says how much was gained, which a learned reward model cannot say of itself.

    python tone_count.py make DIR                  write the task's data files into DIR
    python tone_count.py label ANSWERS.jsonl       rank sampled answers, as a person would
    python tone_count.py score ANSWERS.jsonl       print the mean true score as JSON

It is one file and needs only the standard library, because it travels alone into a new project. The
same seed gives the same bytes on every machine.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterable, Iterator
from itertools import chain, product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

# What a prompt can ask for. Nouns occur nowhere else in the grammar, so a mention is a choice.
TONES = ("polite", "cheerful", "plain")
NOUNS = (
    "kettle", "lamp", "boat", "bell", "drum", "sofa", "coat", "cup", "cake", "map", "bike", "hat",
)  # fmt: skip
WORD_COUNTS = range(5, 11)
STYLES = ("Be", "Stay", "Sound")
MENTIONS = ("mention", "name", "note")
COUNTS = ("in", "with", "using")

# What an answer is made of. A tone is carried by one marker word, "plain" by none.
MARKERS = {"polite": ("please", "kindly"), "cheerful": ("hooray", "wow"), "plain": ()}
REQUEST_VERBS = ("keep", "leave", "get")
STATEMENT_VERBS = ("is", "looks", "stays")
DETERMINERS = ("the", "this")
LOOKS = ("old", "red", "big")
STATES = ("clean", "dry", "warm", "neat", "safe")
PREPOSITIONS = ("near", "by", "behind")
OWNERS = ("my", "our")
PLACES = ("door", "wall", "tree")
ADVERBS = ("today", "again", "now")
KNOWN_WORDS = frozenset(
    chain(NOUNS, REQUEST_VERBS, STATEMENT_VERBS, DETERMINERS, LOOKS, STATES, ["and"])
) | frozenset(chain(PREPOSITIONS, OWNERS, PLACES, ADVERBS, *MARKERS.values()))
FILLER = "um"  # the one word of the demonstrations that is not known
FINAL_MARKS = (".", "!")

# Optional parts of a sentence and their lengths in words; the four words of the core come on top.
PARTS = {"look": 1, "second_state": 2, "place": 3, "adverb": 1}
CORE_WORDS = 4
LONGEST = CORE_WORDS + sum(PARTS.values())

SLOPPINESS = 0.34  # probability with which a demonstration breaks each of its four constraints
NOISE = 0.02  # standard deviation of a labeller's judgement, in units of the true score
DEMONSTRATIONS = 3000
PROMPTS = 1500
EVAL_PROMPTS = 256
PRETRAIN_TEXTS = 512


class Request(NamedTuple):
    """What a prompt asks for; ``words`` is the number of words of the answer."""

    tone: str
    noun: str
    words: int


class Parts(NamedTuple):
    """The four parts of the true score, each in [0, 1]."""

    noun: float
    words: float
    tone: float
    form: float


def parse_prompt(prompt: str) -> Request:
    """Read tone, noun and word count back from a prompt.

    Raises:
        ValueError: if the prompt is none of this task's.
    """
    words = split_words(prompt.replace(":", " "))
    tones = [word for word in words if word in TONES]
    nouns = [word for word in words if word in NOUNS]
    counts = [int(word) for word in words if word.isdecimal()]
    if not len(tones) == len(nouns) == len(counts) == 1:
        raise ValueError(f"not a tone-count prompt: {prompt!r}")
    return Request(tones[0], nouns[0], counts[0])


def split_words(text: str) -> list[str]:
    """The words of a text in lower case, without the punctuation around them."""
    stripped = (word.strip(".,!").lower() for word in text.split())
    return [word for word in stripped if word]


def true_score(prompt: str, response: str) -> float:
    """How well an answer does what its prompt asks: the mean of the four parts, in [0, 1]."""
    return fmean(score_parts(prompt, response))


def score_parts(prompt: str, response: str) -> Parts:
    """The parts of the true score; an answer without a word gets zero for each.

    - noun: 1 if the noun is mentioned;
    - words: max(0, 1 - |words - asked| / 3);
    - tone: 1 if the markers of the asked tone are there and those of no other;
    - form: see `score_form`.
    """
    request = parse_prompt(prompt)
    words = split_words(response)
    if not words:
        return Parts(0.0, 0.0, 0.0, 0.0)
    return Parts(
        noun=float(request.noun in words),
        words=max(0.0, 1 - abs(len(words) - request.words) / 3),
        tone=float(marked_tones(words) == {request.tone} - {"plain"}),
        form=score_form(response.strip(), words),
    )


def marked_tones(words: list[str]) -> set[str]:
    """The tones whose marker words occur."""
    return {tone for tone, markers in MARKERS.items() if not set(markers).isdisjoint(words)}


def score_form(text: str, words: list[str]) -> float:
    """Mean of share of known words, capital and single final mark, times the distinct share."""
    known = fmean(word in KNOWN_WORDS for word in words)
    capital = text[0].isupper()
    marked = text.endswith(FINAL_MARKS) and sum(text.count(mark) for mark in FINAL_MARKS) == 1
    return fmean((known, capital, marked)) * len(set(words)) / len(words)


def all_prompts() -> list[str]:
    """Every prompt of the task, each once, in a fixed order."""
    choices = product(STYLES, TONES, MENTIONS, NOUNS, COUNTS, WORD_COUNTS)
    return [
        f"{style} {tone}: {mention} the {noun} {count} {words} words."
        for style, tone, mention, noun, count, words in choices
    ]


def write_answer(request: Request, rng: random.Random) -> str:
    """A well-formed answer that keeps every constraint of the request, after one space.

    The space separates the answer from its prompt and gives each word one spelling for a byte-level
    tokenizer, wherever it stands.
    """
    marker = rng.choice(MARKERS[request.tone]) if MARKERS[request.tone] else None
    core = write_core(request, request.words - (marker is not None), rng)
    opening = [] if marker is None else [marker + ("," if request.tone == "cheerful" else "")]
    sentence = " ".join(opening + core)
    mark = "!" if request.tone == "cheerful" else "."
    return f" {sentence[0].upper()}{sentence[1:]}{mark}"


def write_core(request: Request, words: int, rng: random.Random) -> list[str]:
    """A sentence of so many distinct words, without marker: a request if polite, else a statement.

    A plain sentence is either of the two.
    """
    parts = choose_parts(words - CORE_WORDS, rng)
    thing = [rng.choice(DETERMINERS), *pick("look", parts, LOOKS, rng), request.noun]
    first, second = rng.sample(STATES, 2)
    state = [first, *(["and", second] if "second_state" in parts else [])]
    place = [rng.choice(options) for options in (PREPOSITIONS, OWNERS, PLACES)]
    tail = (place if "place" in parts else []) + pick("adverb", parts, ADVERBS, rng)
    if request.tone == "polite" or (request.tone == "plain" and rng.random() < 0.5):
        return [rng.choice(REQUEST_VERBS), *thing, *state, *tail]
    return [*thing, rng.choice(STATEMENT_VERBS), *state, *tail]


def choose_parts(words: int, rng: random.Random) -> set[str]:
    """Optional parts that add up to so many words, each such choice equally likely."""
    subsets = product((False, True), repeat=len(PARTS))
    chosen = [
        {part for part, take in zip(PARTS, subset, strict=True) if take} for subset in subsets
    ]
    return rng.choice([parts for parts in chosen if sum(PARTS[part] for part in parts) == words])


def pick(part: str, parts: set[str], options: tuple[str, ...], rng: random.Random) -> list[str]:
    """One of the options if the part was chosen, else nothing."""
    return [rng.choice(options)] if part in parts else []


def write_sloppy_answer(request: Request, sloppiness: float, rng: random.Random) -> str:
    """An answer that breaks each of the four constraints with the given probability."""
    lengths = range(max(CORE_WORDS + 1, request.words - 3), min(LONGEST, request.words + 3) + 1)
    broken = Request(
        tone=maybe_other(request.tone, TONES, sloppiness, rng),
        noun=maybe_other(request.noun, NOUNS, sloppiness, rng),
        words=maybe_other(request.words, lengths, sloppiness, rng),
    )
    answer = write_answer(broken, rng)
    return spoil_form(answer, rng) if rng.random() < sloppiness else answer


def maybe_other(value: Any, options: Iterable[Any], sloppiness: float, rng: random.Random) -> Any:
    """The value, or with the given probability another one of the options."""
    others = [option for option in options if option != value]
    return rng.choice(others) if rng.random() < sloppiness else value


def spoil_form(answer: str, rng: random.Random) -> str:
    """Break the form in one way: no capital, no final mark, or a filler for the last word."""
    way = rng.choice(("capital", "mark", "filler"))
    if way == "capital":
        return answer.lower()
    if way == "mark":
        return answer[:-1]
    return f"{answer[:-1].rpartition(' ')[0]} {FILLER}{answer[-1]}"


def make(folder: Path, seed: int = 0) -> None:
    """Write demonstrations, prompts, held-out prompts and plain texts; no prompt occurs twice."""
    prompts = all_prompts()
    random.Random(f"{seed} prompts").shuffle(prompts)
    taught, rest = prompts[:DEMONSTRATIONS], prompts[DEMONSTRATIONS:]
    asked, held_out = rest[:PROMPTS], rest[PROMPTS : PROMPTS + EVAL_PROMPTS]
    folder.mkdir(parents=True, exist_ok=True)
    write_lines(folder / "demonstrations.jsonl", demonstrations(taught, seed))
    write_lines(folder / "prompts.jsonl", ({"prompt": prompt} for prompt in asked))
    write_lines(folder / "eval_prompts.jsonl", ({"prompt": prompt} for prompt in held_out))
    write_lines(folder / "pretrain.jsonl", pretrain_texts(PRETRAIN_TEXTS, seed))


def demonstrations(prompts: list[str], seed: int) -> Iterator[dict[str, str]]:
    """One sloppy answer for each prompt."""
    rng = random.Random(f"{seed} demonstrations")
    for prompt in prompts:
        answer = write_sloppy_answer(parse_prompt(prompt), SLOPPINESS, rng)
        yield {"prompt": prompt, "response": answer}


def pretrain_texts(count: int, seed: int) -> Iterator[dict[str, str]]:
    """Short paragraphs of the same language: two or three sentences in one tone, no prompt."""
    rng = random.Random(f"{seed} pretrain")
    for _ in range(count):
        tone = rng.choice(TONES)
        nouns = rng.sample(NOUNS, rng.choice((2, 3)))
        requests = [Request(tone, noun, rng.choice(WORD_COUNTS)) for noun in nouns]
        yield {"text": "".join(write_answer(request, rng) for request in requests).lstrip()}


def label(lines: list[dict[str, Any]], noise: float, seed: int) -> list[dict[str, Any]]:
    """Rank the answers of every line by their true score, keeping all other fields."""
    return [
        {**line, "responses": rank_answers(line, noise, random.Random(f"{seed} label {position}"))}
        for position, line in enumerate(lines)
    ]


def rank_answers(line: dict[str, Any], noise: float, rng: random.Random) -> list[dict[str, Any]]:
    """The answers of one prompt with ranks: 1 is the best, equal true scores are ties.

    The noise is drawn once for each distinct score, so it can swap close answers, as people do,
    but never parts equal ones.
    """
    answers = line["responses"]
    scores = [round(true_score(line["prompt"], answer["text"]), 9) for answer in answers]
    seen_as = {score: score + rng.gauss(0, noise) for score in sorted(set(scores))}
    order = sorted(seen_as, key=seen_as.__getitem__, reverse=True)
    return [
        {**answer, "rank": order.index(score) + 1}
        for answer, score in zip(answers, scores, strict=True)
    ]


def summarise(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean true score, mean of its parts and share of distinct answers, over all answers."""
    pairs = [(line["prompt"], answer) for line in lines for answer in answer_texts(line)]
    parts = [score_parts(prompt, answer) for prompt, answer in pairs]
    means = Parts(*(fmean(column) for column in zip(*parts, strict=True)))
    return {
        "answers": len(pairs),
        "true_score": round(fmean(means), 6),
        "parts": {name: round(value, 6) for name, value in means._asdict().items()},
        "distinct": round(len({answer for _, answer in pairs}) / len(pairs), 6),
    }


def answer_texts(line: dict[str, Any]) -> list[str]:
    """The answers of a ranking line (several) or of a line with one ``response``."""
    if "responses" in line:
        return [answer["text"] for answer in line["responses"]]
    return [line["response"]]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of an answers file, empty ones left out.

    Raises:
        ValueError: naming file and line, if one is not JSON or holds no prompt with answers, and
            naming the file if it holds no line at all.
    """
    with path.open(encoding="utf-8-sig", newline="\n") as file:
        lines = [read_line(line, f"{path}:{n}") for n, line in enumerate(file, 1) if line.strip()]
    if not lines:
        raise ValueError(f"{path}: no answers in this file")
    return lines


def read_line(text: str, where: str) -> dict[str, Any]:
    """One line of an answers file; its prompt is one of this task's."""
    try:
        line = json.loads(text)
        parse_prompt(line["prompt"])
        answers = answer_texts(line)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{where}: not an answers line: {error}") from error
    if not answers or not all(isinstance(answer, str) for answer in answers):
        raise ValueError(f"{where}: not an answers line: it needs at least one answer as text")
    return line


def write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Write one JSON object a line, in UTF-8, with the same bytes on every system."""
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(as_lines(lines))


def as_lines(lines: Iterable[dict[str, Any]]) -> Iterator[str]:
    """The objects as lines of JSON."""
    return (json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def parser() -> argparse.ArgumentParser:
    """The command line: make, label, score."""
    top = argparse.ArgumentParser(description="The tone-count task: data, labeller, true score.")
    commands = top.add_subparsers(dest="command", required=True)
    make_it = commands.add_parser("make", help="write the task's data files into DIR")
    make_it.add_argument("folder", metavar="DIR", type=Path)
    label_it = commands.add_parser("label", help="rank the answers of each line by true score")
    label_it.add_argument("file", metavar="ANSWERS.jsonl", type=Path)
    label_it.add_argument("--output", metavar="FILE", type=Path, help="default: standard output")
    label_it.add_argument("--noise", type=float, default=NOISE, help="deviation of a judgement")
    score_it = commands.add_parser("score", help="print the mean true score as JSON")
    score_it.add_argument("file", metavar="ANSWERS.jsonl", type=Path)
    for seeded in (make_it, label_it):
        seeded.add_argument("--seed", type=int, default=0)
    return top


def run(options: argparse.Namespace) -> None:
    """Do what the command line asks for; results go to standard output."""
    if options.command == "make":
        make(options.folder, options.seed)
        return
    lines = read_lines(options.file)
    if options.command == "score":
        print(json.dumps(summarise(lines)))
        return
    ranked = label(lines, options.noise, options.seed)
    if options.output:
        write_lines(options.output, ranked)
    else:
        sys.stdout.writelines(as_lines(ranked))


def main(arguments: list[str] | None = None) -> int:
    """Run a command; a file that cannot be used ends with one sentence and exit code 3."""
    options = parser().parse_args(arguments)
    try:
        run(options)
    except (OSError, ValueError) as error:
        print(f"tone_count: {error}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
