"""A model as the stages use it: the transformers module and how its passes are run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

Kind = Literal["policy", "reward", "critic"]
Mode = Literal["tree", "packed", "padded"]


@dataclass
class Network:
    """A loaded model.

    Attributes:
        module: ``AutoModelForCausalLM`` (policy) or ``AutoModelForSequenceClassification`` with one
            label (reward, critic).
        kind: what it is used as.
        mode: how its passes are laid out, as the probe found for its architecture.
        compute: dtype of the matrix products under autocast, or None to compute as stored.
        mean, std: ``score = (head output - mean) / std`` of a reward model or critic.
        cached: whether answers are decoded with this project's cache, or by transformers.
        adapter: False = its passes run with the module's adapters off. Such a network is the model
            that the adapters were attached to, and shares its weights with the one in training.
    """

    module: PreTrainedModel
    kind: Kind
    mode: Mode
    compute: torch.dtype | None = None
    mean: float = 0.0
    std: float = 1.0
    cached: bool = True
    adapter: bool = True

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return self.module.device

    @property
    def backbone(self) -> nn.Module:
        """The part that turns token ids into hidden states ``[1, N, H]``."""
        return self.module.base_model

    @property
    def head(self) -> nn.Module:
        """The output layer of a policy, or the scalar head of a reward model or critic."""
        if self.kind == "policy":
            return self.module.get_output_embeddings()
        return score_head(self.module)

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """The precision its passes run in; opened around several passes, weights are cast once.

        Adapters are off inside it where the network is the one without them.
        """
        with self._precision(), nullcontext() if self.adapter else switched_off(self.module):
            yield

    def _precision(self) -> AbstractContextManager[object]:
        if self.compute is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.compute)

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Named trainable parameters, tied weights once, in the module's order."""
        return ((n, p) for n, p in self.module.named_parameters() if p.requires_grad)

    def freeze(self) -> Network:
        """No gradients and evaluation mode, for good: reference and reward model.

        What its passes only multiply by is kept in the format they multiply in. Autocast would make
        the same numbers of it in every pass; this takes half the memory and no casts.
        """
        self.module.requires_grad_(False)
        self.module.eval()
        if self.compute is not None:
            _narrow(self.module, self.compute)
        return self


def _narrow(module: nn.Module, dtype: torch.dtype) -> None:
    """Matrices of linear layers in a narrower format, but those that embed tokens as well."""
    embeddings = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    for layer in module.modules():
        if type(layer) in (nn.Linear, Conv1D) and id(layer.weight) not in embeddings:
            layer.weight.data = layer.weight.data.to(dtype)


@contextmanager
def switched_off(module: nn.Module) -> Iterator[None]:
    """The module without its adapters, its head the one it had before, for a while.

    No gradient may be taken inside: peft freezes what it switches off until it is on again.
    """
    # A transformers model has a method of this name too, for adapters that it loaded itself.
    layers = [m for m in module.modules() if not isinstance(m, PreTrainedModel)]
    switches: list[Any] = [m for m in layers if hasattr(m, "enable_adapters")]
    for switch in switches:
        switch.enable_adapters(False)
    try:
        yield
    finally:
        for switch in switches:
            switch.enable_adapters(True)


@contextmanager
def casts_kept(network: Network) -> Iterator[None]:
    """Weights that are not trained are cast once, too, in an ``autocast`` opened inside.

    Autocast keeps the casts of what asks for gradients alone; decoding would cast a frozen weight
    again for each token. No gradient may be taken inside.
    """
    frozen = [p for p in network.module.parameters() if not p.requires_grad]
    for p in frozen:
        p.requires_grad_(True)
    try:
        yield
    finally:
        for p in frozen:
            p.requires_grad_(False)


def without_dropout(network: Network) -> Network:
    """The network with every dropout probability at 0, whatever its mode; its config stays."""
    for module in network.module.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and ("dropout" in name or name.endswith("pdrop")):
                setattr(module, name, 0.0)
    return network


def score_head(module: PreTrainedModel) -> nn.Module:
    """The scalar head of a sequence classification model: ``score``, in some families another."""
    for name in ("score", "classifier"):
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"{type(module).__name__} has no head named score or classifier")
