"""``rlhf evaluate``: a reward model against rankings, or a policy on prompts, in figures."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Optional

import typer

from rlhf_cli import gates
from rlhf_cli.commands import options
from rlhf_cli.commands.check import as_lines
from rlhf_cli.commands.options import require_place, require_utf8, reward_terms
from rlhf_cli.commands.sample import check_numbers
from rlhf_cli.console import clean, make_reporter, silence_libraries
from stages.errors import ConfigError

OF_REWARD = ("accuracy", "margin", "log_loss", "ece", "best_of_n_regret", "length_accuracy")
NEEDS: Mapping[str, tuple[str, ...]] = {
    "score": ("--reward",),
    "win_rate": ("--reward", "--against"),
    "ties": ("--reward", "--against"),
    "kl": ("--against",),
    "kl_reverse": ("--against",),
    "length": (),
    "ended": (),
}
"""The figures of a policy that can be required, and the options that they come from."""
OF_ANSWERS = ("against", "reward", "k", "best_of", "max_new_tokens", "temperature", "top_p", "seed")
"""Parameters that a reward model, which answers nothing, has no use for."""
MOST_NAMES = 20  # sources and labelers that are shown to a person


def evaluate(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            metavar="POLICY_OR_REWARD", help="A run folder or model folder, or a hub id."
        ),
    ],
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help="Rankings for a reward model, prompts for a policy; any format."
        ),
    ],
    against: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--against", metavar="POLICY", help="Compare with this policy.", show_default=False
        ),
    ] = None,
    reward: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--reward",
            metavar="REWARD",
            help="Score the answers with this reward model, or the terms in this YAML file.",
            show_default=False,
        ),
    ] = None,
    k: Annotated[int, typer.Option("--k", help="Answers per prompt.")] = 4,
    best_of: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--best-of",
            metavar="N,N,…",
            help="The n of the best-of-n curve; default 1, 2, 4, … up to --k.",
            show_default=False,
        ),
    ] = None,
    max_new_tokens: options.MaxNewTokens = 64,
    temperature: options.Temperature = 1.0,
    top_p: options.TopP = 1.0,
    seed: options.Seed = 0,
    limit: options.Limit = None,
    device: options.Device = "auto",
    precision: options.Precision = "auto",
    require: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            "--require",
            metavar="'FIGURE>=X'",
            help="Exit with 7 unless the bound is kept (>=, <=, >, <, ==); repeatable.",
        ),
    ] = None,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Measure a reward model on rankings, or a policy on prompts."""
    check_numbers(k, max_new_tokens, temperature, top_p, limit)
    require_place(device, precision)
    sizes = _sizes(best_of)
    terms = () if reward is None else reward_terms(reward)
    require_utf8("FILE", file)
    bounds = [gates.parse_figure(text, (*OF_REWARD, *NEEDS)) for text in require or ()]
    silence_libraries(debug=debug)
    from stages import evaluate as figures
    from stages.answers import Drawing
    from stages.comparison import Names
    from stages.models.configured import is_reward_model

    judges = is_reward_model(model)
    named = {"--reward": reward, "--against": against}
    _require_measured(bounds, judges, {name for name, value in named.items() if value is not None})
    if judges:
        _refuse_given(context, model)
    with make_reporter(as_json=as_json, quiet=quiet) as reporter:
        if judges:
            rankings = figures.RewardOptions(model, file, limit, device, precision)
            found = figures.of_reward(rankings, reporter)
        else:
            names = Names(model, against, terms)
            drawing = Drawing(k, max_new_tokens, temperature, top_p, seed)
            prompts = figures.PolicyOptions(
                names, file, sizes, drawing, limit, device=device, precision=precision
            )
            found = figures.of_policy(prompts, reporter)
    if not as_json:
        print("\n".join(_for_people(found, model, file, against)), flush=True)
    gates.check(bounds, _flat(found), do="improve the model, or change the bound")
    if as_json:
        print(json.dumps(found, allow_nan=False), flush=True)


def _sizes(text: str | None) -> tuple[int, ...]:
    """The numbers of ``--best-of``, ascending, each once."""
    if text is None:
        return ()
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and int(word) for word in words):
        raise ConfigError(
            f"{text!r} is no list of numbers",
            do="write numbers of 1 or more, such as 1,2,4",
            where="command line: --best-of",
        )
    return tuple(sorted({int(word) for word in words}))


def _refuse_given(context: typer.Context, model: str) -> None:
    """Options about answers say that a policy was meant."""
    for name in OF_ANSWERS:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{option} is about the answers of a policy, and {model} is a reward model",
                do="leave it away, or name a policy",
                where=f"command line: {option}",
            )


