"""Base of a rule that wraps another and passes most questions on. Its memory holds that of the other as `memory`."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from specdecpp.policies.protocol import Policy, Stop

if TYPE_CHECKING:
    from torch import Tensor

    from specdecpp.policies.protocol import DraftSoFar


@dataclass(frozen=True, kw_only=True)
class Around(Policy):
    """Judges and drops draft tokens as `policy` does, and drafts no more of them; whether it drafts is for `rule` to say."""

    policy: Policy
    min_tokens: int = field(default=0, init=False, repr=False)
    max_tokens: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_tokens", self.policy.max_tokens)

    @property
    def parts(self) -> tuple[Policy, ...]:
        return (self.policy,)

    @property
    def drops_last(self) -> bool:
        return self.policy.drops_last

    @property
    def looks_ahead(self) -> bool:
        return self.policy.looks_ahead

    @property
    def needs_costs(self) -> bool:
        return True

    def judge(self, draft: "DraftSoFar", hidden: "Tensor") -> float | None:
        return self.policy.judge(draft, hidden)

    def limit(self, memory: Any) -> int:
        return self.policy.limit(memory.memory)

    def stop(self, draft: "DraftSoFar", memory: Any) -> Stop | str | None:
        if (rule := self.rule(memory, draft.costs)) is not None:
            return rule.stop(draft)
        return None if draft.num_tokens < self.policy.min_tokens else self.policy.stop(draft, memory.memory)
