"""``rlhf chat``: talk to a policy at the terminal, or through a pipe."""

from __future__ import annotations

import math
from typing import Annotated, Optional

import typer

from rlhf_cli.chat_input import reader
from rlhf_cli.chat_session import ChatSession
from rlhf_cli.commands import options
from rlhf_cli.commands.options import require_choice, require_number, require_place, reward_terms
from rlhf_cli.console import make_reporter, silence_libraries


def chat(
    policy: Annotated[str, typer.Argument(help="A run folder or model folder, or a hub id.")],
    reward: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--reward", metavar="REWARD", help="A reward model or a YAML file of terms."),
    ] = None,
    system: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--system", metavar="TEXT", help="Tell the model how to behave."),
    ] = None,
    form: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--form",
            metavar="[messages|text]",
            help="Ask in turns, or in plain text; default: as the policy was trained.",
        ),
    ] = None,
    max_new_tokens: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            metavar="N",
            help="Tokens per answer at most; default: 256, or half of the model's positions.",
        ),
    ] = None,
    temperature: Annotated[
        float, typer.Option(help="Sampling temperature; 0 takes the most likely token.")
    ] = 1.0,
    top_p: options.TopP = 1.0,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    precision: options.Precision = "auto",
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Talk to a policy; with a reward, see what it says of the answers."""
    require_choice("--form", form, ("messages", "text"))
    require_place(device, precision)
    enough = max_new_tokens is None or max_new_tokens >= 1
    require_number(enough, "--max-new-tokens", max_new_tokens, "1 or more")
    require_number(0 <= temperature < math.inf, "--temperature", temperature, "0 or more")
    require_number(0 < top_p <= 1, "--top-p", top_p, "above 0 and at most 1")
    terms = () if reward is None else reward_terms(reward)
    silence_libraries(debug=debug)
    from stages.chat import Chat, ChatOptions

    wanted = ChatOptions(
        policy=policy,
        reward=terms,
        system=system,
        form=form,  # type: ignore[arg-type]
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        device=device,
        precision=precision,
    )
    with make_reporter(as_json=as_json, quiet=quiet) as reporter:
        read, person = reader()
        ChatSession(Chat(wanted, reporter), reporter, person=person, as_json=as_json).run(read)
