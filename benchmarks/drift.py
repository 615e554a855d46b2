"""Acceptance that falls: after how many requests it is noticed, and how often where nothing has changed.

    python benchmarks/drift.py                                  # the reference pair, 10 minutes

A pair is checked as `specdecpp check` does (`check.keep_figures`). Then it decodes practice prompts with another draft, or
without the chat template, until it warns. `noticed` is the number of requests in that run, None where it never warned. The
figures of those requests are then drawn anew, in other orders and beside other requests of the check, for the spread
(`draws`), and those of the unchanged pair for false alarms. Drafts of 3 and 2 bits are rounded in blocks of 32 weights.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch

from specdecpp import AcceptanceHead, Decoder, drift, load_pair
from specdecpp.bench import check
from specdecpp.drift import Comparison, Figures
from specdecpp.loading import shipped
from specdecpp.loading.pair import Pair
from specdecpp.prompt import encode
from specdecpp.sampling import Sampling
from specdecpp.testing import practice_prompts

RESULTS = Path(__file__).parent / "results" / "drift.json"
REQUESTS, TOKENS, LONG = 200, 64, 400
DRAWS, RUNS = 200, 4000
NOISE = (0.1, 0.2)


def bits(num: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Rounding to so many bits, between the least and the largest of a block."""

    def rounded(weights: torch.Tensor) -> torch.Tensor:
        blocks = weights.reshape(-1, 32)
        low, high = blocks.min(1, keepdim=True).values, blocks.max(1, keepdim=True).values
        step = ((high - low) / (2**num - 1)).clamp(min=1e-12)
        return (low + ((blocks - low) / step).round() * step).reshape(weights.shape)

    return rounded


def q4_0(weights: torch.Tensor) -> torch.Tensor:
    """Rounding as GGUF's type has it."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    kind = GGMLQuantizationType.Q4_0
    return torch.from_numpy(dequantize(quantize(weights.float().numpy(), kind), kind).reshape(weights.shape))


def noisy(share: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Noise of so many standard deviations of the weights: another fine-tune, as seen by a draft that does not know of it."""
    generator = torch.Generator().manual_seed(0)
    return lambda weights: weights + share * weights.std() * torch.randn(weights.shape, generator=generator)


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Q4_0": q4_0,
    "3 bits": bits(3),
    "2 bits": bits(2),
    **{f"noise {share}": noisy(share) for share in NOISE},
}


def loaded(names: Any, draft: Path, head: bool) -> Pair:
    dtype = "float32" if names.target.is_dir() else "auto"
    pair = load_pair(names.target, draft=draft, dtype=dtype)
    return replace(pair, head=AcceptanceHead.from_pretrained(names.head)) if head else pair


