"""A pair: the target, the draft, their one tokenizer and, where there is one, the head; checked to fit each other.

With no names, `load_pair()` gives the small reference pair that ships with the package.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specdecpp.errors import PairError
from specdecpp.head import AcceptanceHead
from specdecpp.runners import Runner, runner_for
from specdecpp.tokenizers import check_same_tokenizer

REFERENCE = Path(__file__).parent / "reference"


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A target p and a draft q over one vocabulary. Build it with `load_pair`, or from runners of your own.

    `ends` are the ids that end a text. The names and fingerprints say what the models are, for error messages and cards.
    """

    target: Runner
    draft: Runner
    tokenizer: Any
    head: AcceptanceHead | None = None
    ends: tuple[int, ...] = ()
    target_name: str = "target"
    draft_name: str = "draft"
    target_fingerprint: str | None = None
    draft_fingerprint: str | None = None

    def __post_init__(self) -> None:
        if self.target.vocab_size != self.draft.vocab_size:
            raise PairError(
                f"the target scores {self.target.vocab_size} ids and the draft {self.draft.vocab_size}. Cut both to their "
                "common vocabulary (EagerRunner(model, vocab_size=...)), as load_pair does."
            )
        if self.head is not None:
            self.check_head(self.head)

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
    lean: bool | None = None,
) -> Pair:
    """Load two causal LMs by local path or hub name, check that they fit, and wrap them in runners.

    dtype is that of the weights: a torch dtype, its name, or "auto" (as stored; the reference pair loads in float32, which
    is faster on a CPU and exact). `device_map` goes to transformers as it is and excludes `device`. Models of the Llama
    family are run lean (`runners.LeanRunner`), the others by transformers; `lean=False` leaves all to transformers.

    Raises `PairError` (tokenizers differ, unreadable model), `RunnerError` (a cache that cannot be rolled back), `HeadError`.

    >>> pair = load_pair("Qwen/Qwen3-8B", draft="Qwen/Qwen3-0.6B", dtype="bfloat16", device="cuda")    # doctest: +SKIP
    >>> pair = load_pair()                                       # the reference pair            # doctest: +SKIP
    """
    if target is None and draft is None:
        target, draft, head = REFERENCE / "target", REFERENCE / "draft", head or REFERENCE / "head"
        dtype = torch.float32 if dtype == "auto" else dtype
    if target is None or draft is None:
        given, missing = ("target", "draft") if draft is None else ("draft", "target")
        raise PairError(f"only the {given} was named. Name the {missing} too, or neither for the reference pair.")
    if device is not None and device_map is not None:
        raise ValueError(f"both device={device!r} and device_map={device_map!r} were given. Give one of them.")
    tokenizers = [tokenizer or _load_tokenizer(name) for name in (target, draft)]
    check_same_tokenizer(*tokenizers)
    models = [_load_model(name, dtype=dtype, device=device, device_map=device_map) for name in (target, draft)]
    vocab_size = common_vocabulary(*models, num_tokens=max(tokenizers[0].get_vocab().values()) + 1)
    return Pair(
        target=runner_for(models[0], vocab_size=vocab_size, lean=lean),
        draft=runner_for(models[1], vocab_size=vocab_size, lean=lean),
        tokenizer=tokenizers[0],
        head=None if head is None else AcceptanceHead.from_pretrained(head).to(models[1].device),
        ends=end_ids(models[0], tokenizers[0]),
        target_name=str(target),
        draft_name=str(draft),
        target_fingerprint=fingerprint(models[0]),
        draft_fingerprint=fingerprint(models[1]),
    )


def common_vocabulary(target: Any, draft: Any, *, num_tokens: int) -> int:
    """V: rows of logits both models have; rows past the tokenizer's ids are padding and are cut where they differ.

    Raises `PairError` when a model has fewer rows than the tokenizer has ids.
    """
    rows = [int(m.get_output_embeddings().weight.shape[0]) for m in (target, draft)]
    for role, n in zip(("target", "draft"), rows, strict=True):
        if n < num_tokens:
            raise PairError(
                f"the {role} scores {n} ids, but the tokenizer has ids up to {num_tokens - 1}. The {role} and the tokenizer "
                "do not belong together; load the tokenizer the model was trained with."
            )
    return min(rows)


def end_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """The ids that end a text: the model's generation config names them, else the tokenizer."""
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if named is None:
        named = tokenizer.eos_token_id
    return () if named is None else tuple(named) if isinstance(named, list | tuple) else (int(named),)


def fingerprint(model: Any) -> str:
    """Sixteen hex digits that tell a model's weights: shapes of all parameters and a few values of each, as bfloat16.

    The same for a checkpoint wherever it lies and whether it is loaded in bfloat16 or wider.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        values = parameter.detach().flatten()[:16].to(device="cpu", dtype=torch.bfloat16)
        digest.update(values.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


def _load_tokenizer(name: str | Path) -> Any:
    from transformers import AutoTokenizer

    _check_path(name)
    try:
        return AutoTokenizer.from_pretrained(str(name))
    except Exception as error:  # transformers lets through whatever a damaged file raises
        raise PairError(f"no tokenizer could be loaded from {name} ({_first_line(error)}).") from error


def _load_model(name: str | Path, *, dtype: Any, device: Any, device_map: Any) -> Any:
    from transformers import AutoModelForCausalLM

    _check_path(name)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(name), dtype=dtype, device_map=device_map, output_loading_info=True
        )
        model, found = loaded
    except Exception as error:  # as above, or an unknown dtype
        raise PairError(f"no causal language model could be loaded from {name} ({_first_line(error)}).") from error
    if missing := sorted(found["missing_keys"]):
        raise PairError(
            f"the weights in {name} are incomplete: {len(missing)} are missing, first {', '.join(missing[:3])}. They "
            "would be random. Load a complete checkpoint of a causal language model."
        )
    return model if device is None else model.to(device)


def _check_path(name: str | Path) -> None:
    """A name that can only be a path must exist: the hub's answer to it would mislead."""
    text = str(name)
    if not Path(name).exists() and (isinstance(name, Path) or text.startswith((".", "/", "~")) or text.count("/") > 1):
        raise PairError(f"there is no folder {name}. Give the folder of a saved model, or a hub name like org/name.")


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
