"""`specdecpp calibrate`: held-out labels, or real rounds, make a head's score a probability; its card gets the figures."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdecpp.cli.common import (
    Device,
    Draft,
    DType,
    DTypeOption,
    Json,
    RunnerOption,
    Seed,
    Split,
    Target,
    check_names,
    load,
    print_json,
    told,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from specdecpp.head import AcceptanceHead, Calibration, HeadCard
    from specdecpp.loading.pair import Pair
    from specdecpp.sampling import Sampling

EXAMPLES = (
    "specdecpp calibrate out/heads/look_ahead --labels out/labels",
    "specdecpp calibrate HEAD --target p.gguf --draft q.gguf --prompts dev.jsonl",
)


def calibrate(
    head: Annotated[Path, typer.Argument(metavar="HEAD", help="The folder of the head; its card is written back.")],
    labels: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Labels, as made by collect.")] = None,
    split: Annotated[Split, typer.Option(metavar="NAME", help="The answers to use: dev, test or train.")] = Split.dev,
    prompts: Annotated[str | None, typer.Option(metavar="FILE", help="Instead of labels: decode these.")] = None,
    prompt: Annotated[
        str, typer.Option(metavar="KIND", help="How a row becomes a prompt: text, gsm8k, ..., field:NAME.")
    ] = "text",
    rows: Annotated[int, typer.Option(metavar="N", min=1, help="Use so many prompts, spread over the file.")] = 64,
    max_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="The most tokens per answer.")] = 128,
    temperature: Annotated[float | None, typer.Option(metavar="X", help="To serve at.  [default: the card's]")] = None,
    target: Target = None,
    draft: Draft = None,
    seed: Seed = 0,
    as_json: Json = False,
    dtype: DTypeOption = DType.auto,
    device: Device = None,
    runner: RunnerOption = None,
) -> None:
    """Make a head's score a probability.

    The weight of rejections is undone in closed form; then a temperature and a bias are fitted on labels that the head was
    not trained on. The figures before and after go into the head's card.

    With --prompts, or a --temperature for the prompts of the labels, the pair decodes, on the runner and at the temperature
    that will serve, while the head judges every candidate: for quantised models, another runner, or another temperature than
    the labels were made with. Temperature 0 gets a calibration of its own beside that for sampling.
    """
    with told():
        if (labels is None) == (prompts is None):
            raise ValueError("a head is calibrated on --labels FOLDER or on --prompts FILE. Name one of them.")
        from specdecpp.head import AcceptanceHead
        from specdecpp.report import render

        trained = AcceptanceHead.from_pretrained(_folder(head))
        sampling = _sampling(trained, temperature)
        is_decoded = prompts is not None or temperature is not None
        if is_decoded:
            check_names(target, draft, str(head))
            asked = _of_labels(labels, split, rows) if labels else _of_file(str(prompts), prompt, rows)
            pair = load(target, draft, None, dtype=dtype, device=device, runner=runner, quiet=as_json)
            with render.waiting(f"decoding {len(asked)} prompts", quiet=as_json):
                found = _on_rounds(trained, pair, asked, sampling, max_tokens=max_tokens, seed=seed)
            about = {"calibrated_on": found.card.notes["calibrated_on"], "sampling": vars(sampling)}
        else:
            assert labels is not None
            with render.waiting("calibrating", quiet=as_json):
                found = _on_labels(trained, labels, split)
            about = {"split": split.value}
        found.save_pretrained(head)
        card, is_greedy = found.card, is_decoded and sampling.is_greedy
        figures = card.notes["calibration_greedy" if is_greedy else "calibration"]
        calibration = card.greedy if is_greedy and card.greedy else card.calibration
        if as_json:
            print_json(
                {
                    "head": str(head),
                    "labels": labels and str(labels),
                    "prompts": prompts,
                    **about,
                    "calibration": vars(calibration),
                    "figures": figures,
                }
            )
        else:
            rounds = _rounds(card, sampling) if is_decoded else ""
            out = render.console()
            out.print(_view(figures, calibration, head.resolve().name, rounds, ascii_only=out.options.ascii_only))


def _on_labels(head: "AcceptanceHead", labels: Path, split: Split) -> "AcceptanceHead":
    from specdecpp.training.calibrate import calibrate_head
    from specdecpp.training.evaluate import labels_for

    return calibrate_head(head, labels_for([head], labels, split=split.value, same_sampling=True))


def _sampling(head: "AcceptanceHead", temperature: float | None) -> "Sampling":
    """What the card says the head serves, at another temperature where one is named."""
    from specdecpp.sampling import Sampling

    of_card = Sampling(**head.card.sampling or {})
    return of_card if temperature is None else replace(of_card, temperature=temperature)


def _on_rounds(
    head: "AcceptanceHead",
    pair: "Pair",
    prompts: "Sequence[str | list[int]]",
    sampling: "Sampling",
    *,
    max_tokens: int,
    seed: int,
) -> "AcceptanceHead":
    from specdecpp.request import as_prompt
    from specdecpp.training.calibrate import calibrate_live

    asked = [as_prompt(pair, prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    return calibrate_live(head, pair, asked, sampling=sampling, max_tokens=max_tokens, seed=seed)


def _of_labels(labels: Path, split: Split, rows: int) -> list[list[int]]:
    """The prompts of a split of labels, spread over it."""
    from specdecpp.training import shards

    found = [record.prompt.tolist() for record in shards.read(labels, split=split.value)]
    return found[:: max(1, len(found) // rows)][:rows]


def _of_file(file: str, kind: str, rows: int) -> list[str]:
    """The prompts of a file. Raises ValueError for a kind that does not exist, `DataError` for a file without prompts."""
    from specdecpp.errors import DataError
    from specdecpp.training.prompts import Source

    found = [prompt.text for prompt in Source(path=file, prompt=kind, rows=rows).prompts()]
    if not found:
        raise DataError(f"{file} holds no prompts. Give a file with some, or choose the column with --prompt field:NAME.")
    return found


def _folder(head: Path) -> Path:
    """The head's folder, which must be one on this machine: the card is written into it."""
    from specdecpp.errors import HeadError

    if not head.exists():
        raise HeadError(f"there is no head at {head}. Give the folder that holds it; its card is written back.")
    return head


