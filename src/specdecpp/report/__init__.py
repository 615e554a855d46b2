"""Reports of what was measured: tables, sentences, pictures, a page. It reads what `bench` has found and runs nothing.

| file | what is in it |
|---|---|
| boards.py | which rows belong together |
| tables.py, times.py | the rows for a terminal and in markdown; where the time goes |
| sentences.py, advice.py | what the rows of a comparison say in words, and what a check does |
| theme.py, drawing.py, labels.py | colours; sheets for matplotlib and the SVG that comes of them; labels that keep clear |
| pictures.py, pareto.py, diagrams.py | the pictures of a board, and reliability diagrams of an evaluation |
| page.py | everything as one HTML file |
| render.py | what the command line looks like: text as it comes, bars of progress, tables |

Nothing here prints. Pictures need matplotlib (the extra `plots`), all else does not.
"""
