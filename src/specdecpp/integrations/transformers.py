"""Speculative decoding within transformers' own `generate`, through its public `custom_generate` argument.

    model.generate(**inputs, custom_generate=custom_generate(draft, head=...), max_new_tokens=64, do_sample=True)

The loop honours the model's generation config, its logits processors and stopping criteria, the streamer and the kind of
output. Where the processors are those that `Sampling` knows, tokens are those of `Decoder` for the same seed; any others are
applied to both models' logits (`processors.Processed`), so the distribution is still that of sampling without a draft.

Under tensor parallelism (a target loaded in shards, a process for each) every process runs this same loop: the seed, the
costs and the end of an answer are those of the first one, so that all of them run the same passes.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GenerateDecoderOnlyOutput

from specdecpp.backends import EagerModel
from specdecpp.costs.measuring import measure, measured
from specdecpp.decoder import default_policy
from specdecpp.errors import PairError, PromptError, UnsoundError
from specdecpp.head import AcceptanceHead
from specdecpp.integrations.processors import Processed, as_sampling
from specdecpp.loading.fingerprints import fingerprint
from specdecpp.loading.models import Checkpoint
from specdecpp.loading.pair import Pair
from specdecpp.loading.tokenizers import check_same_tokenizer, load_tokenizer
from specdecpp.metrics import Metrics
from specdecpp.policies import Costs, Policy
from specdecpp.policies.head import costs_for, heads
from specdecpp.policy_spec import policy_of
from specdecpp.sampling import streams
from specdecpp.session import Session, Step
from specdecpp.verify import TokenVerification, Verification, check_lossless, check_rule, is_lossless, verification_for

MakeModel = Callable[..., EagerModel]
_FOREVER = 1e9
_KEPT = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
_PREPARED = ("attention_mask", "position_ids", "past_key_values", "cache", "use_cache", "logits_to_keep", "cache_position")
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
    policy: Policy | str | None = None,
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
    head = AcceptanceHead.from_pretrained(head) if isinstance(head, str | Path) else head
    policy = None if policy is None else policy_of(policy, head)
    if policy is None:
        check_lossless(verification, lossless=lossless)
    else:
        check_rule(policy, verification, lossless=lossless)
    is_named = isinstance(draft, str | Path)
    return _Loop(
        draft=Checkpoint(draft, dtype="auto", device=None, device_map=None).model if is_named else draft,
        is_ours=is_named,
        head=head,
        policy=policy,
        verification=verification,
        costs=costs,
        seed=seed,
        backend=backend,
    )


@dataclass(frozen=True, kw_only=True)
class _Match:
    """A target beside the draft; `ranks` are the processes that hold its shards, None for this one alone."""

    pair: Pair
    policy: Policy
    costs: Costs | None
    ranks: Any


@dataclass(frozen=True, kw_only=True)
class _Loop:
    """A decoding loop, with the targets that it has decoded for."""

    draft: Any
    is_ours: bool
    """True for a draft that was loaded here, and follows the target from device to device."""
    head: AcceptanceHead | None
    policy: Policy | None
    verification: Verification
    costs: Costs | None
    seed: int | None
    backend: MakeModel
    matches: dict[Any, _Match] = field(default_factory=dict)

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: Any,
        generation_config: Any,
        streamer: Any = None,
        **more: Any,
    ) -> Any:
        """The sequences, as `generate` returns them."""
        streamer = _streamer_of_caller() if streamer is None else streamer
        padding, tokens = _encoded_prompt(input_ids, generation_config, more)
        with _evaluating(model, self.draft):
            match = self._match(model)
            session = self._session(match, padding, tokens, logits_processor, generation_config)
            sequences, steps = _decoded(session, input_ids, stopping_criteria, streamer, match.ranks)
        if not generation_config.return_dict_in_generate:
            return sequences
        metrics = Metrics.of(steps, prefill_s=session.prefill_s, num_prompt_tokens=len(tokens))
        return SpeculativeOutput(sequences=sequences, metrics=metrics, lossless=session.is_lossless)  # pyright: ignore[reportArgumentType]

    def _session(
        self, match: _Match, padding: tuple[int, ...], tokens: list[int], processors: LogitsProcessorList, config: Any
    ) -> Session:
        """A request, ready for its first step."""
        sampling, others = as_sampling(processors, is_greedy=not config.do_sample, num_padding=len(padding))
        if self.verification.greedy_only and not sampling.is_greedy:
            raise UnsoundError("GreedyVerification is exact only without do_sample. Use TokenVerification().")
        caches = [match.pair.target.new_cache(), match.pair.draft.new_cache()]
        if outside := [t for t in tokens if t >= caches[0].vocab_size]:
            raise PromptError(f"token id {outside[0]} is outside the models' common vocabulary of {caches[0].vocab_size} ids.")
        if others:
            caches = [Processed(cache, others, before=padding) for cache in caches]
        is_seeded = sampling.is_greedy or self.seed is not None
        seed = self.seed or 0 if is_seeded else _of_first(int(torch.randint(2**62, ())), match.ranks)
        session = Session(
            target=caches[0],
            draft=caches[1],
            policy=match.policy,
            verification=verification_for(sampling, self.verification),
            lossless=is_lossless(self.verification),
            sampling=sampling,
            prompt=tokens,
            max_tokens=config.max_length - len(padding) - len(tokens),
            randomness=streams(seed),
            ends=_end_ids(config),
            costs=match.costs,
        )
        if session.finish_reason is None:
            session.prefill()
        return session

    def _match(self, model: Any) -> _Match:
        """The target beside the draft; made at the first call, and again when one of them was moved."""
        if self.is_ours:
            self.draft.to(model.device)
        key = _state(model), _state(self.draft)
        if key not in self.matches:
            self.matches[key] = self._matched(model)
        return self.matches[key]

    def _matched(self, model: Any) -> _Match:
        ranks = _ranks(model)
        vocab_size = _vocab_size(model, self.draft)
        needs_prints = self.head is not None or (self.policy is not None and (self.policy.needs_costs or heads(self.policy)))
        pair = Pair(
            target=self.backend(model, vocab_size=vocab_size),
            draft=self.backend(self.draft, vocab_size=vocab_size),
            tokenizer=None,
            head=None if self.head is None else self.head.to(self.draft.device),
            target_fingerprint=fingerprint(model) if needs_prints and ranks is None else None,  # of a shard it says nothing
            draft_fingerprint=fingerprint(self.draft) if needs_prints else None,  # all weights are read for it
        )
        policy = self.policy or default_policy(pair)
        for head in heads(policy):
            pair.check_head(head)
        costs = self.costs
        if costs is None and policy.needs_costs:
            costs = measured(pair) if ranks is None else _of_first(measure(pair, budget_s=_FOREVER), ranks)
        return _Match(pair=pair, policy=policy, costs=costs and costs_for(policy, costs), ranks=ranks)


def _encoded_prompt(input_ids: Tensor, config: Any, more: dict[str, Any]) -> tuple[tuple[int, ...], list[int]]:
    """The padding on the left of the one sequence, and its tokens. Raises ValueError for what would go unheeded."""
    ids, mask, positions = input_ids[0].tolist(), more.get("attention_mask"), more.get("position_ids")
    num = 0 if mask is None else int((mask[0] == 0).long().cumprod(0).sum())
    mode, cache = config.get_generation_mode(), more.get("cache", more.get("past_key_values"))  # renamed in transformers 5.24
    unknown = [name for name, value in more.items() if name not in _PREPARED and value is not None and value is not False]
    kept = [name for name in _KEPT if getattr(config, name, False)]
    refusals = {
        f"speculative decoding here runs one sequence at a time, got {len(input_ids)} (a batch, beams or "
        "num_return_sequences): steps of several sequences end at different places. Call generate for each.": (
            len(input_ids) != 1
        ),
        f"{mode.value.replace('_', ' ')} is another way to decode, and custom_generate is one already.": (
            mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
        ),
        f"{', '.join(kept)} is not supported: the target reads several positions at once, and keeps none of them.": bool(kept),
        f"cache_implementation={config.cache_implementation!r} is not supported: draft tokens that are rejected are cut from "
        "the cache. Leave it out.": config.cache_implementation not in (None, "dynamic"),
        "past_key_values is not supported: the draft has not read what is in it, and it would not be filled. Leave it out and "
        "pass the whole text.": cache is not None and (getattr(cache, "_is_user_defined", False) or cache.get_seq_length() > 0),
        f"{', '.join(sorted(unknown))}: not supported by speculative decoding, where both models read input_ids alone.": (
            bool(unknown)
        ),
        "the attention mask hides tokens in the middle or at the end. Only padding on the left can be left out.": (
            mask is not None and not mask[0, num:].all()
        ),
        "position_ids other than 0, 1, 2, ... are not supported: the backends count for themselves. Leave them out.": (
            positions is not None and positions.flatten()[num:].tolist() != list(range(len(ids) - num))
        ),
    }
    if hold := [reason for reason, holds in refusals.items() if holds]:
        raise ValueError(hold[0])
    return tuple(ids[:num]), ids[num:]


def _end_ids(config: Any) -> tuple[int, ...]:
    ends = config.eos_token_id
    return () if ends is None else tuple(ends) if isinstance(ends, list | tuple) else (int(ends),)


def _streamer_of_caller() -> Any:
    """The streamer of the `generate` that called, which transformers 5 does not hand on to a callable."""
    frame = inspect.currentframe()
    while frame is not None and not (frame.f_code.co_name == "generate" and "custom_generate" in frame.f_locals):
        frame = frame.f_back
    return frame.f_locals.get("streamer") if frame is not None else None


def _ranks(model: Any) -> Any:
    """The group of processes that hold shards of the model, None for a whole one. Raises ValueError for shards that are made
    for training."""
    mesh = getattr(model, "_device_mesh", None)
    sizes = {} if mesh is None else dict(zip(mesh.mesh_dim_names or ("tp",) * mesh.ndim, mesh.shape, strict=True))
    others = [name for name, size in sizes.items() if name != "tp" and size > 1]
    if others or getattr(model, "_is_fsdp_managed_module", False):
        raise ValueError(
            f"the target is sharded by {', '.join(others) or 'fsdp'}, and every process decodes another text or another "
            "part of the model. Load it whole, or with tensor parallelism alone."
        )
    if mesh is None or sizes.get("tp", 1) == 1:
        return None
    return (mesh if mesh.ndim == 1 else mesh["tp"]).get_group()


def _of_first(value: T, ranks: Any) -> T:
    """The value of the first process, in all of them."""
    found = [value]
    if ranks is not None:
        torch.distributed.broadcast_object_list(found, group_src=0, group=ranks)
    return found[0]


def _decoded(session: Session, input_ids: Tensor, criteria: Any, streamer: Any, ranks: Any) -> tuple[Tensor, list[Step]]:
    """Run the steps; what follows the token at which a criterion is met is dropped, as if it had not been decoded yet."""
    steps: list[Step] = []
    while session.finish_reason is None:
        outcome = session.step()
        num_kept, is_met = _of_first(_until_met(input_ids, outcome.tokens, criteria), ranks)
        if num_kept < outcome.num_tokens or (is_met and session.finish_reason is None):
            session.finish_reason = "stop"
            pieces = outcome.pieces[:num_kept]
            num_accepted = sum(piece.origin == "accepted" for piece in pieces)
            outcome = replace(outcome, pieces=pieces, num_accepted=num_accepted, finish_reason="stop")
        steps.append(outcome)
        input_ids = _appended(input_ids, outcome.tokens)
        if streamer is not None:
            for token in outcome.tokens:
                streamer.put(torch.tensor([token]))
    if streamer is not None:
        streamer.end()
    return input_ids, steps


def _until_met(input_ids: Tensor, tokens: list[int], criteria: Any) -> tuple[int, bool]:
    """(number of tokens up to the first one that meets a criterion, True if one does)."""
    for i in range(1, len(tokens) + 1):
        if bool(torch.as_tensor(criteria(_appended(input_ids, tokens[:i]), None)).all()):
            return i, True
    return len(tokens), False


def _appended(input_ids: Tensor, tokens: list[int]) -> Tensor:
    return torch.cat([input_ids, torch.tensor([tokens], device=input_ids.device, dtype=input_ids.dtype)], -1)


def _state(model: Any) -> tuple[Any, ...]:
    """Facts that a backend depends on: another is made where they have changed."""
    output = model.get_output_embeddings()
    return model, output, output.weight.device, output.weight.dtype


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
    """Turn dropout off in this block."""
    training = [module for model in models for module in model.modules() if module.training]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
