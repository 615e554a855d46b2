"""Speculative decoding from within transformers' own `generate`, through its public `custom_generate` argument.

    model.generate(**inputs, custom_generate=custom_generate(draft, head=...), max_new_tokens=64, do_sample=True)

What `generate` has prepared is honoured: the model's generation config, its logits processors and stopping criteria, the
streamer, the kind of output. Where the processors are those that `Sampling` knows, tokens are those of `Decoder` for the same
seed; any others are applied to both models' logits (`processors.Processed`), so the distribution is still that of sampling
without a draft.

Under tensor parallelism (a target loaded in shards, a process for each) every process runs this same loop: the seed, the
costs and the end of an answer are those of the first one, so that all of them run the same passes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from specdecpp.backends import EagerModel
from specdecpp.costs.known import measured
from specdecpp.costs.measuring import measure
from specdecpp.decoder import default_policy
from specdecpp.errors import PairError, PromptError, UnsoundError
from specdecpp.head import AcceptanceHead
from specdecpp.integrations.processors import Processed, as_sampling
from specdecpp.integrations.requests import EncodedPrompt, end_ids, streamer_of_caller
from specdecpp.loading.fingerprints import fingerprint
from specdecpp.loading.models import Checkpoint
from specdecpp.loading.pair import Pair
from specdecpp.loading.tokenizers import check_same_tokenizer, load_tokenizer
from specdecpp.metrics import Metrics
from specdecpp.policies import Costs, Policy
from specdecpp.policies.head import costs_for, heads
from specdecpp.sampling import streams
from specdecpp.session import Session, Step
from specdecpp.verify import TokenVerification, Verification, at, check_lossless, check_rule, is_lossless

MakeModel = Callable[..., EagerModel]
_KEPT_IN = "_specdecpp_runners"
_FOREVER = 1e9
T = TypeVar("T")


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """The output of `generate` with `return_dict_in_generate=True`: the sequences, and what the steps cost."""

    metrics: Metrics | None = None
    lossless: bool | None = None


def custom_generate(
    draft: Any,
    *,
    head: AcceptanceHead | str | Path | None = None,
    policy: Policy | None = None,
    verification: Verification = TokenVerification(),  # noqa: B008 (frozen)
    costs: Costs | None = None,
    seed: int | None = None,
    backend: MakeModel = EagerModel,
    lossless: bool = True,
) -> Callable[..., Any]:
    """A decoding loop for the `custom_generate` of `generate`.

    `draft` is a causal LM of transformers, or its local path or hub name; `head` an acceptance head or where it lies. `policy`,
    `verification`, `costs` and `lossless` are those of `Decoder`. Without `seed`, torch's global generator gives one, so that
    `set_seed` works as it does in transformers. `backend` runs both models: `EagerModel` leaves their weights as they are,
    `LeanModel` is faster and lays out the storage of the weights anew.

    The loop raises ValueError for what it cannot do (batches, beams, scores, a cache that is passed in), with the reason.

    >>> loop = custom_generate("Qwen/Qwen3-0.6B")                                       # doctest: +SKIP
    >>> model.generate(**inputs, custom_generate=loop, max_new_tokens=64)               # doctest: +SKIP
    """
    if policy is None:
        check_lossless(verification, lossless=lossless)
    else:
        check_rule(policy, verification, lossless=lossless)
    loop = _Loop(draft, head=head, policy=policy, verification=verification, costs=costs, seed=seed, backend=backend)

    def generate(
        model: Any,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: Any,
        generation_config: Any,
        streamer: Any = None,
        **more: Any,
    ) -> Any:
        streamer = streamer_of_caller() if streamer is None else streamer
        prompt = EncodedPrompt.of(input_ids, generation_config, more)
        with _evaluating(model, loop.draft):
            session, ranks = loop.session(model, prompt, logits_processor, generation_config)
            sequences, steps = _decoded(session, input_ids, stopping_criteria, streamer, ranks)
        if not generation_config.return_dict_in_generate:
            return sequences
        metrics = Metrics.of(steps, prefill_s=session.prefill_s, num_prompt_tokens=len(prompt.tokens))
        return SpeculativeOutput(sequences=sequences, metrics=metrics, lossless=session.is_lossless)  # pyright: ignore[reportArgumentType]

    return generate


@dataclass(frozen=True, kw_only=True)
class _Match:
    """A target beside the draft: both in backends, what steps cost where the rule asks, and who else runs the target."""

    pair: Pair
    policy: Policy
    costs: Costs | None
    ranks: "_Ranks"


class _Loop:
    """State that stays from one call to the next: the draft, the rule, and the targets that were seen."""

    def __init__(
        self,
        draft: Any,
        *,
        head: AcceptanceHead | str | Path | None,
        policy: Policy | None,
        verification: Verification,
        costs: Costs | None,
        seed: int | None,
        backend: MakeModel,
    ):
        self._is_named = isinstance(draft, str | Path)
        self.draft = Checkpoint(draft, dtype="auto", device=None, device_map=None).model if self._is_named else draft
        self._head = AcceptanceHead.from_pretrained(head) if isinstance(head, str | Path) else head
        self._policy, self._verification, self._costs = policy, verification, costs
        self._seed, self._backend = seed, backend
        self._matches: dict[Any, _Match] = {}

    def session(
        self, model: Any, prompt: EncodedPrompt, processors: LogitsProcessorList, config: Any
    ) -> tuple[Session, "_Ranks"]:
        """A request, ready for its first step."""
        sampling, others = as_sampling(processors, is_greedy=not config.do_sample, num_padding=len(prompt.padding))
        if self._verification.greedy_only and not sampling.is_greedy:
            raise UnsoundError(
                "GreedyVerification keeps the target's distribution only without do_sample. Use TokenVerification() or "
                "BlockVerification()."
            )
        match = self._match(model)
        target, draft = match.pair.target.new_cache(), match.pair.draft.new_cache()
        if outside := [t for t in prompt.tokens if t >= target.vocab_size]:
            raise PromptError(f"token id {outside[0]} is outside the models' common vocabulary of {target.vocab_size} ids.")
        session = Session(
            target=Processed(target, others, before=prompt.padding) if others else target,
            draft=Processed(draft, others, before=prompt.padding) if others else draft,
            policy=match.policy,
            verification=at(sampling, self._verification),
            lossless=is_lossless(self._verification),
            sampling=sampling,
            prompt=prompt.tokens,
            max_tokens=config.max_length - len(prompt.padding) - len(prompt.tokens),
            randomness=streams(0 if sampling.is_greedy else self._agreed_seed(match.ranks)),
            ends=end_ids(config),
            costs=match.costs,
        )
        if session.finish_reason is None:
            session.prefill()
        return session, match.ranks

    def _match(self, model: Any) -> _Match:
        """The target beside the draft; made at the first call, and again when one of them was moved."""
        if self._is_named:
            self.draft.to(model.device)
        key = _state(model), _state(self.draft)
        if key not in self._matches:
            self._matches[key] = self._matched(model)
        return self._matches[key]

    def _matched(self, model: Any) -> _Match:
        ranks = _Ranks.of(model)
        vocab_size = _vocab_size(model, self.draft)
        is_told = self._head is not None or (self._policy is not None and (self._policy.needs_costs or heads(self._policy)))
        pair = Pair(
            target=_backend(model, self._backend, vocab_size),
            draft=_backend(self.draft, self._backend, vocab_size),
            tokenizer=None,
            head=None if self._head is None else self._head.to(self.draft.device),
            target_fingerprint=fingerprint(model) if is_told and ranks.is_alone else None,  # of a shard it says nothing
            draft_fingerprint=fingerprint(self.draft) if is_told else None,  # all weights are read for it
        )
        policy = self._policy or default_policy(pair)
        for head in heads(policy):
            pair.check_head(head)
        costs = self._costs
        if costs is None and policy.needs_costs:
            costs = measured(pair) if ranks.is_alone else ranks.first(measure(pair, budget_s=_FOREVER))
        return _Match(pair=pair, policy=policy, costs=costs and costs_for(policy, costs), ranks=ranks)

    def _agreed_seed(self, ranks: "_Ranks") -> int:
        """The seed of a request: the given one, else from torch's global generator."""
        return ranks.first(int(torch.randint(2**62, ()))) if self._seed is None else self._seed


