"""Prompts of a file → answers that a policy draws to them.

An answer depends on its prompt, its place in the file, its number and the seed alone, so that two
policies which are asked in the same way draw with the same noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stages.config.shared import PromptData
from stages.data import store
from stages.data.kinds import PromptItem
from stages.data.store import LoadSpec, Splits
from stages.data.templates import Codec
from stages.errors import ConfigError
from stages.models.generate import Answer, Sampling, generate, noise
from stages.models.network import Network

CHUNK = 256  # prompts answered side by side
UNBOUNDED = 1 << 20  # positions of a model that has no limit of its own


@dataclass(frozen=True)
class Drawing:
    """How answers are drawn.

    Attributes:
        k: answers per prompt.
        max_new_tokens: longest answer in tokens.
        temperature: of the softmax.
        top_p: share of probability that is sampled from.
        seed: equal seeds give equal answers.
    """

    k: int = 4
    max_new_tokens: int = 64
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0


def prompts_of(
    file: str,
    codec: Codec,
    *,
    positions: int | None,
    max_new_tokens: int,
    limit: int | None,
    max_dropped: float = 0.5,
    fields: bool = False,
) -> Splits:
    """The prompts of a file that leave room for an answer.

    Args:
        file: in any format, or ``-`` for standard input.
        codec: how they are read.
        positions: the longest sequence, None = no limit.
        max_new_tokens: room for the answer.
        limit: only the first N prompts.
        max_dropped: the largest share of prompts that cannot be used.
        fields: whether the prompts keep the other fields of their lines.

    Raises:
        ConfigError: no prompt could leave that room.
    """
    if (positions or UNBOUNDED) - max_new_tokens < 1:
        raise ConfigError(
            f"{max_new_tokens} leaves no room for a prompt in {positions or UNBOUNDED} positions",
            where="command line: --max-new-tokens",
            do=f"give less than {positions or UNBOUNDED}",
        )
    data = PromptData(
        train=file,
        eval=None,
        limit=limit,
        max_prompt_tokens=1 << 30,  # the positions alone limit a prompt
        max_dropped=max_dropped,
    )
    spec = LoadSpec(
        kind="prompts",
        data=data,
        max_positions=positions,
        reserve_tokens=max_new_tokens,
        fields=fields,
    )
    return store.load(spec, codec)


def draw(
    policy: Network,
    codec: Codec,
    items: Sequence[PromptItem],
    places: Sequence[int],
    drawing: Drawing,
) -> list[list[Answer]]:
    """K answers to each prompt; the prompt is read once for all of them.

    Args:
        policy: what is asked.
        codec: its stop tokens.
        items: the prompts.
        places: the place of each in its file, which seeds its noise.
        drawing: how.
    """
    k, length = drawing.k, drawing.max_new_tokens
    sampling = Sampling(length, codec.stop_ids, drawing.temperature, drawing.top_p)
    uniforms = noise(drawing.seed, [(n, sample) for n in places for sample in range(k)], length)
    answers = generate(policy, [item.ids for item in items for _ in range(k)], uniforms, sampling)
    return [answers[n * k : (n + 1) * k] for n in range(len(items))]
