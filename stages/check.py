"""``rlhf check``: everything that can be known about a run before its first step.

It comes by the same refusals as the stage, with the same exit codes, and then tells: data, the
first example as the model sees it, batches, memory, disk. No weights are read, so weights that are
not finite show in the stage only. Nothing is written into the output folder.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from stages import budget, footprint, inputs, roles, show, terms
from stages.budget import Known
from stages.config import OnlineConfig, StageConfig
from stages.data.report import RoleReport
from stages.models.configured import max_positions, reads_whole
from stages.models.folder import model_folder, read_identity
from stages.models.load import verdict_of
from stages.models.precision import choose
from stages.roles import Model
from stages.runtime import place, start, trackers
from stages.runtime.processes import World
from stages.runtime.reporter import Reporter
from stages.runtime.session import Session, precision_of
from stages.runtime.signals import StopRequest

Report = dict[str, Any]


def run(config: StageConfig, reporter: Reporter, *, dump: str | None = None) -> Report:
    """Check a config of any stage.

    Args:
        config: the resolved config.
        reporter: hears what was recognised and what is probably not meant.
        dump: a file for every encoded example, as JSON lines.

    Returns:
        The report: nested mappings of plain values.

    Raises:
        RlhfError: whatever the stage would refuse the config for.
    """
    with TemporaryDirectory(prefix="rlhf-check-") as scratch:
        session = _session(config, reporter, Path(scratch))
        text = start.text_of(config, stop=_stops(config))
        known = _known(session, config, text)
        report = {
            "stage": config.stage,
            "config": _config(session, config),
            "models": {model.role: _model(model, known) for model in known.models},
            **({"reward": terms.told(config, text)} if isinstance(config, OnlineConfig) else {}),
            "text": _text(text),
            "data": _data(known),
            "batches": budget.batches(known),
            "memory": footprint.memory(known),
            "disk": budget.disk(known),
            "example": show.first(known.inputs.records.train, text.codec),
        }
        if dump is not None:
            lines = show.dump(known.inputs.records, text.codec, dump)
            report["dump"] = {"file": dump, "lines": lines}
    for warning in _warnings(report):
        reporter.warn(warning)
    return report


def _session(config: StageConfig, reporter: Reporter, scratch: Path) -> Session:
    """A session that never opens the output folder; what the cache cannot hold goes to scratch."""
    arithmetic = choose(config.device, config.train.precision)
    place.require(config)
    place.require_unlocked(Path(config.output))
    trackers.require(config)
    started = time.perf_counter()
    return Session(config, scratch, World(), arithmetic, reporter, StopRequest(), started)


def _known(session: Session, config: StageConfig, text: start.Text) -> Known:
    models = roles.models(session, config, text)
    if isinstance(config, OnlineConfig):
        terms.require(config)
    return Known.of(session, config, models, inputs.load(session, config, text))


def _stops(config: StageConfig) -> tuple[str, ...]:
    return config.rollout.stop if isinstance(config, OnlineConfig) else ()


def _config(session: Session, config: StageConfig) -> Report:
    return {
        "preset": config.preset,
        "model": config.model,
        "output": config.output,
        "output_is": place.state_of(Path(config.output)),
        "device": str(session.arithmetic.device),
        "precision": precision_of(session.arithmetic),
        "seed": config.seed,
    }


def _model(model: Model, known: Known) -> Report:
    folder = model_folder(model.source)
    identity = read_identity(folder) if folder.is_dir() else None
    return {
        "source": model.source,
        "used_as": model.kind,
        "made_by": None if identity is None else f"rlhf {identity.stage}, as a {identity.kind}",
        "family": model.config.model_type,
        "parameters": known.shapes[model.role].parameters,
        "trained_parameters": known.shapes[model.role].trainable if model.trained else 0,
        "shares_the_weights_of": model.shares,
        "positions": max_positions(model.config),
        "layout": "as transformers runs it" if _is_whole(model) else verdict_of(model.config).mode,
        "trained": model.trained,
    }


def _is_whole(model: Model) -> bool:
    return model.kind == "reward" and not model.trained and reads_whole(model.source)


def _text(text: start.Text) -> Report:
    codec = text.codec
    names = codec.tokenizer.convert_ids_to_tokens(list(codec.stop_ids))
    return {
        "vocabulary": len(text.tokenizer),
        "chat_template": codec.template is not None,
        "as_messages": codec.as_messages,
        "pad": f"{text.pad_id}, {text.pad_how.removeprefix('pad token: ')}",
        "stop": [f"{i} {name}" for i, name in zip(codec.stop_ids, names, strict=True)],
    }


def _data(known: Known) -> Report:
    """What was read for each role, and what was left out and why."""
    records, beside = known.inputs
    report: Report = {role.role: _role(role) for role in records.report.roles}
    report["held_out"] = 0 if records.eval is None else len(records.eval)
    if beside is not None:
        name = "demonstrations" if known.config.stage == "reward_model" else "documents"
        report[name] = _role(beside.report.roles[0]) | {"sequences": len(beside.train)}
    return report


def _role(role: RoleReport) -> Report:
    report: Report = {
        "files": list(role.files),
        "format": role.format,
        "records": role.records,
        "kept": role.kept,
        "dropped": {
            reason: {"records": count, "first": role.first.get(reason)}
            for reason, count in role.dropped.items()
        },
        "prompt_tokens": dict(role.prompt_tokens),
        "response_tokens": dict(role.response_tokens),
    }
    if role.answers:
        report["answers_per_prompt"] = {f"K={k}": n for k, n in role.answers.items()}
    return report


def _warnings(report: Report) -> Iterator[str]:
    """What works and is probably not meant."""
    if report["config"]["output_is"] != "free":
        yield (
            f"the output folder is not empty ({report['config']['output_is']}): the stage will ask "
            "for --resume or --overwrite"
        )
    batches, memory = report["batches"], report["memory"]
    if batches.get("times_each_prompt_in_an_iteration", 0) > 1:
        yield (
            f"fewer prompts ({batches['prompts']}) than a rollout asks (rollout.batch_size "
            f"{batches['episodes_per_iteration']}): they repeat with other seeds"
        )
    cut = batches.get("first_batch") or batches["first_minibatch_at_most"]
    if cut["records_over_the_budget"]:
        yield (
            "records longer than train.tokens_per_micro_batch make a micro-batch each: "
            f"{cut['records_over_the_budget']} of the first optimiser batch"
        )
    if memory["fits"] is False:
        yield (
            f"about {memory['peak']:.0f} MiB of memory are needed and {memory['free']:.0f} are "
            "free: lower train.tokens_per_micro_batch, set train.gradient_checkpointing, or train "
            "adapters alone (lora)"
        )
