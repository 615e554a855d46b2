"""A draft on disk: a checkpoint of transformers, and beside a target in a GGUF file one like it.

In the file the kept layers, the embedding and the output layer are the target's bytes; the draft's own layers have about as
many bits as the target's (`rounding`).
"""

import copy
import shutil
from pathlib import Path
from typing import Any

from specdecpp.distillation import network
from specdecpp.distillation.network import Shape
from specdecpp.distillation.rounding import precision_of
from specdecpp.distillation.target import Target
from specdecpp.loading import gguf_writing
from specdecpp.loading.gguf_cutting import cut

DRAFT, FILE = "draft", "draft.gguf"


def save(draft: Any, target: Target, shape: Shape, out: Path, *, is_cut: bool) -> list[str]:
    """Write both, whole or not at all; their names, the one to use first. `is_cut`: the first layers are the target's."""
    part = out / f"{DRAFT}.part"
    shutil.rmtree(part, ignore_errors=True)
    half = network.of_layers(draft, [*range(len(draft.model.layers))])
    half.model.embed_tokens, half.lm_head = copy.deepcopy(draft.model.embed_tokens), copy.deepcopy(draft.lm_head)
    half.tie_weights()
    half.bfloat16().save_pretrained(part)
    target.tokenizer.save_pretrained(part)
    shutil.rmtree(out / DRAFT, ignore_errors=True)
    part.rename(out / DRAFT)
    precision = precision_of(target)
    if precision is None or (not is_cut and gguf_writing.refusal(draft)):
        return [DRAFT]
    if is_cut:
        cut(target.name, out / FILE, shape.kept, model=draft, precision=precision)
    else:
        gguf_writing.write(draft, target.tokenizer, out / FILE, precision=gguf_writing.Precision.q8_0, name=DRAFT)
    return [FILE, DRAFT]
