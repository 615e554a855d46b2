"""`specdecpp distil`: a draft for a target that has none, with a verdict."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from specdecpp.cli import common

if TYPE_CHECKING:
    from specdecpp.distillation.network import Shape

EXAMPLES = (
    "specdecpp distil model.gguf --prompts texts.jsonl --minutes 60 --out draft",
    "specdecpp distil TARGET --prompts A --prompt gsm8k --tokens 500000 --out B",
)
LOG_S = 60.0
"""Seconds between lines on stderr, where that is no terminal: a run takes hours."""


def distil(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="A folder, a hub name or a GGUF file.")],
    prompts: Annotated[list[str], typer.Option("--prompts", metavar="FILE", help="Prompts, or a data set. Repeatable.")],
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where the draft is made; the same goes on.")],
    prompt: common.PromptKind = None,
    minutes: Annotated[float | None, typer.Option(metavar="N", help="How long, but for trials and the check.")] = None,
    tokens: Annotated[int | None, typer.Option(metavar="N", help="Or: how much the target writes.")] = None,
    layers: Annotated[
        str | None,
        typer.Option(metavar="E+T", help="E of the target's, T of its own; with --start N of the small.  [default: by speed]"),
    ] = None,
    output_tokens: Annotated[int | None, typer.Option(metavar="N", help="Tokens it can say, with --layers.")] = None,
    start: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A small model, or a draft of this target, to train.  [default: its layers]"),
    ] = None,
    temperature: Annotated[float, typer.Option(metavar="X", help="As it will be served.")] = 0.7,
    top_p: Annotated[float, typer.Option("--top-p", metavar="X", help="As it will be served.")] = 1.0,
    max_tokens: Annotated[int, typer.Option(metavar="N", help="The most tokens per answer.")] = 256,
    epochs: Annotated[int, typer.Option(metavar="N", help="How often the text is read.")] = 3,
    loss: Annotated[Literal["kl", "tv"], typer.Option(metavar="NAME", help="kl, or tv to end with.")] = "kl",
    lr: Annotated[
        float | None, typer.Option(metavar="X", help="The highest learning rate.  [default: 0.001; 0.00002 with a small model]")
    ] = None,
    end: Annotated[bool, typer.Option("--end", help="Train no further: make the draft of what there is.")] = False,
    check: Annotated[bool, typer.Option(help="A check of the pair at the end.")] = True,
    licence: Annotated[str | None, typer.Option(metavar="TEXT", help="Of target and prompts, for the card.")] = None,
    seed: common.Seed = 0,
    device: common.Device = None,
    as_json: common.Json = False,
    quiet: common.Quiet = False,
) -> None:
    """Make a draft for a model that has none.

    It says whether the draft pays. The target writes answers to the prompts; its first layers, with one or two trained ones
    on top and an output layer for the likeliest tokens, learn to say the same. Killed at any moment and started again, it
    goes on where it stopped.
    """
    from specdecpp.distillation import finishing
    from specdecpp.distillation.run import DistilPlan
    from specdecpp.distillation.run import distil as run
    from specdecpp.distillation.training import Course
    from specdecpp.report import render
    from specdecpp.sampling import Sampling
    from specdecpp.training.prompts import sources

    is_number = layers is not None and layers.isdigit() and start is not None
    plan = DistilPlan(
        target=target,
        sources=sources(prompts, prompt or []),
        out=out,
        minutes=minutes,
        tokens=tokens,
        sampling=Sampling(temperature=temperature, top_p=top_p),
        shape=None if is_number else _shape(layers, output_tokens),
        start=start,
        layers=int(layers) if layers and is_number else None,
        course=Course(epochs=epochs, loss=loss, lr=lr, seed=seed),
        max_tokens=max_tokens,
        seed=seed,
        device=device,
        licence=licence,
        ends=end,
    )
    common.check_device(device)
    common.silence(target, start)
    say = (lambda line: None) if quiet else (lambda line: print(line, file=sys.stderr, flush=True))
    with common.interruptible(), render.live("distilling", every_s=LOG_S, quiet=quiet) as tell:
        try:
            card = run(plan, tell=tell, say=say)
            if check and not end:
                card = finishing.finish(plan, card, tell=tell)
        except KeyboardInterrupt:
            print(f"interrupted. Finished work stays in {out}; run the same command again to go on.", file=sys.stderr)
            raise typer.Exit(130) from None
    if as_json:
        common.print_json(card)
    else:
        common.write("\n".join(finishing.sentences(plan, card)) + "\n")


def _shape(layers: str | None, tokens: int | None) -> "Shape | None":
    from specdecpp.distillation.network import Shape

    if layers is None:
        if tokens is not None:
            raise ValueError(f"--output-tokens {tokens} goes with --layers, such as 4+2; without both they are chosen.")
        return None
    kept, plus, own = layers.partition("+")
    if not (plus and kept.isdigit() and own.isdigit()):
        raise ValueError(f"--layers {layers!r} is not E+T, such as 4+2: layers of the target, and layers of its own.")
    return Shape(kept=int(kept), own=int(own), tokens=tokens)
