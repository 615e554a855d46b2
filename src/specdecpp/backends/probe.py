"""Check that a backend computes its model: logits of a few tokens against those of transformers in float32.

Modules run on float32 values, each put in place for the time of one call, so that the weights never lie in memory twice.
transformers in bfloat16 is no measure: its rounding may be larger than the errors that are looked for.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from specdecpp.backends.base import Model
from specdecpp.errors import BackendError

NUM_TOKENS = 24
TOLERANCE = 1e-3
"""How far sums in float32 may be from those of transformers; relative, see `gap`."""
ROUGH = 2.0
"""How much further a backend in half precision may be from float32 than transformers in that precision. It was 1.25 times in
the worst of 96 random models and 4 trained ones; with norms that are 5 % too large it is 5 times. A model that half precision
ruins is hardly checked."""

ValueOf = Callable[[str], Tensor]


def check(
    backend: Model,
    model: Any,
    *,
    manner: str,
    limit: float = TOLERANCE,
    is_rough: bool = False,
    value_of: ValueOf | None = None,
) -> None:
    """Raise `BackendError` unless a backend gives the logits that `model` gives in float32.

    A backend `is_rough` that rounds its sums to the type of the weights; it may lose what transformers loses there. `manner`
    completes "run ..." in the message.
    """
    ids = tokens(backend.vocab_size, backend.max_length)
    wide = expected(model, ids, value_of=value_of)
    if is_rough:
        with torch.inference_mode():
            own = model(input_ids=torch.tensor([ids], device=_device(model)), use_cache=False).logits[0]
        limit = max(limit, ROUGH * gap(own, wide))
    scored = getattr(backend, "output_ids", None)
    scored = torch.arange(backend.vocab_size) if scored is None else scored.cpu()
    is_off = gap(observed(backend, ids)[:, scored], wide[:, scored])
    if not is_off <= limit:  # NaN is no agreement
        raise BackendError(
            f"{type(model).__name__} run {manner} gives other logits than transformers in float32 (relative difference "
            f"{is_off:.2g}, up to {limit:.2g} is rounding). Use EagerModel."
        )


def tokens(vocab_size: int, max_length: int | None = None) -> list[int]:
    """Ids from all over the vocabulary but for its ends, where special tokens and padding lie, in an order of their own."""
    return [(2 * (7 * i % NUM_TOKENS) + 3) * vocab_size // (2 * NUM_TOKENS + 6) for i in range(NUM_TOKENS)][:max_length]


@torch.inference_mode()
def expected(model: Any, tokens: list[int], *, value_of: ValueOf | None = None) -> Float[Tensor, "n V"]:
    """Logits of the model's own forward pass in float32, on the CPU. `value_of` gives a parameter by its name in
    `named_parameters`, for a model whose own are on the meta device."""
    device = None if value_of is not None else _device(model)
    with _widened(model, value_of):
        logits = model(input_ids=torch.tensor([tokens], device=device), use_cache=False).logits
    return logits[0].float().cpu()


def observed(backend: Model, tokens: list[int]) -> Float[Tensor, "n V"]:
    """Logits of a backend after every token: read at once, one by one, and several behind those; on the CPU."""
    first, last = 3 * len(tokens) // 5 or 1, 4 * len(tokens) // 5
    parts, cache = [tokens[:first], *([token] for token in tokens[first:last]), tokens[max(first, last) :]], backend.new_cache()
    return torch.cat([cache.extend(part, rows=len(part))[0].float().cpu() for part in parts if part])


def gap(found: Float[Tensor, "n V"], expected: Float[Tensor, "n V"]) -> float:
    """|found - expected| / |expected| in the Euclidean norm of all logits: rounding of a single one is up to chance."""
    found, expected = found.float().cpu(), expected.float().cpu()
    return float((found - expected).norm() / expected.norm().clamp(min=1e-6))


def _device(model: Any) -> Any:
    return model.get_input_embeddings().weight.device


@contextmanager
def _widened(model: nn.Module, value_of: ValueOf | None) -> Iterator[None]:
    """Every module finds float32 values in place of its own parameters while it is called."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}  # one for tied ones
    handles, held = [], {}

    def put(module: nn.Module, *_: Any) -> None:
        held[module] = dict(module._parameters)
        for own, parameter in held[module].items():
            if parameter is not None:
                value = parameter.detach() if value_of is None else value_of(names[id(parameter)])
                module._parameters[own] = nn.Parameter(
                    value if value.dtype.itemsize > 4 else value.float(), requires_grad=False
                )

    def take(module: nn.Module, *_: Any) -> None:
        if module in held:
            module._parameters.update(held.pop(module))

    try:
        for module in model.modules():
            if module._parameters:
                handles.append(module.register_forward_pre_hook(put, prepend=True))
                handles.append(module.register_forward_hook(take, always_call=True))
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module in list(held):
            take(module)
