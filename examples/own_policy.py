"""A stopping rule of your own: that it keeps the target's distribution, and what it does on the reference pair.

Run it with: python examples/own_policy.py
"""

from dataclasses import dataclass

import specdecpp as sd
from specdecpp.decoder import run
from specdecpp.session import Session
from specdecpp.testing import Enumerator, TableModel, enumerate_distribution
from specdecpp.verify import TokenVerification


@dataclass(frozen=True, kw_only=True)
class EntropyBudget(sd.Policy):
    """Stop once the draft has been undecided, over the whole step, for more than so many nats."""

    nats: float = 2.0

    def stop(self, draft, memory):
        return "undecided" if sum(map(draft.entropy, range(draft.num_tokens))) > self.nats else None


def distribution(policy: sd.Policy) -> dict[tuple, float]:
    """The distribution of three tokens under a rule: every outcome of every draw of the decoder, on models that are tables."""
    p, q = (TableModel.random(vocab_size=3, depth=1, seed=seed) for seed in (1, 2))

    def answer(every: Enumerator) -> tuple:
        how = {"verification": TokenVerification(), "sampling": sd.Sampling(), "randomness": (every, every), "max_tokens": 3}
        session = Session(target=p.new_cache(), draft=q.new_cache(), policy=policy, prompt=[0], **how)
        return tuple(token for step in run(session) for token in step.tokens)

    return enumerate_distribution(answer)


own, alone = distribution(EntropyBudget(nats=1.0)), distribution(sd.NoDraft())
print(f"largest difference from the target's distribution: {max(abs(own.get(t, 0) - alone[t]) for t in alone):.0e}")
output = sd.Decoder(sd.load_pair(), policy=EntropyBudget()).generate("What is a guitar?", max_tokens=48, seed=0)
print(sum(step.stop_reason == "undecided" for step in output.steps), "of", len(output.steps), "steps ended by the rule")
print(output.metrics)