@torch.inference_mode()
def changed(names: Any, folder: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    """A draft whose matrices are changed, in a folder or a file of its own."""
    from specdecpp.loading.choice import model_of

    source = model_of(names.draft, dtype=torch.float32, device=None)
    model = source.model
    for parameter in model.parameters():
        if parameter.ndim >= 2 and parameter.shape[-1] % 32 == 0:
            parameter.copy_(change(parameter))
    if names.draft.is_dir():
        model.save_pretrained(folder / "draft")
        source.tokenizer().save_pretrained(folder / "draft")
        return folder / "draft"
    from specdecpp.loading.gguf_writing import Precision, write

    write(model, source.tokenizer(), folder / "draft.gguf", precision=Precision.q8_0)
    return folder / "draft.gguf"


def prompts_of(pair: Pair, num: int, *, is_plain: bool = False) -> list[list[int]]:
    """Practice prompts, as many of every kind."""
    texts = practice_prompts()[:: len(practice_prompts()) // num]
    return [encode(pair, text if is_plain else [{"role": "user", "content": text}]) for text in texts]


def decoded(pair: Pair, prompts: list[list[int]], temperature: float) -> tuple[int | None, list[Figures], str | None]:
    """(Requests until the warning, figures of all requests, the warning)."""
    decoder, noticed, found, warning = Decoder(pair), None, [], None
    for num, i in enumerate(np.random.default_rng(1).permutation(len(prompts)), 1):
        output = decoder.generate(prompts[i], max_tokens=TOKENS, temperature=temperature)
        if figures := drift.figures(output.steps):
            found.append(figures)
        if noticed is None and output.warning:
            noticed, warning = num, output.warning
    return noticed, found, warning


def drawn(rows: list[Figures], of: list[Figures], num: int, most: int, rng: np.random.Generator) -> int | None:
    """Requests until a fall is seen, of `of` beside `num` of `rows`; None where it is not within `most`."""
    comparison = Comparison([rows[i] for i in rng.choice(len(rows), num, replace=False)], is_alike=True, rate=drift.RATE)
    return next((n for n, i in enumerate(rng.integers(len(of), size=most), 1) if comparison.saw(of[i])), None)


def line(rows: list[Figures], found: list[Figures], noticed: int | None, rng: np.random.Generator) -> dict[str, Any]:
    if len(found) < 2:
        return {"means": None, "noticed": noticed, "figures": len(found)}  # the rule has stopped drafting

    def spread(num: int) -> dict[str, Any]:
        got = [drawn(rows, found, num, REQUESTS, rng) for _ in range(DRAWS)]
        return {"within": fmean(n is not None for n in got), "median": median(n or REQUESTS + 1 for n in got)}

    means = [round(fmean(x for x in column if x is not None), 4) for column in zip(*found, strict=True)]
    sizes = [num for num in (32, 64, 128, len(rows)) if num <= len(rows)]
    return {"means": means, "noticed": noticed, "figures": len(found), "draws": {str(num): spread(num) for num in sizes}}


def false_alarms(rows: list[Figures], rng: np.random.Generator) -> dict[str, Any]:
    """Runs of requests like those of the check that warn, with the margins and without any."""
    found: dict[str, Any] = {}
    for margins in (drift.MARGINS, Figures(0.0, 0.0)):
        before, drift.MARGINS = drift.MARGINS, margins
        for num in (drift.LEAST, 64, len(rows) // 2):
            alarms = sum(drawn(rows, rows, num, LONG, rng) is not None for _ in range(RUNS))
            found[f"check of {num}, margins {margins[0]} and {margins[1]}"] = {"runs": RUNS, "requests": LONG, "alarms": alarms}
            print(num, margins, alarms, flush=True)
        drift.MARGINS = before
    return found


@contextmanager
def own_cache() -> Iterator[Path]:
    """A folder for what is kept, so that the checks of whoever runs this stay as they are."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        yield Path(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", default="reference")
    parser.add_argument("--temperature", type=float, nargs="+", default=[1.0, 0.0])
    parser.add_argument("--requests", type=int, default=REQUESTS, help="Prompts of the check, and of each run.")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rng, result = np.random.default_rng(0), {"pair": args.pair, "requests": args.requests, "tokens": TOKENS, "rows": {}}
    with own_cache() as cache:
        names = shipped.names(args.pair)
        assert names is not None, f"there is no pair {args.pair}"
        drafts = {}
        for name, change in CHANGES.items():
            (cache / name).mkdir()
            drafts[name] = changed(names, cache / name, change)
        for head in (False, True):
            for temperature in args.temperature:
                key = f"temperature {temperature:g}, " + ("head" if head else "no head")
                pair = loaded(names, names.draft, head)
                trial = check.Trial(seconds=3600, sampling=Sampling(temperature=temperature), max_tokens=TOKENS)
                kept = check.keep_figures(pair, prompts_of(pair, args.requests), trial)
                rows = kept["ways"][[*kept["ways"]][-1]]
                noticed, same, _ = decoded(pair, prompts_of(pair, args.requests), temperature)
                found = {"unchanged": line(rows, same, noticed, rng)}
                noticed, other, warning = decoded(
                    loaded(names, names.draft, head), prompts_of(pair, args.requests, is_plain=True), temperature
                )
                found["no chat template"] = line(rows, other, noticed, rng) | {"warning": warning}
                for name, draft in drafts.items() if not head else ():  # a head of another draft is refused
                    noticed, other, warning = decoded(loaded(names, draft, head), prompts_of(pair, args.requests), temperature)
                    found[name] = line(rows, other, noticed, rng) | {"warning": warning}
                for name, one in found.items():
                    print(key, name, one["means"], one["noticed"], one.get("draws"), flush=True)
                result["rows"][key] = found | {"false alarms": false_alarms([*rows, *same], rng)}
                args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
