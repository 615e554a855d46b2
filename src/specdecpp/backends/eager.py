"""Any causal LM of transformers, as it is, with a dynamic cache.

The cache keeps *all* positions, also of layers with a sliding window, so that cutting the last n is an exact rollback; the
hidden state is what the output layer reads, caught by a hook during the pass: the model is the user's. A model whose cache
cannot be cut is refused, and a probe tests each model when it is loaded.
"""

import inspect
from collections.abc import Sequence
from threading import get_ident
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import DynamicCache

from specdecpp.backends import trimmed
from specdecpp.backends.base import Cache, check_rollback, scored_rows
from specdecpp.backends.families import POSITIONS
from specdecpp.errors import BackendError


class EagerCache(Cache):
    """One sequence of an `EagerModel`, in a cache of transformers."""

    def __init__(self, model: "EagerModel"):
        super().__init__(model)
        self.held = DynamicCache()  # without the config: every layer keeps every position
        self.length = 0

    def rollback(self, length: int) -> None:
        """Forget everything after the first `length` tokens."""
        check_rollback(length, self.length)
        if length == 0:
            self.held = DynamicCache()
        elif length < self.length:
            layers: list[Any] = self.held.layers
            for layer in layers:  # one by one: a pass that failed may have reached some of them only
                if (more := layer.get_seq_length() - length) > 0:
                    layer.crop(-more)  # negative: how many to remove, in every transformers 5
        self.length = length


class EagerModel:
    """A transformers causal LM. Raises `BackendError` for a model whose cache cannot be rolled back.

    >>> cache = EagerModel(model).new_cache()                      # doctest: +SKIP
    >>> logits, hidden = cache.extend([1, 2, 3], rows=1)            # doctest: +SKIP
    >>> cache.rollback(2)                                           # doctest: +SKIP
    """

    def __init__(self, model: Any, *, vocab_size: int | None = None, probe: bool = True):
        _refuse_unless_rollable(model)
        self.model = model.eval()
        output = model.get_output_embeddings()
        if output is None:
            raise BackendError(
                f"{type(model).__name__} has no output embeddings, so it cannot score tokens. "
                "Load it with AutoModelForCausalLM."
            )
        self._output_layer = output
        config = model.config.get_text_config()
        self.vocab_size = scored_rows(vocab_size, int(output.weight.shape[0]), type(model).__name__)
        self.output_ids = trimmed.of(config, vocab_size=self.vocab_size, device=output.weight.device)
        self.hidden_size = int(output.weight.shape[1])
        self.max_length = max_length(config)
        self.device = model.get_input_embeddings().weight.device
        self._cache_name = _cache_name(model) or ""
        self._takes = inspect.signature(model.forward).parameters
        if probe:
            self._probe()

    @staticmethod
    def refusal(model: Any) -> str | None:
        """None: any model is run as transformers runs it."""
        return None

    def new_cache(self) -> Any:
        """An empty cache."""
        return EagerCache(self)

    def forward(
        self, parts: Sequence[tuple[Any, list[int]]], *, rows: int
    ) -> tuple[Float[Tensor, "rows V"], Float[Tensor, "rows D"]]:
        """Read the parts one after the other (`Model.forward`): torch gives a row other bits in a pass with more rows."""
        found = [self.read(cache, tokens, rows=rows) for cache, tokens in parts]
        if len(found) == 1:
            return found[0]
        return torch.cat([logits for logits, _ in found]), torch.cat([hidden for _, hidden in found])

    def read(self, cache: Any, tokens: list[int], *, rows: int) -> tuple[Float[Tensor, "rows V"], Float[Tensor, "rows D"]]:
        """Append tokens to one cache."""
        start, cache.length = cache.length, cache.length + len(tokens)
        positions = torch.arange(start, cache.length, device=self.device)[None]  # as in `generate`: RoBERTa's own begin later
        known = {"logits_to_keep": rows, "position_ids": positions}
        given = {name: value for name, value in known.items() if name in self._takes}
        try:
            logits, hidden = self.offline_pass(cache.held, input_ids=torch.tensor([tokens], device=self.device), **given)
        except BaseException:
            cache.rollback(start)  # some layers may have them
            raise
        return logits[0, -rows:], hidden[0, -rows:]

    @torch.inference_mode()
    def offline_pass(self, cache: Any = None, **inputs: Any) -> tuple[Float[Tensor, "B T V"], Float[Tensor, "B T D"]]:
        """Logits and hidden states of one plain pass over a batch; inputs and cache are transformers'."""
        found, thread = [], get_ident()

        def catch(_: torch.nn.Module, args: tuple, kwargs: dict) -> None:
            if get_ident() == thread:  # not the pass of another
                found.append(args[0] if args else next(iter(kwargs.values())))

        hook = self._output_layer.register_forward_pre_hook(catch, with_kwargs=True)
        try:
            given = {} if cache is None else {self._cache_name: cache}
            logits = self.model(**({"use_cache": cache is not None} | given | inputs)).logits
        finally:
            hook.remove()
        return self._cut(logits), found[-1]

    def _cut(self, logits: Float[Tensor, "*rows R"]) -> Float[Tensor, "*rows V"]:
        """Cut off the rows that are padding; tokens that are not scored get minus infinity."""
        logits, ids = logits[..., : self.vocab_size], self.output_ids
        return logits if ids is None else trimmed.widened(logits[..., ids], ids, vocab_size=self.vocab_size)

    def _probe(self) -> None:
        """Check that the cache holds what it was given, a token does not see its successor, a rollback leaves no trace."""
        name, ids = type(self.model).__name__, self.output_ids
        cache, self.output_ids = self.new_cache(), None  # all rows are looked at
        first, second = min(1, self.vocab_size - 1), min(2, self.vocab_size - 1)
        try:
            cache.extend([first], rows=1)
            before, _ = cache.extend([second, first], rows=2)
            held = cache.held.get_seq_length()
            cache.rollback(1)
            other, _ = cache.extend([second, second], rows=2)
            cache.rollback(1)
            after, _ = cache.extend([second, first], rows=2)
        except Exception as error:  # whatever a forward pass may raise that does not know this cache
            raise BackendError(
                f"{name} fails in a forward pass with a plain key-value cache ({type(error).__name__}: {error}). "
                "Speculative decoding needs a model that takes a transformers DynamicCache."
            ) from error
        self.output_ids = ids
        if not bool(before.isfinite().all()):
            raise BackendError(
                f"{name} gives logits that are no finite numbers. Its weights or its config.json are damaged, or their type "
                f"({before.dtype}) is too narrow: try another dtype."
            )
        # A mixture of experts groups rows by token, so that half precision rounds them otherwise.
        rough = 1e-3 if before.dtype in (torch.float32, torch.float64) else 5e-2
        plain = "Speculative decoding needs a model with a plain key-value cache."
        if held != 3:
            raise BackendError(f"{name} was given 3 tokens and its cache holds {held}: the two cannot be kept in step. {plain}")
        if (gap := _relative_gap(before[0], other[0])) > rough:
            raise BackendError(
                f"{name} gives a token other logits when another token follows it (relative difference {gap:.3g}), so "
                "it is not causal. Use a causal language model (an encoder needs is_decoder=True in its config)."
            )
        if not (gap := _relative_gap(before, after)) <= 1e-3:
            raise BackendError(
                f"{name} gives other logits after a rollback (relative difference {gap:.3g}): its cache holds state "
                f"that cannot be cut. {plain}"
            )


