"""Every rule side by side: on the clock, in replay, and on a pair that nobody has tried yet.

| file | what is in it |
|---|---|
| contestants.py | who takes part, and the settings that a development split chooses among |
| questions.py | the prompts: some choose settings, others are measured |
| run.py | the clock: paired and interleaved, settings first |
| lossless.py | whether what was timed has the target's law |
| machines.py | what a step costs: here, in a file, or made up |
| replays.py | the same table from recordings, at any costs |
| check.py, advice.py | whether a pair is worth it, and what to do if not |
| rows.py, results.py | the table, and the file that holds it |
| sentences.py | what the rows say in words |
| boards.py, report.py | which rows belong together; tables for a terminal and in markdown |
| geometry.py, drawing.py, pictures.py, pareto.py, page.py | the same as pictures, and as one page |

Nothing here prints.
"""
