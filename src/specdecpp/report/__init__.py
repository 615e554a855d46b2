"""Reports of what was measured: tables, sentences, pictures, a page. It reads what `bench` has found and runs nothing.

| file | what is in it |
|---|---|
| tables.py | rows that belong together, for a terminal and in words, and the columns of the page |
| advice.py | the result of a check in words |
| theme.py | colours and typeface of pages and pictures |
| pictures.py, page.html.j2 | the pictures of a board, and everything as one HTML file |
| render.py | the look of the command line: text as it comes, progress, tables |

Nothing here prints. Pictures need matplotlib (the extra `plots`).
"""
