"""Every rule side by side: on the clock, in replay, and on a pair that nobody has tried yet.

| file | what is in it |
|---|---|
| contestants.py | who takes part, and the settings that a development split chooses among |
| questions.py | the prompts: some choose settings, others are measured |
| run.py | the clock: paired and interleaved, settings first |
| lossless.py | whether what was timed has the target's distribution |
| machines.py | what a step costs: measured here, read from a file, or given as c |
| replays.py | the same table from recordings, at any costs |
| check.py | whether a pair is worth it |
| interleaving.py | decoders in turns |
| rows.py, results.py | the table, and the file that holds it |

Nothing here prints. Tables and pictures of the results are made in `report`, which nothing here imports.
"""
