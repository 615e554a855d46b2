"""What the tests of exactness share: a request over tables, its distribution under a session, the target's own."""

from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import config
from scipy.stats import chisquare

from specdecpp import step
from specdecpp.backends import Cache
from specdecpp.detokenize import Detokenizer
from specdecpp.grammar import Matcher, restricted
from specdecpp.head import AcceptanceHead, HeadCard
from specdecpp.policies import Costs, Policy, Stop
from specdecpp.policies.protocol import decide
from specdecpp.sampling import Randomness, Sampling, probabilities
from specdecpp.session import Piece, Session, Step
from specdecpp.step import Draft, Plan, propose
from specdecpp.testing import Enumerator, TableModel, enumerate_distribution
from specdecpp.verify import TokenVerification, Verification

Distribution = dict[Any, float]


@contextmanager
def unchecked() -> Iterator[None]:
    """Without the shape checks of `make typecheck`, which cost ten times what an enumeration does."""
    before = config.jaxtyping_disable
    config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        config.update("jaxtyping_disable", before)


def distribution_of(run: Callable[[Randomness], Hashable]) -> Distribution:
    """`enumerate_distribution`, with shapes checked on its first path only."""
    run(Enumerator([]))
    with unchecked():
        return enumerate_distribution(run)


def finish(session: Session) -> list[Step]:
    """Run a session to its end."""
    if session.finish_reason is None:
        session.prefill()
    steps = []
    while session.finish_reason is None:
        steps.append(session.step())
    return steps


def answer(session: Session, steps: list[Step]) -> Hashable:
    """The outcome whose distribution must be the target's: the new tokens and why they end."""
    return tuple(session.tokens[session.num_prompt_tokens :]), session.finish_reason


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request over tables: everything but the policy and the verification."""

    target: TableModel
    draft: Any
    sampling: Sampling = Sampling()  # noqa: RUF009 (frozen)
    prompt: tuple[int, ...] = (0, 1)
    max_tokens: int = 4
    ends: tuple[int, ...] = ()
    detokenizer: Callable[[], Detokenizer] | None = None
    costs: Costs = Costs(draft_s=0.25, passes={1: 1.0, 2: 1.0, 5: 1.3})  # noqa: RUF009 (frozen)
    tail: int | None = None
    lossless: bool = True
    grammar: Matcher | None = None

    def session(self, policy: Policy, verification: Verification, coins: tuple[Randomness, Randomness]) -> Session:
        return Session(
            target=self.target.new_cache(),
            draft=self.draft.new_cache(),
            policy=policy,
            verification=verification,
            sampling=self.sampling,
            prompt=self.prompt,
            max_tokens=self.max_tokens,
            randomness=coins,
            ends=self.ends,
            detokenizer=self.detokenizer() if self.detokenizer else None,
            costs=self.costs,
            tail=self.tail,
            lossless=self.lossless,
            grammar=None if self.grammar is None else self.grammar.fork(),
        )

    def distribution(
        self, policy: Policy, verification: Verification, outcome: Callable[[Session, list[Step]], Hashable] = answer
    ) -> Distribution:
        """The exact distribution of an outcome of the session, over all of its coins."""

        def run(coins: Randomness) -> Hashable:
            session = self.session(policy, verification, (coins, coins))
            return outcome(session, finish(session))

        return distribution_of(run)

    def own_distribution(self) -> Distribution:
        """The distribution of `answer` when the target alone decodes, by recursion over its table."""
        distribution: Distribution = {}
        longest = self.target.max_length or float("inf")

        def walk(tokens: tuple[int, ...], probability: float, matcher: Matcher | None) -> None:
            new = tokens[len(self.prompt) :]
            if new and new[-1] in self.ends:
                distribution[new, "eos"] = probability
            elif matcher is not None and matcher.is_over:
                distribution[new, "grammar"] = probability
            elif len(new) == self.max_tokens or len(tokens) == longest:
                distribution[new, "length"] = probability
            else:
                seen = torch.tensor([t in tokens for t in range(self.target.vocab_size)])
                logits = self.target.distribution(tokens).log()
                logits = logits if matcher is None else restricted(logits, matcher.allowed())
                p = probabilities(logits, self.sampling, seen)
                for token, chance in enumerate(p.tolist()):
                    if chance > 0:
                        after = matcher and matcher.fork()
                        if after is not None:
                            after.push(token)
                        walk((*tokens, token), probability * chance, after)

        walk(self.prompt, 1.0, self.grammar)
        return distribution


def drafted(
    backend: Cache,
    pending: list[int],
    *,
    policy: Policy,
    sampling: Sampling,
    randomness: Randomness,
    room: int,
    memory: Any = None,
    ends: Collection[int] = (),
    costs: Costs | None = None,
) -> Draft:
    """What the host proposes under a policy, where there is room for so many draft tokens."""
    request = step.Request(
        target=backend,
        draft=backend,
        policy=policy,
        verification=TokenVerification(),
        sampling=sampling,
        randomness=(randomness, randomness),
        ends=ends,
    )
    return propose(Plan(request, [0] * backend.length + pending, decide(policy, memory, costs, room), costs))


def outcome(
    num_drafted: int,
    num_accepted: int,
    costs: Costs | None = None,
    *,
    judged: tuple[float, ...] = (),
    overlaps: tuple[float, ...] = (),
    draft_s=0.0,
    head_s=0.0,
    verify_s=0.0,
    other_s=0.0,
) -> Step:
    """A step that went on to the target's own token."""
    own = "bonus" if num_accepted == num_drafted else "correction"
    return Step(
        pieces=(*[Piece(token=0, text="", origin="accepted")] * num_accepted, Piece(token=0, text="", origin=own)),
        num_drafted=num_drafted,
        num_accepted=num_accepted,
        num_tested=min(num_accepted + 1, num_drafted),
        stop=Stop(),
        judged=judged,
        overlaps=overlaps,
        finish_reason=None,
        draft_s=draft_s,
        head_s=head_s,
        verify_s=verify_s,
        other_s=other_s,
        expected_s=costs.step_s(num_drafted) if costs else 0.0,
        costs=costs,
    )


def largest_difference(a: Distribution, b: Distribution) -> float:
    return max(abs(a.get(k, 0.0) - b.get(k, 0.0)) for k in a.keys() | b.keys())


def total_variation(a: Distribution, b: Distribution) -> float:
    return sum(abs(a.get(k, 0.0) - b.get(k, 0.0)) for k in a.keys() | b.keys()) / 2


def random_head(hidden_size: int, *, seed: int, scale: float = 4.0, **card: Any) -> AcceptanceHead:
    """A head with one block and large random weights, so that its estimates vary from token to token."""
    head = AcceptanceHead(HeadCard(hidden_size=hidden_size, num_layers=1, **card))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    return head.eval()


def chi_square_tail(counts: dict[Any, int], distribution: Distribution) -> float:
    """P(a chi-square statistic at least this large) if the counts come from the distribution, which has all the outcomes."""
    num = sum(counts.values())
    return float(chisquare([counts.get(k, 0) for k in distribution], [num * p for p in distribution.values()]).pvalue)
