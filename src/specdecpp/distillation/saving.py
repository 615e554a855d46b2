"""A draft on disk: a checkpoint of transformers, and beside a target in a GGUF file one like it.

In the file the kept layers, the embedding and the output layer are the target's bytes; the draft's own layers have about as
many bits as the target's (`Target.precision`).
"""

import copy
import shutil
from pathlib import Path
from typing import Any

from specdecpp.distillation.target import Target
from specdecpp.errors import BackendError, first_line
from specdecpp.loading import gguf_writing

DRAFT, FILE = "draft", "draft.gguf"


def check(target: Target, small: Target | None) -> None:
    """Raise `BackendError` for a draft, cut or made of a small model, that could not be written, before it costs anything."""
    if target.precision is None:
        return
    if small is not None:
        if gguf_writing.refusal(small.model) is None:
            gguf_writing.vocabulary_of(target.tokenizer, size=int(small.model.config.vocab_size))
    elif reason := gguf_writing.refusal(target.model):
        raise BackendError(
            f"a draft of {target.name} cannot be written as a GGUF file: {reason}. Name the target's checkpoint instead of its "
            "file: the draft is then a checkpoint too."
        )


def save(draft: Any, target: Target, out: Path, *, kept: int | None) -> list[str]:
    """Write both, each whole or not at all; their names, the one to use first. `kept`: layers of the target; None: the draft is
    a small model, or some layers of one.

    Raises `BackendError` where the file cannot be written; the checkpoint is there then.
    """
    part = out / f"{DRAFT}.part"
    shutil.rmtree(part, ignore_errors=True)
    copy.deepcopy(draft).bfloat16().save_pretrained(part)  # a copy: the angles of the target stay in float32
    target.tokenizer.save_pretrained(part)
    shutil.rmtree(out / DRAFT, ignore_errors=True)
    part.rename(out / DRAFT)
    if target.precision is None or (kept is None and gguf_writing.refusal(draft)):
        return [DRAFT]
    try:
        if kept is None:
            gguf_writing.write(draft, target.tokenizer, out / FILE, precision=target.precision, name=DRAFT)
        else:
            gguf_writing.cut(target.name, out / FILE, kept, model=draft, precision=target.precision)
    except Exception as error:  # from the disk, gguf or numpy: hours of training stand behind it
        raise BackendError(
            f"the draft is trained and {out / FILE} could not be written ({first_line(error)}). Nothing is lost: the draft is "
            f"the checkpoint {out / DRAFT}, which loads as it is. Run the same command again to go on from here."
        ) from error
    return [FILE, DRAFT]
