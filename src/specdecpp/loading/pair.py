"""A pair: the target, the draft, their one tokenizer and, where there is one, the head; checked to fit each other.

With no names, `load_pair()` gives the small reference pair that ships with the package; `load_pair("smollm2")` a real model.
"""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from specdecpp.backends import Model
from specdecpp.backends.kept import Kept
from specdecpp.errors import PairError
from specdecpp.head import AcceptanceHead
from specdecpp.loading import PAIRS, shipped
from specdecpp.loading.choice import ModelSource, choose, model_of
from specdecpp.loading.tokenizers import check_same_tokenizer, check_spells
from specdecpp.loading.vocabulary import DraftVocabulary, reduced

log = logging.getLogger("specdecpp.loading")
REFERENCE = shipped.REFERENCE


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A target p and a draft q over one vocabulary. Build it with `load_pair`, or from backends of your own.

    `ends` are the ids that end a text. The names and fingerprints say what the models are, for error messages and cards.
    """

    target: Model
    draft: Model
    tokenizer: Any
    head: AcceptanceHead | None = None
    ends: tuple[int, ...] = ()
    sampling: Mapping[str, float] = field(default_factory=dict)
    """Parameters of the target's generation_config for where a request names nothing: temperature, top_k, top_p, ..."""
    target_name: str = "target"
    draft_name: str = "draft"
    target_fingerprint: str | None = None
    draft_fingerprint: str | None = None
    backends: str = "as they were given"
    """The kind of backends, and the reason."""
    identities: tuple[dict[str, Any], ...] = ()
    """Facts that tell the two models from others for measurements: a quantised file may have its checkpoint's fingerprint."""
    kept: Kept = field(default_factory=Kept, init=False, repr=False, compare=False)
    """The caches of its last requests, for those that begin alike."""
    measured: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Costs that this process knows (`costs.measuring.known`): the same for all decoders, so that a seed repeats."""

    def __post_init__(self) -> None:
        if self.target.vocab_size != self.draft.vocab_size:
            raise PairError(
                f"the target scores {self.target.vocab_size} ids and the draft {self.draft.vocab_size}. Cut both to their "
                "common vocabulary (EagerModel(model, vocab_size=...)), as load_pair does."
            )
        if self.head is not None:
            self.check_head(self.head)

    def __reduce__(self) -> Any:
        raise TypeError(
            "a Pair, and a Decoder with it, holds models in this process and cannot be pickled or copied. Send the "
            "models' names, and call load_pair and Decoder there."
        )

    @property
    def is_identified(self) -> bool:
        """True where its models are known from others, so that figures of it can be kept for later processes."""
        return self.target_fingerprint is not None and self.draft_fingerprint is not None

    @property
    def names(self) -> dict[str, str]:
        """The names of the models for a file that travels: no folders of this machine."""
        return {"target": short_name(self.target_name), "draft": short_name(self.draft_name)}

    @property
    def default_head(self) -> AcceptanceHead | None:
        """The head that the default rule asks, if it is worth its time by its card; else the rule goes by q."""
        return self.head if self.head is not None and self.head.card.by_default else None

    def check_head(self, head: AcceptanceHead) -> None:
        """Raise `HeadError` unless the head fits this pair."""
        head.check(
            hidden_size=self.draft.hidden_size,
            vocab_size=self.draft.vocab_size,
            target=self.target_fingerprint,
            draft=self.draft_fingerprint,
        )


def load_pair(
    target: str | Path | None = None,
    *,
    draft: str | Path | None = None,
    head: str | Path | None = None,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str | None = None,
    device_map: Any = None,
    tokenizer: Any = None,
    backend: str | Collection[str] | None = None,
    draft_vocabulary: DraftVocabulary = "auto",
) -> Pair:
    """Load two causal LMs by local path, hub name or GGUF file, check that they fit, and wrap them in backends.

    A pair may have a name of its own, which stands for all three: "reference" (that of no names) and "smollm2", a real model
    with a draft and a head of ours, whose file another package brings. For a target without a draft, draft tokens are copied
    from the prompt and the answer (`drafters.SuffixDrafter`).

    dtype is that of the weights: a torch dtype, its name, or "auto" (as stored; float32 for the reference pair). `device_map`
    goes to transformers as it is and excludes `device`. For a GGUF file dtype ("auto": bfloat16 on a GPU, else float32) and
    device are those of its values written out; native and llama.cpp take it as it is.

    `backend` names how forward passes are run, or several ways, of which the first is taken that can run the models here;
    without it all are tried, the fast ones first (`choice.choose`). `Pair.backends` says why it is this one.

    `draft_vocabulary` is how many tokens the draft scores beside those of the text (None: all), so that its output layer costs
    less; `native` has that. "auto" takes it where a draft token becomes at least a tenth cheaper, as with most vocabularies of
    a hundred thousand tokens. What is left out is never drafted, which changes no distribution; where a text has many such
    tokens, all are scored again.

    A later load on this machine is quick: fingerprints, checks and the choice are remembered (`cache_dir.folder`). The logger
    "specdecpp.loading" says at INFO what is being done.

    Raises `PairError` (tokenizers differ or cannot spell, unreadable model), `BackendError` (a cache that cannot be rolled
    back, a backend that cannot run the model), `HeadError`, `MissingExtraError` (llama.cpp, or the file of "smollm2").

    >>> pair = load_pair("Qwen/Qwen3-8B", draft="Qwen/Qwen3-0.6B", dtype="bfloat16", device="cuda")    # doctest: +SKIP
    >>> pair = load_pair("target.gguf", draft="draft.gguf")                                            # doctest: +SKIP
    >>> pair = load_pair("smollm2")                                                                    # doctest: +SKIP
    """
    own_sampling = {} if draft else shipped.SAMPLING.get(str(target), {})
    if draft is None and (parts := shipped.names("reference" if target is None else str(target))):
        target, draft, head = parts.target, parts.draft, head or parts.head
        dtype = torch.float32 if dtype == "auto" else dtype
    for name in (target, draft):
        if draft and str(name) in PAIRS and not Path(str(name)).exists():
            raise PairError(
                f"{name} is the name of a whole pair, which has a draft of its own. Leave the draft out, or give the folder, "
                "file or hub name of each model."
            )
    if target is None:
        raise PairError("only the draft was named. Name the target too, or neither for the reference pair.")
    if draft is None and head is not None:
        raise PairError(
            f"the head {head} was named and no draft: it judges by the states of one. Name the draft that it was trained "
            "for, or no head."
        )
    if device is not None and device_map is not None:
        raise ValueError(f"both device={device!r} and device_map={device_map!r} were given. Give one of them.")
    where = {"dtype": dtype, "device": device, "device_map": device_map}
    p = model_of(target, **where)
    q = p if draft is None or str(draft) == str(target) else model_of(draft, **where)
    if tokenizer is None:
        log.info("reading the tokenizer of %s", p.name)
        tokenizer = p.tokenizer()
        check_spells(tokenizer, p.name)
        if q is not p and (not p.words or p.words != q.words):  # those of the same files are one
            other = q.tokenizer()
            check_spells(other, q.name)
            check_same_tokenizer(tokenizer, other)
    else:
        check_spells(tokenizer, "tokenizer=")
    vocab_size = common_vocabulary(p, q, num_tokens=max(tokenizer.get_vocab().values()) + 1)
    kinds = [backend] if isinstance(backend, str) else backend
    p_model, q_model, reason = choose(p, None if draft is None else q, vocab_size=vocab_size, kinds=kinds)
    q_model, words = reduced(q_model, draft_vocabulary, tokenizer=tokenizer, identity=q.identity)
    return Pair(
        target=p_model,
        draft=q_model,
        tokenizer=tokenizer,
        head=None if head is None else AcceptanceHead.from_pretrained(head).to(q_model.device),
        ends=known_ends(p.ends(tokenizer), vocab_size=vocab_size, name=p.name),
        sampling={**p.sampling, **own_sampling},
        target_name=str(target),
        draft_name="none: copies of the text (suffix)" if draft is None else str(draft),
        target_fingerprint=p.fingerprint,
        draft_fingerprint="suffix-1" if draft is None else q.fingerprint,
        backends=reason + words,
        identities=(p.identity, q.identity | ({"vocabulary": words.partition(":")[0]} if words else {})),
    )


def known_ends(ends: tuple[int, ...], *, vocab_size: int, name: str) -> tuple[int, ...]:
    """Those ids of a text's end that the models have: where none is left, answers go on to max_tokens."""
    known = tuple(i for i in ends if isinstance(i, int) and 0 <= i < vocab_size)
    if unknown := [i for i in ends if i not in known]:
        log.warning("%s: the ids %s end a text, and the models have ids up to %d", name, unknown, vocab_size - 1)
    return known


def common_vocabulary(target: ModelSource, draft: ModelSource, *, num_tokens: int) -> int:
    """V: rows of logits both models have; rows past the tokenizer's ids are padding and are cut where they differ.

    Raises `PairError` when a model has fewer rows than the tokenizer has ids.
    """
    for role, model in (("target", target), ("draft", draft)):
        if model.num_rows < num_tokens:
            raise PairError(
                f"the {role} scores {model.num_rows} ids, but the tokenizer has ids up to {num_tokens - 1}. The {role} and the "
                "tokenizer do not belong together; load the tokenizer the model was trained with."
            )
    return min(target.num_rows, draft.num_rows)


def short_name(name: str) -> str:
    """The end of a folder's path, which tells a model from others; a hub name as it is."""
    return "/".join(Path(name).parts[-2:])
