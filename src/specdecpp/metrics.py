"""A step: what came out and what it took. Sums over steps, and the rates that follow from them.

Names are those of vLLM's per-request block where it has one; discard and verification rate are the paper's R_d and R_v.
A draft token counts as accepted when it ends in the output.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from specdecpp.policies import Costs, Stop

Origin = Literal["accepted", "correction", "bonus"]
FinishReason = Literal["eos", "stop", "length", "grammar"]
"""End of text, a stop string, no room for more tokens, or a grammar that nothing can follow."""
_SUMMED = ("tv", "draft_s", "verify_s", "head_s", "other_s", "forward_s")
_RATES = ("num_spec_tokens", "mean_tv", "elapsed_s", "tokens_per_second", "mean_acceptance_length", "draft_acceptance_rate")
_RATES += ("discard_rate", "verification_rate")


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One token of the answer: the text it releases (held-back text comes with a later piece) and where it came from.

    accepted: a draft token that passed. correction: the target's token after a rejection. bonus: the target's token after a
    step without one (also every token of a step without draft tokens).
    """

    token: int
    text: str
    origin: Origin


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step: what came out, what it took, and why drafting stopped."""

    pieces: tuple[Piece, ...]
    num_drafted: int
    num_accepted: int
    """Draft tokens that ended in the output."""
    num_tested: int
    """Draft tokens whose verdict did: accepted ones, and the one that was corrected."""
    stop: Stop
    judged: tuple[float, ...]
    finish_reason: FinishReason | None
    draft_s: float
    """Seconds of the draft's forward passes and draws."""
    head_s: float
    verify_s: float
    """Seconds of the target's forward pass and the acceptance test."""
    other_s: float
    forward_s: float = 0.0
    """Seconds of all these within forward passes; 0 where a device runs them on its own."""
    expected_s: float = 0.0
    """Seconds that `costs` have such a step take; 0 where no policy needs them."""
    costs: Costs | None = None
    extra: Any = None
    """A message of the engine of a policy's own to that policy."""
    tv: float = 0.0
    """Total variation from the target's distribution, summed over the tokens."""
    overlaps: tuple[float, ...] = ()
    """Chances that a draw in place of each draft token that was tested passes."""

    @property
    def stop_reason(self) -> str:
        """Reason why drafting stopped, in words."""
        return str(self.stop)

    @property
    def chances(self) -> tuple[float, ...]:
        """Acceptance of the draft tokens that were tested: `overlaps` where they are known, else what became of each."""
        num = self.num_tested
        return self.overlaps[:num] if len(self.overlaps) >= num else tuple(float(i < self.num_accepted) for i in range(num))

    @property
    def num_tokens(self) -> int:
        return len(self.pieces)

    @property
    def text(self) -> str:
        return "".join(p.text for p in self.pieces)

    @property
    def tokens(self) -> list[int]:
        return [p.token for p in self.pieces]


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Sums over steps (seconds end in `_s`), and rates as properties. Add two to pool them."""

    num_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Tokens of the prompt that were in a cache and not read again."""
    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    acceptance_histogram: Counter[int] = field(default_factory=Counter)
    """Steps that accepted 0, 1, 2, ... draft tokens."""
    drafted_histogram: Counter[int] = field(default_factory=Counter)
    """Steps that drafted 0, 1, 2, ... draft tokens."""
    tv: float = 0.0
    """Total variation from the target's distribution, summed over tokens; 0 under lossless verification."""
    prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    head_s: float = 0.0
    other_s: float = 0.0
    forward_s: float = 0.0
    """Within forward passes, those that read the prompt left out; 0 where a device runs steps on its own."""

    @classmethod
    def of(cls, steps: Iterable[Step], **prompt: Any) -> "Metrics":
        """Fold steps into sums; `prompt` has `prefill_s`, `num_prompt_tokens` and `num_cached_tokens`."""
        steps = list(steps)
        accepted, drafted = (Counter(getattr(r, name) for r in steps) for name in ("num_accepted", "num_drafted"))
        return cls(
            num_tokens=sum(r.num_tokens for r in steps),
            num_spec_steps=len(steps),
            num_draft_tokens=sum(drafted.elements()),
            num_accepted_draft_tokens=sum(accepted.elements()),
            acceptance_histogram=accepted,
            drafted_histogram=drafted,
            **{name: sum((getattr(r, name) for r in steps), 0.0) for name in _SUMMED},
            **prompt,
        )

    def __add__(self, other: "Metrics") -> "Metrics":
        return Metrics(**{name: getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__})

    @property
    def num_spec_tokens(self) -> int:
        """The most draft tokens of a step."""
        return max(self.drafted_histogram, default=0)

    @property
    def mean_tv(self) -> float:
        """Total variation a token: the share that differs from the target's draws under the best coupling."""
        return self.tv / (self.num_tokens or 1)

    @property
    def elapsed_s(self) -> float:
        """Seconds from the first forward pass to the last token."""
        return self.prefill_s + self.draft_s + self.verify_s + self.head_s + self.other_s

    @property
    def tokens_per_second(self) -> float:
        """Tokens over all the time they took, reading the prompt included."""
        return self.num_tokens / (self.elapsed_s or 1.0)

    @property
    def time_shares(self) -> dict[str, float]:
        """Draft, verify, head and other as parts of all the time; `other` holds the reading of the prompt."""
        whole = self.elapsed_s or 1.0
        shares = {"draft": self.draft_s / whole, "verify": self.verify_s / whole, "head": self.head_s / whole}
        return shares | {"other": max(0.0, 1.0 - sum(shares.values()))}

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted/steps: tokens per verification, the target's own token included; 0 without steps."""
        return (self.num_accepted_draft_tokens + self.num_spec_steps) / (self.num_spec_steps or 1)

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted over drafted tokens."""
        return self.num_accepted_draft_tokens / (self.num_draft_tokens or 1)

    @property
    def discard_rate(self) -> float:
        """R_d: draft tokens that did not end in the output, per token; may exceed 1."""
        return (self.num_draft_tokens - self.num_accepted_draft_tokens) / (self.num_tokens or 1)

    @property
    def verification_rate(self) -> float:
        """R_v: target passes per token; 1 for the target alone."""
        return self.num_spec_steps / self.num_tokens if self.num_tokens else 0.0

    def to_dict(self) -> dict[str, object]:
        """Sums and rates under their names, ready for JSON."""
        found: dict[str, Any] = {name: getattr(self, name) for name in (*self.__dataclass_fields__, *_RATES)}
        for name in ("acceptance_histogram", "drafted_histogram"):
            found[name] = {str(k): n for k, n in sorted(found[name].items())}
        return found
