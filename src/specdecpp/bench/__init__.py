"""Every rule side by side: by the clock, in replay, and on a pair that nobody has tried yet.

| file | what is in it |
|---|---|
| contestants.py, questions.py | the rules with their settings, and the prompts: some choose settings, others are measured |
| contest.py | the clock: decoders in turns, settings first; the demo is a contest too |
| lossless.py | the test that what was timed has the target's distribution |
| replays.py | the same table from recordings, at any costs |
| rows.py, results.py | the table, and the file that holds it |
| check.py, turns.py | the check of a pair: steps of every length in turns, and what follows from them |

Nothing here prints. Tables and pictures of the results are made in `report`, which nothing here imports.
"""
