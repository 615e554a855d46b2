"""Several draft tokens from one pass of a draft: heads on its last state, one for each further place (Medusa, Cai et al. 2024,
arXiv 2401.10774; on a draft model's state ParallelSpec, Xiao et al. 2024, arXiv 2410.05589).

    pass -> state h -> q_1 -> Y_1,   h + silu(W_1 h) -> q_2 -> Y_2,   h + silu(W_2 h) -> q_3 -> Y_3,   pass -> ...

The distribution of a place does not depend on the draft tokens before it, so it is worth less, and costs an output layer
instead of a pass. It has the shape of a backend: rules, verifications and costs are those of any draft.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from specdecpp.backends.base import Cache, Model

Output = Callable[[Float[Tensor, "rows D"]], Float[Tensor, "rows V"]]
"""The output layer of a draft: logits of its hidden states."""


class ParallelHeads(nn.Module):
    """States that stand for those of later places: number i of them i + 1 places after the next token. Untrained ones repeat
    the last state."""

    def __init__(self, hidden_size: int, num_heads: int):
        super().__init__()
        if num_heads < 1:
            raise ValueError(f"ParallelHeads needs num_heads of at least 1, got {num_heads}")
        self.layers = nn.ModuleList(nn.Linear(hidden_size, hidden_size) for _ in range(num_heads))
        for layer in self.layers:
            for parameter in layer.parameters():
                nn.init.zeros_(parameter)

    def __len__(self) -> int:
        return len(self.layers)

    def forward(self, hidden: Float[Tensor, "*rows D"], i: int) -> Float[Tensor, "*rows D"]:
        return hidden + functional.silu(self.layers[i](hidden))

    def loss(self, hidden: Float[Tensor, "N D"], later: Int[Tensor, "N heads"], output: Output) -> Float[Tensor, " heads"]:
        """Mean cross-entropy of each head in nats. The draft's states say the token after them, `later` the ones behind it."""
        return torch.stack([functional.cross_entropy(output(self(hidden, i)), later[:, i]) for i in range(len(self))])


class ParallelDraft(Cache):
    """A draft that reads the text, and not its own draft tokens while a head has a place for them. See `backends.Backend`.

    `output` gives the logits of the hidden states of `base`. A rollback, as every step ends with, makes the next token one
    of the text: what was drafted meanwhile and stayed is then read with it, in one pass.

    >>> draft = ParallelDraft(pair.draft, heads, model.get_output_embeddings())                    # doctest: +SKIP
    >>> pair = dataclasses.replace(pair, draft=draft, draft_fingerprint=None)                      # doctest: +SKIP
    """

    def __init__(self, base: Model, heads: ParallelHeads, output: Output):
        super().__init__(base)
        self.base, self.heads, self._output = base.new_cache(), heads, output
        self._forget()

    def _forget(self) -> None:
        self._unread: list[int] = []  # tokens that the base has not read
        self._state: Tensor | None = None  # of the last one that it has read, while draft tokens are drafted behind it
        self._num = 0  # heads that have been asked since

    @property
    def length(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.base.length + len(self._unread)

    @torch.inference_mode()
    def extend(self, tokens: list[int], *, rows: int) -> tuple[Float[Tensor, "rows V"], Float[Tensor, "rows D"]]:
        """Append tokens; logits and states of the last `rows`: by a head for one draft token behind the text, else by a
        pass."""
        if self._state is not None and len(tokens) == rows == 1 and self._num < len(self.heads):
            state = self.heads(self._state, self._num)
            self._unread += tokens
            self._num += 1
            return self._output(state)[:, : self.vocab_size], state
        logits, hidden = self.base.extend([*self._unread, *tokens], rows=rows)
        self._forget()
        self._state = hidden[-1:].clone()
        return logits, hidden

    def rollback(self, length: int) -> None:
        """Forget everything after the first `length` tokens."""
        kept = self._unread[: max(0, length - self.base.length)]
        self.base.rollback(min(length, self.base.length))
        self._forget()
        self._unread = kept

    def forward(self, parts: "Sequence[tuple[ParallelDraft, list[int]]]", *, rows: int) -> tuple[Tensor, Tensor]:
        """Append tokens to each; logits and states of the last `rows` of each."""
        logits, hidden = zip(*(cache.extend(tokens, rows=rows) for cache, tokens in parts), strict=True)
        return torch.cat(logits), torch.cat(hidden)

    def new_cache(self) -> "ParallelDraft":
        """An empty one over the same weights."""
        return ParallelDraft(self.model, self.heads, self._output)