@dataclass(frozen=True)
class _Ranks:
    """The processes that run one target together; most often it is this one alone."""

    group: Any = None

    @classmethod
    def of(cls, model: Any) -> "_Ranks":
        """Those that hold shards of the model. Raises ValueError for shards that are made for training."""
        mesh = getattr(model, "_device_mesh", None)
        sizes: dict[str, int] = {}
        if mesh is not None:
            sizes = dict(zip(mesh.mesh_dim_names or ("tp",) * mesh.ndim, mesh.shape, strict=True))
        others = [name for name, size in sizes.items() if name != "tp" and size > 1]
        if others or getattr(model, "_is_fsdp_managed_module", False):
            raise ValueError(
                f"the target is sharded by {', '.join(others) or 'fsdp'}, and every process decodes another text or another "
                "part of the model. Load it whole, or with tensor parallelism alone."
            )
        if mesh is None or sizes.get("tp", 1) == 1:
            return cls()
        return cls((mesh if mesh.ndim == 1 else mesh["tp"]).get_group())

    @property
    def is_alone(self) -> bool:
        return self.group is None

    def first(self, value: T) -> T:
        """The value of the first process, in all of them."""
        if self.group is None:
            return value
        found = [value]
        torch.distributed.broadcast_object_list(found, group_src=0, group=self.group)
        return found[0]