def _require_measured(bounds: Sequence[gates.Gate], judges: bool, given: set[str]) -> None:
    """Only what is going to be measured can be required."""
    for bound in bounds:
        if (bound.metric in OF_REWARD) != judges:
            whose = "reward model" if judges else "policy"
            what, do = f"is no figure of a {whose}", "see the list in docs/commands.md"
        elif missing := [option for option in NEEDS.get(bound.metric, ()) if option not in given]:
            what, do = f"needs {' and '.join(missing)}", f"add {' and '.join(missing)}"
        else:
            continue
        raise ConfigError(f"{bound.metric} {what}", do=do, where="command line: --require")


def _flat(found: Mapping[str, Any]) -> dict[str, float]:
    """The figures that can be required; the score is its mean."""
    score = found.get("score")
    plain = {**found, "score": score["mean"] if score else None}
    return {name: plain[name] for name in (*OF_REWARD, *NEEDS) if plain.get(name) is not None}


def _for_people(
    found: Mapping[str, Any], model: str, file: str, against: str | None
) -> Iterator[str]:
    """A line for each figure, a column for each policy, blocks for what has several figures."""
    yield clean(f"{model} on {file}")
    if "pairs" in found:
        yield from as_lines(_verdict(found), "  ")
        return
    yield from _aligned(_table(found, model, against))


def _verdict(found: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a reward model, as they are shown."""
    unit = "of the file's scores" if found["regret_unit"] == "score" else "of the rank, 0 to 1"
    by_k = {f"K={k}": value for k, value in found["accuracy_by_k"].items()}
    blocks: dict[str, Any] = {
        "accuracy by K": by_k,
        "accuracy by source": _first("source", found["by_source"]),
        "accuracy by labeler": _first("labeler", found["by_labeler"]),
    }
    return {
        "rankings": found["rankings"],
        "pairs": found["pairs"],
        "accuracy": found["accuracy"],
        "the longer answer wins": found["length_accuracy"],
        "margin": found["margin"],
        "log loss, nats per pair": found["log_loss"],
        "best-of-n regret": f"{found['best_of_n_regret']:.4g} {unit}",
        "calibration error": found["ece"],
        **{name: block for name, block in blocks.items() if block},
        "calibration": found["bins"],
    }


def _first(name: str, shares: Mapping[str, float]) -> list[object]:
    """As many as a person reads."""
    rows = [{name: key, "accuracy": value} for key, value in list(shares.items())[:MOST_NAMES]]
    left = len(shares) - len(rows)
    return [*rows, f"and {left} more, with --json"] if left else list(rows)


def _table(found: Mapping[str, Any], model: str, against: str | None) -> list[list[str]]:
    """The figures of a policy's answers as rows, beside those of the other one where there is one.

    The first cell of a row names it.
    """
    sides = [_side(side) for side in (found, found["against"]) if side]
    rows = [[name, *(side[name] for side in sides)] for name in sides[0]]
    if against is not None:
        rows.insert(0, ["", model, against])
    empty = [""] * (len(sides) - 1)
    return [*rows, *([name, value, *empty] for name, value in _between(found).items())]


def _side(found: Mapping[str, Any]) -> dict[str, str]:
    """The figures of one policy's answers, as they are shown."""
    score = {"score": _interval(found["score"])} if found["score"] else {}
    plain = {
        "length, tokens": found["length"],
        "ended": found["ended"],
        **{f"distinct-{n}": value for n, value in found["distinct_n"].items()},
    }
    curve = {
        f"best of {row['n']}": f"{row['score']:.4g} at KL {row['kl']:.3g}"
        for row in found["best_of_n"] or ()
    }
    return score | {name: "-" if v is None else f"{v:.4g}" for name, v in plain.items()} | curve


def _interval(score: Mapping[str, float | None]) -> str:
    if score["low"] is None or score["high"] is None:
        return f"{score['mean']:.4g}"
    return f"{score['mean']:.4g} (95 %: {score['low']:.4g} to {score['high']:.4g})"


def _aligned(rows: list[list[str]]) -> Iterator[str]:
    """Rows as lines whose cells stand below each other."""
    cleaned = [[clean(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cleaned, strict=True)]
    for row in cleaned:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield ("  " + "  ".join(cells)).rstrip()


def _between(found: Mapping[str, Any]) -> dict[str, str]:
    """What two policies have together, and how many prompts."""
    together = {
        "win rate": found["win_rate"],
        "ties": found["ties"],
        "KL to the other": found["kl"],
        "KL of the other": found["kl_reverse"],
    }
    shown = {name: f"{value:.4g}" for name, value in together.items() if value is not None}
    return shown | {"prompts": str(found["prompts"])}
