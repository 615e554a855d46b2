"""Replay of many answers at once: what any rule would do at any load, at any costs of passes by their rows.

    Traces -> a Play each, `at_once` of them in turns -> rows of a turn -> seconds -> Together

In a turn each answer that is being decoded has one step, as in the decoder (`scheduler.step`): pass j of the draft reads a
row of each step with at least j draft tokens, and one pass of the target reads all rows that are to be verified. Another answer
begins as soon as one has ended. A rule that weighs costs sees its share (`Costs.shared`). Prompts are not counted, and answers
never depend on each other: each is the recording's own (`replay`), whatever rule chooses the lengths.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import nlargest

from specdecpp.costs.curve import is_switch
from specdecpp.policies import Costs, Fixed, Policy
from specdecpp.policies.head import costs_for
from specdecpp.replay.replay import Play, Player, thrown
from specdecpp.replay.replayed import ReplayedStep
from specdecpp.replay.trace import Trace


@dataclass(frozen=True, kw_only=True)
class Tetris:
    """The selection of TETRIS (Wu et al. 2025), for comparison: each answer drafts `k` draft tokens, and of all of them the
    `slots` with the largest products of q are verified.

    A product that has the draft token's own q in it (`own`, as published) chooses by what was drawn: sound for deterministic
    drafts only, and refused by `replay_together` for recordings of others. Without it the score is known before the draft token
    is sampled. A step is then an adapted stopping of the drafts of all requests together, and jointly the answers keep the
    target's distribution (tests/test_together.py enumerates it, and how far `own` is from it).

    Raises ValueError for fewer than no slots, and for no draft token.
    """

    slots: int
    k: int = 8
    own: bool = False

    def __post_init__(self) -> None:
        if self.slots < 0 or self.k < 1:
            raise ValueError(f"slots must be at least 0 and k at least 1, got {self.slots} and {self.k}")

    def lengths(self, survivals: Sequence[Sequence[float]]) -> list[int]:
        """How many draft tokens of each request are verified, of the products of q over its first 0, 1, ..., k draft tokens.

        >>> Tetris(slots=3).lengths([[1.0, 0.9, 0.1], [1.0, 0.5, 0.4]])
        [2, 1]
        """
        offers = (
            (score, -i, -place)  # of equals those of the first requests, and of each a start
            for i, products in enumerate(survivals)
            for place, score in enumerate(products[1:] if self.own else products[:-1])
        )
        chosen = [-i for _, i, _ in nlargest(self.slots, offers)]
        return [chosen.count(i) for i in range(len(survivals))]


@dataclass(frozen=True, kw_only=True)
class Together:
    """Rates of a rule on answers that were decoded `at_once`: sums over all of them, in seconds of the cost model."""

    at_once: int
    num_turns: int
    num_tokens: int
    num_drafted: int
    num_accepted: int
    num_dropped: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Sums of all answers together."""
        return self.num_tokens / self.seconds


def replay_together(
    traces: Sequence[Trace],
    policy: Policy | Tetris,
    costs: Costs,
    *,
    at_once: int,
    seed: int = 0,
    repeats: int = 1,
    max_tokens: int | None = None,
) -> Together:
    """Decode every answer `repeats` times with a policy, `at_once` of them at a time: exactly in distribution under token
    verification.

    `costs` say what passes over more rows take: `Costs.passes` of the target, and of the draft `Costs.draft_pass_s`. A seed
    gives every policy the same coins, as in `replay`, whose sums this gives for one at once. Raises ValueError as `replay`
    does, and for a `Tetris` that looks at what was drawn.

    >>> replay_together(traces, Fixed(k=2), costs, at_once=8).tokens_per_second          # doctest: +SKIP
    """
    if at_once < 1:
        raise ValueError(f"at_once must be at least 1, got {at_once}")
    chooser = policy if isinstance(policy, Tetris) else None
    rule = Fixed(k=policy.k) if isinstance(policy, Tetris) else policy
    if chooser is not None and chooser.own and any(((t.odds > 0) & (t.odds < 1)).any() for t in traces):
        raise ValueError(
            "Tetris(own=True) chooses draft tokens by their own q, which only deterministic drafts can bear, and these odds "
            "come from sampling. Say own=False, or replay it on labels made at temperature 0."
        )
    costs = costs_for(rule, costs)
    waiting = _plays(traces, rule, costs.shared(at_once), seed=seed, repeats=repeats, max_tokens=max_tokens)
    running: list[Play] = []
    sums = dict.fromkeys(("num_tokens", "num_drafted", "num_accepted", "num_dropped"), 0)
    seconds, num_turns, before = 0.0, 0, 1
    while True:
        running = [play for play in running if not play.is_over]
        while len(running) < at_once and (play := next(waiting, None)) is not None:
            running.append(play)
        if not running:
            break
        turn = _chosen(running, chooser) if chooser else [play.round() for play in running]
        seconds += seconds_of(turn, costs)
        longest = max(r.num_drafted for r in turn)
        seconds += costs.switch_s * is_switch(before, longest)
        before = longest
        num_turns += 1
        for name in sums:
            sums[name] += sum(getattr(r, name) for r in turn)
    return Together(at_once=at_once, num_turns=num_turns, seconds=seconds, **sums)


def seconds_of(turn: Sequence[ReplayedStep], costs: Costs) -> float:
    """Seconds of a turn with these steps, but for a switch."""
    drafted = [r.num_drafted + r.num_dropped for r in turn]
    draft_s = sum(costs.draft_pass_s(sum(num >= j for num in drafted)) for j in range(1, 1 + max(drafted)))
    verified = sum(r.num_drafted for r in turn)
    own_s = (len(turn) - 1) * min(costs.other_s, costs.pass_s(1))  # that of one is in the pass
    return draft_s + costs.pass_s(verified + len(turn)) + own_s + costs.start_s * (verified > 0)


def _plays(
    traces: Sequence[Trace], policy: Policy, costs: Costs, *, seed: int, repeats: int, max_tokens: int | None
) -> Iterator[Play]:
    for trace, runs in zip(traces, thrown(traces, seed=seed, repeats=repeats), strict=True):
        for row in runs.tolist():
            yield Play(Player(trace, policy, costs, max_tokens=max_tokens), row)


def _chosen(running: Sequence[Play], chooser: Tetris) -> list[ReplayedStep]:
    """A step of each, of which the draft tokens that are verified are chosen over all of them."""
    limits = [play.open().limit for play in running]
    counts = chooser.lengths([play.survivals(limit) for play, limit in zip(running, limits, strict=True)])
    return [play.close(num, limit - num) for play, num, limit in zip(running, counts, limits, strict=True)]