def _rounds(card: "HeadCard", sampling: "Sampling") -> str:
    on = card.notes["calibrated_on"]
    return f"{on['num_rounds']:,} rounds at temperature {sampling.temperature:g}, {on['runners']}"


def _view(stages: dict[str, Any], found: "Calibration", name: str, rounds: str, *, ascii_only: bool) -> "RenderableType":
    """The figures by stage, the calibration, and the diagram of what comes out."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    from specdecpp.report import diagrams, render

    columns = {f"{label}\n/token": f"{key}_token" for label, key in (("ECE", "ece"), ("Brier", "brier"), ("AUROC", "auroc"))}
    columns |= {"KL\n/token": "kl"}
    columns |= {f"{label}\n/round": f"{key}_product" for label, key in (("ECE", "ece"), ("Brier", "brier"), ("AUROC", "auroc"))}
    table = render.plain_table("stage", *columns, gap=2)
    for stage, figures in stages.items():
        cells = ("-" if figures[key] is None else f"{figures[key]:.3f}" for key in columns.values())
        table.add_row(stage, *cells, style=render.ACCENT if stage == "calibrated" else "")
    after = stages["calibrated"]
    fitted = f"rejection weight {found.rejection_weight:g}, temperature {found.temperature:.3f}, bias {found.bias:+.3f}"
    depths = ((of, after.get(f"ece_{of}_by_depth")) for of in ("token", "product"))
    by_depth = [f"ECE by depth, {diagrams.PANELS[of]}:  {_figures(values)}" for of, values in depths if values]
    lines = [fitted, *by_depth, "", diagrams.text(after, ascii_only=ascii_only)]
    counts = f"{after['num_labels']:,} labels of {after['num_answers']:,} answers ({after['evidence']})"
    lines[:0] = [rounds] if rounds else []
    body = Padding(Group(table, "", *(Text(line) for line in lines)), (0, 1))
    return Group(render.heading(name, counts), body)


def _figures(values: list[float | None]) -> str:
    return " ".join(" -  " if value is None else f"{value:.2f}".removeprefix("0") for value in values)
