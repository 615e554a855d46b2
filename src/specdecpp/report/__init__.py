"""Reports of what was measured: tables, sentences, pictures, a page. It reads what `bench` has found and runs nothing.

| file | what is in it |
|---|---|
| boards.py | which rows belong together |
| tables.py | the rows for a terminal and in markdown; where the time goes |
| sentences.py, advice.py | what the rows of a comparison say in words, and what a check does |
| theme.py | colours and typeface of pages and pictures |
| pictures.py, diagrams.py | the pictures of a board, and reliability diagrams for a terminal |
| page.py, page.html.j2 | everything as one HTML file |
| render.py | what the command line looks like: text as it comes, bars of progress, tables |

Nothing here prints. Pictures need matplotlib (the extra `plots`), all else does not.
"""
