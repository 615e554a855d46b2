"""`specdecpp convert`: a checkpoint as a GGUF file, for smaller weights or for llama.cpp."""

from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specdecpp.cli.common import Json, print_json, told, write

if TYPE_CHECKING:
    from specdecpp.loading.gguf_writing import Written

EXAMPLES = (
    "specdecpp convert --out gguf",
    "specdecpp convert models/Qwen3-0.6B --out qwen3.gguf --type q8_0",
)


class Type(StrEnum):
    """How matrices are stored."""

    f32 = "f32"
    f16 = "f16"
    bf16 = "bf16"
    q8_0 = "q8_0"
    q4_0 = "q4_0"
    q4_1 = "q4_1"


def convert(
    out: Annotated[Path, typer.Option(metavar="PATH", help="The file; for the reference pair a folder.")],
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="A folder or a hub name. None: the reference pair.")
    ] = None,
    kind: Annotated[Type, typer.Option("--type", metavar="TYPE", help="f32, f16, bf16, q8_0, q4_0 or q4_1.")] = Type.f32,
    as_json: Json = False,
) -> None:
    """Write a checkpoint as a GGUF file.

    Llama, Mistral, Qwen2 and Qwen3 with a byte-level tokenizer. f32 keeps the weights; the others may change what the model
    says. Without a model: target.gguf and draft.gguf of the reference pair.
    """
    with told():
        if (model is None) == (out.suffix == ".gguf"):
            wanted = "a folder" if model is None else "a file that ends in .gguf"
            raise ValueError(f"--out {out} does not fit: {'the reference pair' if model is None else model} needs {wanted}.")
        if model is None and out.exists() and not out.is_dir():
            raise ValueError(f"--out {out} is a file, and the reference pair needs a folder. Name another.")
        written = [_converted(name, path, kind) for name, path in _jobs(model, out)]
        if as_json:
            print_json({"files": [asdict(w) | {"path": str(w.path)} for w in written]})
        else:
            write("".join(f"{_line(w)}\n" for w in written))


def _jobs(model: str | None, out: Path) -> list[tuple[str, Path]]:
    """Which checkpoint goes to which file."""
    from specdecpp.loading.pair import REFERENCE

    if model is not None:
        return [(model, out)]
    return [(str(REFERENCE / role), out / f"{role}.gguf") for role in ("target", "draft")]


def _converted(name: str, path: Path, kind: Type) -> "Written":
    from transformers.utils import logging

    from specdecpp.loading import gguf_writing
    from specdecpp.report import render

    logging.set_verbosity_error()
    if Path(name).exists():
        logging.disable_progress_bar()  # only downloads show one
    with render.waiting(f"writing {path}"):
        return gguf_writing.convert(name, path, precision=gguf_writing.Precision(kind))


def _line(of: "Written") -> str:
    return f"{of.path}: {of.architecture}, {of.precision}, {of.num_tensors} tensors, {of.num_bytes / 1e6:,.1f} MB"
