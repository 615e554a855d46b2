"""Copies that a compiled target verifies: what the host's verification gives, answer by answer."""

from typing import Any

import pytest
from distributions import finish
from engine_cases import VOCAB, models_of
from kinds import needs_compiler

from specdecpp.backends.native.steps import Native
from specdecpp.drafters import SuffixDrafter
from specdecpp.drafters.copying import Copying
from specdecpp.policies import CostAware, Fixed, Policy
from specdecpp.sampling import Sampling
from specdecpp.scheduler import step
from specdecpp.session import Session
from specdecpp.verify import is_lossless, verifications

pytestmark = needs_compiler
WARM = Sampling(temperature=0.7, top_k=20, repetition_penalty=1.2)


def start(policy: Policy, sampling: Sampling, verification: str, seed: int, **options: Any) -> Session:
    how = {"seed": seed, "prompt": [3, 5, 2, 9, 3, 5], "draft": SuffixDrafter(VOCAB)} | options
    return models_of("native").session(policy, sampling, verification, **how)


@pytest.mark.parametrize("is_watched", [False, True])
@pytest.mark.parametrize("policy", [Fixed(k=0), Fixed(k=5), CostAware(max_tokens=16)])
@pytest.mark.parametrize(
    ("sampling", "verification"),
    [(Sampling(temperature=0.0), "greedy"), (WARM, "token"), (WARM, "block"), (WARM, "compare")],
)
def test_a_compiled_target_gives_what_the_host_gives(policy: Policy, sampling: Sampling, verification: str, is_watched: bool):
    """Catches a draft token verified at another place, a uniform used twice, and a cache of another length."""
    for seed in range(4):
        own, hosts = (start(policy, sampling, verification, seed) for _ in range(2))
        assert type(own.engine) is Native
        hosts.engine = Copying()
        if is_watched:
            own.watch = lambda plan, result: None
        steps = [[(r.tokens, r.num_drafted, r.num_accepted) for r in finish(session)] for session in (own, hosts)]
        assert steps[0] == steps[1]
        assert own.tokens == hosts.tokens


@pytest.mark.parametrize("verification", [name for name, kind in verifications().items() if not is_lossless(kind)])
def test_copies_under_a_lossy_verification_are_the_hosts(verification: str):
    """Catches compiled steps, which compare copies with draws from p, taken for a distribution that weighs q too."""
    session = start(Fixed(k=5), WARM, verification, 0, lossless=False)
    assert type(session.engine) is Copying
    finish(session)
    assert session.finish_reason


def test_requests_together_are_what_they_are_alone():
    """Catches steps of a batch that share what they tell the target, and prompts read by a draft that has no passes."""
    alone, shared = ([start(Fixed(k=k), WARM, "token", k) for k in (0, 2, 5)] for _ in range(2))
    for session in alone:
        finish(session)
    for session in shared:
        session.prefill()
    while running := [s for s in shared if s.finish_reason is None]:
        step(running)
    assert [s.tokens for s in shared] == [s.tokens for s in alone]
