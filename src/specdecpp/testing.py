"""Public test doubles: models that are exact tables, and a source of randomness that tries every outcome.

With them the distribution of a decoder is *computed*, not sampled:

    distribution = enumerate_distribution(lambda coins: decode(target, draft, coins=coins))     # {outcome: probability}

and can be compared with the target's own to the last digits of float64. Use them for a policy or a verification of yours.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from copy import copy, deepcopy
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from specdecpp.backends.base import Cache

Outcome = TypeVar("Outcome", bound=Hashable)


class TableModel(Cache):
    """A model and its cache in one: P(next | context) is a table indexed by the last `depth` tokens, exact in float64.

    `table` maps a context (a tuple of at most `depth` ids) to V probabilities. `random` makes one with zeros and near-ties.
    The hidden state is the distribution itself (D = V), so that a head can depend on it.
    """

    def __init__(self, table: dict[tuple[int, ...], Sequence[float]], *, depth: int, max_length: int | None = None):
        self.table = {k: torch.tensor(v, dtype=torch.float64) for k, v in table.items()}
        self.depth = depth
        self.vocab_size = self.hidden_size = len(next(iter(self.table.values())))
        self.max_length = max_length
        self.device = torch.device("cpu")
        self.model = self
        self.tokens: list[int] = []

    @classmethod
    def random(
        cls, *, vocab_size: int, depth: int, seed: int, sparsity: float = 0.2, max_length: int | None = None
    ) -> "TableModel":
        """Dirichlet rows; each entry is zero with probability `sparsity` (a row keeps at least one)."""
        rng = np.random.default_rng(seed)
        table: dict[tuple[int, ...], Sequence[float]] = {}
        for length in range(depth + 1):
            for context in itertools.product(range(vocab_size), repeat=length):
                row = rng.dirichlet(np.full(vocab_size, 0.8)) * (rng.random(vocab_size) >= sparsity)
                row = row if row.sum() > 0 else np.eye(vocab_size)[rng.integers(vocab_size)]
                table[context] = (row / row.sum()).tolist()
        return cls(table, depth=depth, max_length=max_length)

    def distribution(self, context: Sequence[int]) -> Float[Tensor, " V"]:
        """P(next | context) [V]."""
        return self.table[tuple(context)[max(0, len(context) - self.depth) :]]

    @property
    def length(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return len(self.tokens)

    def extend(self, tokens: list[int], *, rows: int) -> tuple[Float[Tensor, "rows V"], Float[Tensor, "rows D"]]:
        assert tokens, "a backend is extended by at least one token"
        self.tokens.extend(tokens)
        total = len(self.tokens)
        assert self.max_length is None or total <= self.max_length, "the context is overrun"
        distributions = torch.stack([self.distribution(self.tokens[: total - rows + 1 + i]) for i in range(rows)])
        return distributions.log(), distributions

    def forward(
        self, parts: "Sequence[tuple[TableModel, list[int]]]", *, rows: int
    ) -> tuple[Float[Tensor, "rows V"], Float[Tensor, "rows D"]]:
        made = [cache.extend(tokens, rows=rows) for cache, tokens in parts]
        return torch.cat([logits for logits, _ in made]), torch.cat([distributions for _, distributions in made])

    def rollback(self, length: int) -> None:
        assert 0 <= length <= len(self.tokens), "cannot roll back to more than there is"
        del self.tokens[length:]

    def new_cache(self) -> "TableModel":
        other = copy(self)
        other.model, other.tokens = self.model, []
        return other


class Enumerator:
    """Randomness that follows a script of choices and records the probability of the path; beyond the script it takes the first
    possible outcome."""

    def __init__(self, script: Sequence[int]):
        self.script = list(script)
        self.taken: list[int] = []
        self.options: list[list[int]] = []
        self.probability = 1.0

    def _choose(self, p: Sequence[float]) -> int:
        possible = [i for i, x in enumerate(p) if x > 0]
        at = len(self.taken)
        choice = self.script[at] if at < len(self.script) else possible[0]
        self.taken.append(choice)
        self.options.append(possible)
        self.probability *= p[choice]
        return choice

    def categorical(self, p: Float[Tensor, " V"]) -> int:
        return self._choose((p / p.sum()).tolist())

    def bernoulli(self, h: Float[Tensor, " K"]) -> Tensor:
        return torch.tensor([bool(self._choose([1 - x, x])) for x in h.tolist()], dtype=torch.bool)


def enumerate_distribution(run: Callable[[Enumerator], Outcome]) -> dict[Outcome, float]:
    """The exact distribution of `run(coins)` over every outcome of its coins: {outcome: probability}. `run` must be
    deterministic given the coins. Paths of probability zero are not walked."""
    distribution: dict[Outcome, float] = defaultdict(float)
    script: list[int] = []
    while True:
        coins = Enumerator(script)
        distribution[run(coins)] += coins.probability
        script = coins.taken
        while script:
            options = coins.options[len(script) - 1]
            later = [i for i in options if i > script[-1]]
            if later:
                script = [*script[:-1], later[0]]
                break
            script = script[:-1]
        if not script:
            return dict(distribution)


def tiny_model(kind: str, *, vocab_size: int = 64, seed: int = 0, hidden_size: int = 32, layers: int = 2, **config: Any) -> Any:
    """A random-weight transformers causal LM of a given `model_type` ("llama", "gpt2", ...), small enough for tests.

    The weights are scaled up so that its distributions are far from uniform and depend on the context. Further names
    are fields of its config, as `sliding_window=8`.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    # Untied: a tied output layer would make the scaled-up model repeat the token it has just read.
    fields = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0, "tie_word_embeddings": False, "vocab_size": vocab_size}
    fields |= {
        "hidden_size": hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
    }
    if kind == "opt":
        fields |= {"ffn_dim": 2 * hidden_size, "word_embed_proj_dim": hidden_size, "do_layer_norm_before": True}
    elif kind != "gpt2":
        fields |= {"intermediate_size": 2 * hidden_size}
    if kind in ("llama", "mistral", "mixtral", "gemma", "qwen2", "qwen3", "gemma3_text", "phi3"):
        fields |= {"num_key_value_heads": 2, "head_dim": hidden_size // 4}
    if kind == "mixtral":
        fields |= {"num_local_experts": 4}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(fields | config))).eval()
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(10.0)
        model.get_output_embeddings().weight.mul_(2.0)
    return model


