"""An answer as it comes, a line a step: how much was drafted, what the target accepted, and why drafting stopped.

Run it with: python examples/stream_with_numbers.py "Ann has 3 bags of 12 apples. How many apples does she have?"
"""

import sys
from math import prod

import specdecpp as sd
from specdecpp.metrics import Metrics

prompt = sys.argv[1] if len(sys.argv) > 1 else "Ann has 3 bags of 12 apples. How many apples does she have?"
decoder = sd.Decoder(sd.load_pair())
print("took drafted  chance  text, with the target's own token in brackets; why drafting stopped")
steps = []
for r in decoder.stream([{"role": "user", "content": prompt}], max_tokens=64, temperature=0.7, seed=0):
    steps.append(r)
    text = "".join(p.text if p.origin == "accepted" else f"[{p.text}]" for p in r.pieces)
    chance = prod(r.judged)  # of the head's estimates: that all draft tokens are accepted
    print(f"{r.num_accepted:4} {r.num_drafted:7} {chance:7.2f}  {text!r}; {r.stop_reason}")

m = Metrics.of(steps)
print(f"\n{m.num_tokens} tokens in {m.num_spec_steps} passes of the target, {m.tokens_per_second:.0f} a second")
