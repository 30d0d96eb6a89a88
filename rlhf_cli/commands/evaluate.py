"""``rlhf evaluate``: a reward model against rankings, or a policy on prompts, in figures."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from rlhf_cli import gates
from rlhf_cli.commands import options
from rlhf_cli.commands.check import as_lines
from rlhf_cli.commands.sample import check_numbers
from rlhf_cli.console import clean, make_reporter, silence_libraries
from stages.errors import ConfigError

if TYPE_CHECKING:
    from stages.runtime.reporter import Reporter

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
            help="Score the answers with this reward model.",
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
    max_new_tokens: Annotated[int, typer.Option(help="Tokens per answer at most.")] = 64,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Sample from this share of probability.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal answers.")] = 0,
    limit: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--limit", metavar="N", help="Only the first N records.", show_default=False),
    ] = None,
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
    sizes = _sizes(best_of)
    bounds = [gates.parse_figure(text, (*OF_REWARD, *NEEDS)) for text in require or ()]
    silence_libraries(debug=debug)
    from stages.models.load import is_reward_model

    judges = is_reward_model(model)
    named = {"--reward": reward, "--against": against}
    _require_measured(bounds, judges, {name for name, value in named.items() if value is not None})
    if judges:
        _refuse_given(context, model)
    with make_reporter(as_json=as_json, quiet=quiet) as reporter:
        if judges:
            found = _of_reward(model, file, limit, reporter)
        else:
            drawing = (k, max_new_tokens, temperature, top_p, seed)
            found = _of_policy((model, against, reward), file, sizes, drawing, limit, reporter)
    if not as_json:
        print("\n".join(_for_people(found, f"{model} on {file}", against)), flush=True)
    gates.check(bounds, _flat(found), do="improve the model, or change the bound")
    if as_json:
        print(json.dumps(found, allow_nan=False), flush=True)


def _of_reward(model: str, file: str, limit: int | None, reporter: Reporter) -> dict[str, Any]:
    from stages.evaluate import RewardOptions, of_reward

    return of_reward(RewardOptions(model, file, limit), reporter)


def _of_policy(
    models: tuple[str, str | None, str | None],
    file: str,
    sizes: tuple[int, ...],
    drawing: tuple[int, int, float, float, int],
    limit: int | None,
    reporter: Reporter,
) -> dict[str, Any]:
    from stages.answers import Drawing
    from stages.comparison import Names
    from stages.evaluate import PolicyOptions, of_policy

    options = PolicyOptions(Names(*models), file, sizes, Drawing(*drawing), limit)
    return of_policy(options, reporter)


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


def _for_people(found: Mapping[str, Any], title: str, against: str | None) -> Iterator[str]:
    """A line for each figure, tables for what has several."""
    yield clean(title)
    rows = _verdict(found) if "pairs" in found else _answers(found, against)
    yield from as_lines(rows, "  ")


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


def _answers(found: Mapping[str, Any], against: str | None) -> dict[str, Any]:
    """The figures of a policy, as they are shown, and of the one beside it."""
    pair = {
        "win rate": found["win_rate"],
        "ties": found["ties"],
        "KL to the other, nats per answer": found["kl"],
        "KL from the other, nats per answer": found["kl_reverse"],
    }
    beside = found["against"]
    return {
        "prompts": found["prompts"],
        **_side(found),
        **{name: value for name, value in pair.items() if value is not None},
        **({"against": {"policy": against, **_side(beside)}} if beside else {}),
    }


def _side(found: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of one policy's answers."""
    score = found["score"] and _interval(found["score"])
    return {
        **({"score": score} if score else {}),
        "length, tokens": found["length"],
        "ended": found["ended"],
        **{f"distinct-{n}": value for n, value in found["distinct_n"].items()},
        **({"best of n": found["best_of_n"]} if found["best_of_n"] else {}),
    }


def _interval(score: Mapping[str, float | None]) -> str:
    if score["low"] is None or score["high"] is None:
        return f"{score['mean']:.4g}"
    return f"{score['mean']:.4g} (95 %: {score['low']:.4g} to {score['high']:.4g})"
