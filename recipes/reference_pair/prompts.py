"""Prompts for the head's labels: documented functions of the Python standard library, as the target was trained to see them.

    python prompts.py --out python_train.jsonl

One row {"prompt": ...} a function, in a fixed shuffle, so that the first rows are a sample of all modules.
"""

import argparse
import hashlib
import json
from pathlib import Path

from corpus import functions, standard_library


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a .jsonl file")
    out = parser.parse_args().out
    prompts = {d.prompt for path in standard_library() for d in functions(path) if d.prompt}
    shuffled = sorted(prompts, key=lambda prompt: hashlib.sha256(prompt.encode()).digest())
    out.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in shuffled), encoding="utf-8")
    print(f"{out}: {len(shuffled)} prompts")


if __name__ == "__main__":
    main()
