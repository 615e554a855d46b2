"""Stopping rules without a model: what any of them would have done on recorded answers.

| file | what is in it |
|---|---|
| trace.py | a recorded answer as any policy meets it |
| replay.py | any policy on recorded answers, exactly in distribution, at any costs |
| replayed.py | what it did: sums for every answer, and the rates that follow |
| intervals.py | intervals over prompts |

Needs numpy and the policies; no model is run here, and torch is not imported.
"""
