"""Stopping rules without a model: what a round costs, which rule is best, and how far from it the others are.

| file | what is in it |
|---|---|
| mdp.py | the cost identities, and the exact optimum where acceptance is a known Markov chain |
| trace.py | a recorded answer as any policy meets it |
| replay.py | any policy on recorded answers, exactly in law, at any costs |
| replayed.py | what it did: sums for every answer, and the rates that follow |
| together.py | the same with many answers at once, whose rows share passes; TETRIS |
| oracles.py | hindsight, perfect probability, before sampling: how far rules and scores could get |
| intervals.py | intervals over prompts |

Needs numpy and the policies; no model is run here, and torch is not imported.
"""