def max_length(config: Any) -> int | None:
    """The context; with LongRoPE up to where its angles change, since keys in the cache would keep the old ones."""
    lengths = [int(n) for f in POSITIONS if (n := getattr(config, f, None))][:1]
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *rope.values()):
        if isinstance(parameters, dict) and parameters.get("rope_type") == "longrope":
            original = parameters.get("original_max_position_embeddings")
            lengths += [int(n) for n in (original, getattr(config, "original_max_position_embeddings", None)) if n]
    return min(lengths, default=None)


def _relative_gap(a: Tensor, b: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    a, b = a.float(), b.float()  # MPS has no float64
    return float((a - b).abs().max() / a.abs().max().clamp(min=1e-6))


def _refuse_unless_rollable(model: Any) -> None:
    """Raise `BackendError` for models whose kind rules out an exact rollback."""
    name, config = type(model).__name__, model.config
    if getattr(config, "is_encoder_decoder", False):
        raise BackendError(f"{name} is an encoder-decoder. Use a decoder-only (causal) language model.")
    types = getattr(config.get_text_config(), "layer_types", None) or []
    recurrent = {kind for kind in types if "attention" not in kind or "linear" in kind}
    if getattr(model, "_is_stateful", False) or recurrent:
        kinds = f" (layers: {', '.join(sorted(recurrent))})" if recurrent else ""
        raise BackendError(
            f"{name} keeps a recurrent state{kinds}, which cannot be rolled back after a rejected draft token. "
            "Use a model whose layers are all attention."
        )
    if _cache_name(model) is None:
        raise BackendError(f"{name} takes no past_key_values, so it has no cache that can be extended or rolled back.")


def _cache_name(model: Any) -> str | None:
    """Name that a model has for its cache: transformers has renamed it in 5.24. None where it takes none."""
    taken = inspect.signature(model.forward).parameters
    return next((name for name in ("past_key_values", "cache") if name in taken), None)