def tiny_draft(target: Any, *, noise: float = 0.05, seed: int = 2) -> Any:
    """A draft for a tiny model: its weights with relative noise, so that the two agree often, not always."""
    draft = deepcopy(target)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.ndim >= 2:
                scale = noise * parameter.std()
                parameter.add_(scale * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return draft


def tiny_tokenizer(vocab_size: int = 64) -> Any:
    """A fast character-level tokenizer with ids 0 (start), 1 (end) and printable characters after them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = (" abcdefghijklmnopqrstuvwxyz.,!?'0123456789-+=()ABCDEFGHIJKLMNOPQRSTUVWXYZ")[: vocab_size - 3]
    vocabulary = {"<s>": 0, "</s>": 1, "<unk>": 2} | {c: i for i, c in enumerate(characters, 3)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", model_max_length=256
    )


def save_tiny_pair(folder: Path, *, kind: str = "llama", vocab_size: int = 64, **config: Any) -> tuple[Path, Path]:
    """Write a tiny random target of one kind, its draft and their tokenizer under `folder`; the two paths."""
    tokenizer, target = tiny_tokenizer(vocab_size), tiny_model(kind, vocab_size=vocab_size, seed=1, **config)
    for role, model in (("target", target), ("draft", tiny_draft(target))):
        model.save_pretrained(folder / role)
        tokenizer.save_pretrained(folder / role)
    return folder / "target", folder / "draft"


def practice_prompts() -> list[str]:
    """200 user messages of the three kinds the reference pair knows: word problems, functions, instructions."""
    sellers, things = ("Ana", "Ben", "Chen", "Dora", "Emil"), ("apples", "books", "coins", "stickers")
    verbs, nouns = ("average", "reverse", "count", "merge", "filter"), ("values", "names", "rows", "items")
    problems = [
        f"{name} has {n} {thing} and buys {n + 3} more each day. How many {thing} does {name} have after {days} days?\n"
        "Let's think step by step."
        for name, thing, (n, days) in itertools.product(sellers, things, ((4, 3), (12, 5), (25, 2), (7, 9)))
    ]
    functions = [
        f"Write a Python script for this problem:\n\ndef {verb}_{noun}({noun}, limit={n}):\n"
        f'    """Return the {verb} of {noun}, at most {n} of them."""'
        for verb, noun, n in itertools.product(verbs, nouns, (1, 3, 10))
    ]
    topics = ("travel", "cooking", "sleep", "work")
    instructions = [f"Give me {n} tips for {topic}." for n, topic in itertools.product(range(2, 12), topics)]
    instructions += [f"What is {x}?" for x in ("a guitar", "the moon", "democracy", "a tiger", "bread")]
    instructions += [f"Write a short story about {x}." for x in ("a dog", "the sea", "a clock", "rain", "a garden")]
    instructions += [f"Name {n} animals that live in the forest." for n in range(2, 12)]
    return problems + functions + instructions
