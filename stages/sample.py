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
from stages.config.shared import PromptData
from stages.data import store
from stages.data.kinds import PromptItem
from stages.data.records import to_json
from stages.data.store import LoadSpec, Store
from stages.data.templates import Codec, make_codec
from stages.errors import ConfigError, Interrupted
from stages.models.folder import Identity, model_folder, read_identity
from stages.models.generate import Answer, Sampling, generate, noise
from stages.models.load import Loading, load_policy, load_tokenizer, max_positions
from stages.models.network import Network
from stages.models.precision import choose
from stages.runtime.reporter import Reporter
from stages.runtime.run_dir import weights_hash
from stages.runtime.signals import StopRequest

CHUNK = 256  # prompts answered side by side


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
    prompts = _prompts(options, codec, policy)
    drawn = options.drawn()
    sample_file.require_of(kept, tail, prompts, {**drawn, "k": options.k}, str(options.output))
    sample_file.make_ready(options.output, kept)
    reporter.begin("sample", total=len(prompts), unit="prompts", done=len(kept))
    ended = 0
    with StopRequest() as stop:
        for first in range(len(kept), len(prompts), CHUNK):
            places = range(first, min(first + CHUNK, len(prompts)))
            items = [prompts[n] for n in places]
            answers = _answers(policy, codec, items, places, options)
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
    folder = model_folder(options.policy)
    arithmetic = choose(options.device, options.precision)
    policy = load_policy(options.policy, Loading(arithmetic))
    tokenizer = load_tokenizer(options.policy)
    identity = read_identity(folder) if folder.is_dir() else None
    codec = make_codec(
        tokenizer,
        chat_template=None,
        as_messages=_as_messages(tokenizer, identity),
        extra_stop_ids=identity.stop_ids if identity else (),
    )
    return codec, policy


def _as_messages(tokenizer: Any, identity: Identity | None) -> bool:
    """A model that was trained here says it; a chat model of another tool is asked in turns."""
    return identity.as_messages if identity else tokenizer.chat_template is not None


def _prompts(options: SampleOptions, codec: Codec, policy: Network) -> Store:
    positions = max_positions(policy.module.config)
    room = (positions or 1 << 20) - options.max_new_tokens
    if room < 1:
        raise ConfigError(
            f"{options.max_new_tokens} leaves no room for a prompt in {positions} positions",
            where="command line: --max-new-tokens",
            do=f"give less than {positions}",
        )
    data = PromptData(
        train=options.prompts,
        eval=None,
        limit=options.limit,
        max_prompt_tokens=1 << 30,  # the positions alone limit a prompt
    )
    spec = LoadSpec(
        kind="prompts", data=data, max_positions=positions, reserve_tokens=options.max_new_tokens
    )
    return store.load(spec, codec).train


def _answers(
    policy: Network,
    codec: Codec,
    items: Sequence[PromptItem],
    places: Sequence[int],
    options: SampleOptions,
) -> list[list[Answer]]:
    """K answers to each prompt; the prompt is read once for all of them."""
    k = options.k
    sampling = Sampling(options.max_new_tokens, codec.stop_ids, options.temperature, options.top_p)
    keys = [(n, sample) for n in places for sample in range(k)]
    uniforms = noise(options.seed, keys, options.max_new_tokens)
    rows = [item.ids for item in items for _ in range(k)]
    answers = generate(policy, rows, uniforms, sampling)
    return [answers[n * k : (n + 1) * k] for n in range(len(items))]


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
