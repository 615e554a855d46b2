"""Several stopping rules on your own prompts, in turns: tokens per second, and what each step brought.

Run it with: python examples/compare_rules.py "What is a guitar?" "Give three tips for better sleep."
"""

import sys

import specdecpp as sd
from specdecpp.metrics import Metrics

prompts = sys.argv[1:] or ["Ann has 3 bags of 12 apples. How many apples does she have?", "Give three tips for better sleep."]
pair = sd.load_pair()  # or load_pair("target", draft="draft", head="head")
rules = {
    "target alone": sd.NoDraft(),
    "fixed K = 4": sd.Fixed(4),
    "cumulative 0.2": sd.CumulativeConfidence(threshold=0.2),
    "the default": None,  # cost-aware, with the pair's head
}
decoders = {name: sd.Decoder(pair, policy=policy, reuses=False) for name, policy in rules.items()}
totals = dict.fromkeys(rules, Metrics())
for seed in range(3):  # the first time only warms up
    for prompt in prompts:
        for name, decoder in decoders.items():  # in turns, so that a slow moment of the machine affects all
            run = decoder.generate([{"role": "user", "content": prompt}], max_tokens=64, seed=seed).metrics
            totals[name] = totals[name] + run if seed else Metrics()

print(f"{'rule':16}{'tokens/s':>10}{'a round':>10}{'accepted':>10}{'discarded':>11}")
for name, m in totals.items():
    print(
        f"{name:16}{m.tokens_per_second:10.1f}{m.mean_acceptance_length:10.2f}"
        f"{m.draft_acceptance_rate:10.0%}{m.discard_rate:11.2f}"
    )
