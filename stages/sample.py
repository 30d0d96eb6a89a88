"""``rlhf sample``: K answers per prompt, as ranking lines that wait for a person's ranks.

Each line carries the sampled ids and the hash of the vocabulary they belong to, so that the reward
model later learns from exactly what the policy wrote. Lines are written in the order of the prompts
as soon as they are known, each with the settings it was drawn with; an interrupted run continues
behind the lines that are there, with the same settings.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stages import sample_file
from stages.answers import CHUNK, Drawing, draw, prompts_of
from stages.data.kinds import PromptItem
from stages.data.records import to_json
from stages.data.templates import Codec
from stages.errors import Interrupted
from stages.models.configured import max_positions
from stages.models.folder import model_folder
from stages.models.generate import Answer
from stages.models.load import Loading, load_policy
from stages.models.network import Network
from stages.models.precision import choose
from stages.runtime import start
from stages.runtime.reporter import Reporter
from stages.runtime.run_dir import weights_hash
from stages.runtime.signals import StopRequest


@dataclass(frozen=True)
class SampleOptions:
    """What to sample from, and how.

    Attributes:
        policy: run folder, model folder or hub id.
        prompts: a file of prompts in any format, or ``-`` for standard input.
        k: answers per prompt.
        output: where the lines go; None hands them to the caller.
        max_new_tokens: longest answer in tokens.
        temperature: of the softmax.
        top_p: share of probability that is sampled from.
        seed: equal seeds give equal answers.
        limit: only the first N prompts.
        resume: keep the lines that are there and add the missing ones.
        device: ``auto | cpu | cuda | mps``.
        precision: ``auto | bf16 | fp32``.
    """

    policy: str
    prompts: str
    k: int = 4
    output: str | None = None
    max_new_tokens: int = 64
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    limit: int | None = None
    resume: bool = False
    device: str = "auto"
    precision: str = "auto"

    def drawing(self) -> Drawing:
        """How its answers are drawn."""
        return Drawing(self.k, self.max_new_tokens, self.temperature, self.top_p, self.seed)

    def drawn(self) -> dict[str, Any]:
        """What decides an answer besides its prompt: it stands in every line."""
        return {
            "policy": weights_hash(model_folder(self.policy)),
            "seed": self.seed,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_new_tokens": self.max_new_tokens,
        }


def run(
    options: SampleOptions, reporter: Reporter, *, write: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Sample K answers to each prompt.

    Args:
        options: what to sample.
        reporter: hears about the progress.
        write: takes each line where there is no output file.

    Returns:
        Counts: prompts, answers, ended, kept (lines that were there), output.

    Raises:
        ConfigError: the output exists and is neither resumed nor empty, or was drawn otherwise.
        CheckpointError: the policy cannot be used.
    """
    kept, tail = sample_file.read(options.output, resume=options.resume)
    codec, policy = _load(options)
    prompts = prompts_of(
        options.prompts,
        codec,
        positions=max_positions(policy.module.config),
        max_new_tokens=options.max_new_tokens,
        limit=options.limit,
    ).train
    drawn = options.drawn()
    sample_file.require_of(kept, tail, prompts, {**drawn, "k": options.k}, str(options.output))
    sample_file.make_ready(options.output, kept)
    reporter.begin("sample", total=len(prompts), unit="prompts", done=len(kept))
    ended = 0
    with StopRequest() as stop:
        for first in range(len(kept), len(prompts), CHUNK):
            places = range(first, min(first + CHUNK, len(prompts)))
            items = [prompts[n] for n in places]
            answers = draw(policy, codec, items, places, options.drawing())
            ended += sum(answer.ended for row in answers for answer in row)
            lines = [_line(*pair, codec, drawn) for pair in zip(items, answers, strict=True)]
            _hand_on(lines, options.output, write)
            reporter.advance(places.stop)
            if stop.signum and places.stop < len(prompts):
                raise Interrupted(
                    stop.signum,
                    what=f"interrupted after {places.stop} of {len(prompts)} prompts",
                    do="run the same command with --resume to go on",
                )
    reporter.end()
    fresh = len(prompts) - len(kept)
    return {
        "status": "done",
        "output": options.output,
        "prompts": len(prompts),
        "kept": len(kept),
        "answers": fresh * options.k,
        "ended": ended,
    }


def _load(options: SampleOptions) -> tuple[Codec, Network]:
    """The policy, and how it reads text: as its own folder says."""
    arithmetic = choose(options.device, options.precision)
    policy = load_policy(options.policy, Loading(arithmetic))
    return start.own_codec(options.policy), policy


def _line(
    item: PromptItem, answers: Sequence[Answer], codec: Codec, drawn: Mapping[str, Any]
) -> str:
    """One ranking line without ranks."""
    responses = [
        {
            "text": codec.decode(answer.ids),
            "ids": answer.ids.tolist(),
            "vocabulary": codec.vocabulary_hash,
            "flags": [] if answer.ended else ["cut"],
        }
        for answer in answers
    ]
    line = {"prompt": to_json(item.prompt), "responses": responses, "sampling": drawn}
    return json.dumps(line, ensure_ascii=False)


def _hand_on(lines: Sequence[str], output: str | None, write: Callable[[str], None] | None) -> None:
    if output is not None:
        sample_file.append(lines, output)
        return
    assert write is not None
    for line in lines:
        write(line)
