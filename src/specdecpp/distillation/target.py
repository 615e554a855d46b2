"""The target of a distillation: its weights in torch and a backend that writes text. A draft to train on is loaded alike."""

import re
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from specdecpp.backends import EagerModel, LeanModel, Model, NativeModel, families
from specdecpp.distillation import network
from specdecpp.distillation.network import Shape
from specdecpp.errors import BackendError
from specdecpp.loading.choice import ModelSource
from specdecpp.loading.gguf import GGUF, is_gguf
from specdecpp.loading.gguf_writing import Precision
from specdecpp.loading.models import Checkpoint
from specdecpp.loading.pair import common_vocabulary, known_ends
from specdecpp.loading.tokenizers import check_same_tokenizer, check_spells

_FEW_BITS = 6.0
"""Bits a weight, scales included: between formats of four and five bits, and others."""
_LAYER = re.compile(r"^(model\.layers\.)(\d+)\.")


@dataclass(frozen=True)
class Target:
    """A checkpoint or a GGUF file. Raises `PairError` and `BackendError` for what cannot be loaded, or cannot be cut."""

    name: str
    device: str | None = None

    @cached_property
    def source(self) -> ModelSource:
        where = {"dtype": torch.float32, "device": self.device, "device_map": None}
        return GGUF(self.name, **where) if is_gguf(self.name) else Checkpoint(self.name, **where)

    @cached_property
    def model(self) -> Any:
        """The target in float32."""
        model = self.source.model
        if reason := families.refusal(model):
            raise BackendError(
                f"no draft can be cut from {type(model).__name__}: {reason}. Name a model of a family that the compiled "
                "backend knows."
            )
        return model.requires_grad_(False)

    @property
    def config(self) -> Any:
        """Its hyperparameters, for which no weights are read from a GGUF file."""
        return self.source.skeleton.config if isinstance(self.source, GGUF) else self.model.config

    @cached_property
    def quick(self) -> Any:
        """The target with products in bfloat16, where those are quicker."""
        model = self.model
        if not network.is_fast_at_half(model.device):
            return model
        return network.with_half_products(network.of_layers(model, range(len(model.model.layers))))

    @cached_property
    def tokenizer(self) -> Any:
        tokenizer = self.source.tokenizer()
        check_spells(tokenizer, self.name)
        return tokenizer

    @property
    def vocab_size(self) -> int:
        return self.source.num_rows

    @cached_property
    def ends(self) -> tuple[int, ...]:
        return known_ends(self.source.ends(self.tokenizer), vocab_size=self.vocab_size, name=self.name)

    @cached_property
    def precision(self) -> Precision | None:
        """The type of a draft's own layers beside the target's file: four bits where the target's matrices have about as many,
        else eight. None beside a checkpoint, whose draft has no such file."""
        if not isinstance(self.source, GGUF):
            return None
        stored = self.source.stored.items()
        matrices = [w for name, w in stored if name.startswith("model.layers.0.") and len(w.shape) == 2]
        bits = 8 * sum(w.data.nbytes for w in matrices) / sum(w.shape[0] * w.shape[1] for w in matrices)
        return Precision.q4_1 if bits < _FEW_BITS else Precision.q8_0

    @cached_property
    def writer(self) -> NativeModel | EagerModel:
        """A backend that reads many sequences in a pass: compiled code on a CPU, with activations in bytes where the file's
        weights are quantised and bear it (a per cent off, and twice as fast); transformers elsewhere."""
        for kind in ("native-int8", "native"):
            if self.source.refusal(kind) is not None:
                continue
            with suppress(*[BackendError] * (kind == "native-int8")):
                found = self.source.backend(kind, vocab_size=self.vocab_size, num_threads=torch.get_num_threads())
                assert isinstance(found, NativeModel), "both kinds are"
                return found
        return EagerModel(self.quick)

    def backend(self, model: Any, shape: Shape | None) -> Model:
        """A backend as it would run here, to be timed: of the target (no shape), or of a draft that is cut from it, whose own
        layers are stored as the target's are."""
        if model.device.type != "cpu" or NativeModel.refusal(model) is not None:
            return LeanModel(model, probe=False)
        if not isinstance(self.source, GGUF):
            return NativeModel(model, probe=False)
        stored = self.source.stored
        if shape is not None:
            layers = shape.layers(len(self.model.model.layers))
            names = [name for name, _ in model.named_parameters()]
            stored = {name: stored[_LAYER.sub(lambda at: f"{at[1]}{layers[int(at[2])]}.", name)] for name in names}
        activations = None if self.source.refusal("native-int8") else "int8"
        return NativeModel(model, stored=stored, activations=activations, probe=False)


@dataclass(frozen=True)
class Begun:
    """A model that is trained further: a draft that was cut from this target, or (`kept` is 0) a small model."""

    model: Target
    shape: Shape

    @classmethod
    def named(cls, name: str, target: Target) -> "Begun":
        """Raises `PairError` for a model that could not be the target's draft."""
        small = Target(name, target.device)
        model = small.model
        check_same_tokenizer(target.tokenizer, small.tokenizer)
        common_vocabulary(target.source, small.source, num_tokens=max(target.tokenizer.get_vocab().values()) + 1)
        is_like = model.config.hidden_size == target.config.hidden_size
        shape = network.shape_of(model, target.model) if is_like else None
        return cls(small, shape or Shape(kept=0, own=len(model.model.layers)))

    @property
    def is_small(self) -> bool:
        return not self.shape.kept
