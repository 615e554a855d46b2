"""A draft on disk: a checkpoint of transformers, and beside a target in a GGUF file one like it.

In the file the kept layers, the embedding and the output layer are the target's bytes; the draft's own layers have about as
many bits as the target's (`rounding`).
"""

import copy
import shutil
from pathlib import Path
from typing import Any

from specdecpp.distillation.network import Shape
from specdecpp.distillation.rounding import precision_of
from specdecpp.distillation.start import Begun
from specdecpp.distillation.target import Target
from specdecpp.errors import BackendError, first_line
from specdecpp.loading import gguf_writing
from specdecpp.loading.gguf_writing import cut

DRAFT, FILE = "draft", "draft.gguf"


def check(target: Target, begun: Begun | None) -> None:
    """Raise `BackendError` for a draft that could not be written, before it costs anything."""
    if precision_of(target) is None:
        return
    if begun is not None and not begun.is_cut:
        if gguf_writing.refusal(begun.model.model) is None:
            gguf_writing.vocabulary_of(target.tokenizer, size=int(begun.model.model.config.vocab_size))
    elif reason := gguf_writing.refusal(target.model):
        raise BackendError(
            f"a draft of {target.name} cannot be written as a GGUF file: {reason}. Name the target's checkpoint instead of its "
            "file: the draft is then a checkpoint too."
        )


def save(draft: Any, target: Target, shape: Shape, out: Path, *, is_cut: bool) -> list[str]:
    """Write both, each whole or not at all; their names, the one to use first. `is_cut`: it was cut from the target.

    Raises `BackendError` where the file cannot be written; the checkpoint is there then.
    """
    part = out / f"{DRAFT}.part"
    shutil.rmtree(part, ignore_errors=True)
    copy.deepcopy(draft).bfloat16().save_pretrained(part)  # a copy: the angles of the target stay in float32
    target.tokenizer.save_pretrained(part)
    shutil.rmtree(out / DRAFT, ignore_errors=True)
    part.rename(out / DRAFT)
    precision = precision_of(target)
    if precision is None or (not is_cut and gguf_writing.refusal(draft)):
        return [DRAFT]
    try:
        if is_cut:
            cut(target.name, out / FILE, shape.kept, model=draft, precision=precision)
        else:
            gguf_writing.write(draft, target.tokenizer, out / FILE, precision=gguf_writing.Precision.q8_0, name=DRAFT)
    except Exception as error:  # from the disk, gguf or numpy: hours of training stand behind it
        raise BackendError(
            f"the draft is trained and {out / FILE} could not be written ({first_line(error)}). Nothing is lost: the draft is "
            f"the checkpoint {out / DRAFT}, which loads as it is. Run the same command again to go on from here."
        ) from error
    return [FILE, DRAFT]
