"""Where and in which number format a model computes."""

from __future__ import annotations

from typing import NamedTuple

import torch

from stages.errors import ConfigError


class Arithmetic(NamedTuple):
    """The device, the dtype of stored weights and the autocast dtype (None: as stored)."""

    device: torch.device
    weights: torch.dtype
    compute: torch.dtype | None


def choose(device: str, precision: str, *, local_rank: int = 0) -> Arithmetic:
    """Device and precision from the config's words.

    Args:
        device: ``auto | cpu | cuda | mps``.
        precision: ``auto | bf16 | fp32 | fp64``; auto is bf16 where the hardware has fast bf16.
        local_rank: the process's number on this machine, which picks its GPU.

    Raises:
        ConfigError: the device is not there.
    """
    where = _device(device, local_rank)
    if precision == "fp64":
        return Arithmetic(where, torch.float64, None)
    half = precision == "bf16" or (precision == "auto" and fast_bf16(where))
    return Arithmetic(where, torch.float32, torch.bfloat16 if half else None)


def fast_bf16(device: torch.device) -> bool:
    """Whether bf16 matrix products are computed by units of their own, not emulated."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "cpu":
        checks = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
        return any(getattr(torch.cpu, name, lambda: False)() for name in checks)
    return False


def order_sums(device: torch.device) -> None:
    """Have a CPU add in a fixed order wherever torch could add in that of its threads.

    Equal runs, and resumed ones, then end with equal bits whatever operations a family uses.
    """
    if device.type == "cpu":
        torch.use_deterministic_algorithms(True, warn_only=True)
        # A debugging aid that costs; torch gives its module this property as it is imported.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _device(name: str, local_rank: int) -> torch.device:
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if name == "auto":
        name = "cuda" if cuda else "mps" if mps else "cpu"
    if (name == "cuda" and not cuda) or (name == "mps" and not mps):
        raise ConfigError(
            f"{name} is not available on this machine",
            where="device",
            do="set device: auto, or install a build of PyTorch for this device",
        )
    return torch.device("cuda", local_rank) if name == "cuda" else torch.device(name)