def _decoded(session: Session, input_ids: Tensor, criteria: Any, streamer: Any, ranks: _Ranks) -> tuple[Tensor, list[Step]]:
    """Run the steps; what follows the token at which a criterion is met is dropped, as if it had not been decoded yet."""
    steps: list[Step] = []
    while session.finish_reason is None:
        outcome = session.step()
        num_kept, is_met = ranks.first(_until_met(input_ids, outcome.tokens, criteria))
        if num_kept < outcome.num_tokens or (is_met and session.finish_reason is None):
            session.finish_reason = "stop"
            kept = outcome.pieces[:num_kept]
            num_accepted = sum(piece.origin == "accepted" for piece in kept)
            outcome = replace(outcome, pieces=kept, num_accepted=num_accepted, finish_reason="stop")
        steps.append(outcome)
        input_ids = _appended(input_ids, outcome.tokens)
        if streamer is not None:
            for token in outcome.tokens:
                streamer.put(torch.tensor([token]))
    if streamer is not None:
        streamer.end()
    return input_ids, steps


def _until_met(input_ids: Tensor, tokens: list[int], criteria: Any) -> tuple[int, bool]:
    """How many of the tokens there are up to the first one that meets a criterion, and whether one does."""
    for i in range(1, len(tokens) + 1):
        if bool(torch.as_tensor(criteria(_appended(input_ids, tokens[:i]), None)).all()):
            return i, True
    return len(tokens), False


def _appended(input_ids: Tensor, tokens: list[int]) -> Tensor:
    return torch.cat([input_ids, torch.tensor([tokens], device=input_ids.device, dtype=input_ids.dtype)], -1)


def _state(model: Any) -> tuple[Any, ...]:
    """Facts that a backend depends on: it is made anew where this has changed."""
    output = model.get_output_embeddings()
    return model, output, output.weight.device, output.weight.dtype


class _Models(dict[Any, EagerModel]):
    """Backends of a model, kept with it. A copy of the model, or one that was saved, begins without any."""

    def __deepcopy__(self, memo: Any) -> "_Models":
        return _Models()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Models, ()


def _backend(model: Any, make: MakeModel, vocab_size: int) -> EagerModel:
    """A backend for the model, kept with it: each one listens at its output layer, and puts the cache to the test."""
    kept = vars(model).setdefault(_KEPT_IN, _Models())
    key = make, vocab_size, *_state(model)[1:]
    if key not in kept:
        kept[key] = make(model, vocab_size=vocab_size)
    return kept[key]


def _vocab_size(target: Any, draft: Any) -> int:
    """Rows of logits that both models have. Raises `PairError` where their tokenizers differ, or cannot be found to say that
    rows are padding."""
    rows = [int(model.get_output_embeddings().weight.shape[0]) for model in (target, draft)]
    tokenizers = [_tokenizer_of(model) for model in (target, draft)]
    if None not in tokenizers:
        check_same_tokenizer(*tokenizers)
    elif rows[0] != rows[1]:
        raise PairError(
            f"the target scores {rows[0]} ids and the draft {rows[1]}, and nothing says which of them are padding: no "
            "tokenizer lies where the models were loaded from. Save each model with its tokenizer and load it from there."
        )
    num_tokens = max(tokenizers[0].get_vocab().values()) + 1 if tokenizers[0] is not None else 0
    if rows[0] != rows[1] and min(rows) < num_tokens:
        raise PairError(f"a model scores {min(rows)} ids, but the tokenizer has ids up to {num_tokens - 1}. They do not fit.")
    return min(rows)


def _tokenizer_of(model: Any) -> Any:
    """The tokenizer of the folder or hub name that a model was loaded from, if there is one."""
    name = getattr(model, "name_or_path", "")
    if not name or (Path(name).is_dir() and not (Path(name) / "tokenizer.json").is_file()):
        return None
    try:
        return load_tokenizer(name)
    except PairError:
        return None


@contextmanager
def _evaluating(*models: Any) -> Iterator[None]:
    """Without dropout, whatever the caller does with the models before and after."""
    training = [module for model in models for module in model.modules() if module.training]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
