"""From runs to the rows of the table: medians over cycles, ratios within cycles.

ratio_to_ours    tokens per second over those of our best setting on the same weights, threads and temperature, in the same
                 cycle; below 1 the row is slower than ours
ratio_to_floor   the time of a step over the time in which memory gives the weights it reads: the target's once, the
                 draft's once per draft token; what fits a cache can be below 1
overhead         for ours: the share of the steps' time outside forward passes (draws, head, acceptance test, text, Python)
outputs_equal    for greedy text: whether all tokens are those of the target's own greedy decoding by transformers in float32
                 (smollm2: of the values in the file, or of those in bfloat16; other pairs: of the values before they were
                 rounded or packed); otherwise the first difference and how far the two best logits lie apart there
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from peers.run import Runs

BYTES = {"f32": 4.0, "bf16": 2.0, "int8": 8.5 / 8, "int4": 4.5 / 8}
"""Of a weight, where a pair does not say how much is read: packed ones come in blocks of 32 with a scale of 16 bits."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One setting on one pair. Counts are per answer; None where a figure has no meaning, and `note` says why."""

    engine: str
    backend: str | None
    setting: str
    pair: str
    dtype: str
    changes_output: bool
    threads: int
    temperature: float
    tokens_per_second: float | None = None
    ms_per_round: float | None = None
    first_token_ms: float | None = None
    steps: float | None = None
    drafts_per_round: float | None = None
    accepted_per_round: float | None = None
    ratio_to_ours: float | None = None
    ratio_to_floor: float | None = None
    overhead: float | None = None
    peak_memory_mb: float | None = None
    outputs_equal: bool | None = None
    first_difference: dict[str, Any] | None = None
    tokens_per_second_by_cycle: tuple[float, ...] = ()
    note: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def rows_of(runs: Sequence[Runs], about: Mapping[str, Any], bandwidth: Mapping[int, float]) -> list[Row]:
    """All rows of a pair. `about` is its pair.json, `bandwidth` GB/s by threads."""
    return [_row(run, _best_of_ours(run, runs), about, bandwidth[run.stage.threads]) for run in runs]


def _best_of_ours(run: Runs, runs: Sequence[Runs]) -> Runs | None:
    beside = [r for r in runs if r.setting.engine == "ours" and r.note is None and _group(r) == _group(run)]
    return max(beside, key=lambda r: median(_speeds(r)), default=None)


def _group(run: Runs) -> tuple[Any, ...]:
    return run.pair, run.stage.dtype, run.stage.threads, run.temperature


def _speeds(run: Runs) -> list[float]:
    """Tokens per second of each cycle, reading the prompt included."""
    return [sum(len(a["tokens"]) for a in cycle) / sum(a["seconds"] for a in cycle) for cycle in run.cycles]


def _row(run: Runs, best: Runs | None, about: Mapping[str, Any], gb_per_s: float) -> Row:
    base = {
        "engine": run.setting.engine,
        "runner": run.setting.backend,
        "setting": run.setting.name,
        "pair": run.pair,
        "dtype": run.stage.dtype,
        "changes_output": run.stage.dtype not in ("f32", "q4_1"),
        "threads": run.stage.threads,
        "temperature": run.temperature,
    }
    if run.note is not None:
        return Row(**base, note=run.note)
    answers = [answer for cycle in run.cycles for answer in cycle]
    steps = sum(a["steps"] for a in answers)
    drafts = sum(a["drafted"] for a in answers) / steps
    speeds = _speeds(run)
    ms = median(_round_ms(cycle, first) for cycle, first in zip(run.cycles, run.first_token_s, strict=True))
    p, q = about.get("num_bytes", {}).get(run.stage.dtype) or [n * _bytes(run) for n in about["num_parameters"]]
    difference = _difference(answers, about.get(f"greedy_{run.stage.dtype}", about["greedy"])) if run.temperature == 0 else None
    return Row(
        **base,
        tokens_per_second=_rounded(median(speeds)),
        ms_per_round=_rounded(ms),
        first_token_ms=_rounded(1e3 * median(run.first_token_s)),
        steps=_rounded(steps / len(answers)),
        drafts_per_round=_rounded(drafts),
        accepted_per_round=_rounded(sum(a["accepted"] for a in answers) / steps),
        ratio_to_ours=None if best is None else _rounded(median(a / b for a, b in zip(speeds, _speeds(best), strict=True))),
        ratio_to_floor=_rounded(ms / ((p + q * drafts) / gb_per_s / 1e6)),
        overhead=_overhead(answers),
        peak_memory_mb=_rounded(max(a["peak_mb"] for a in answers)),
        outputs_equal=difference is None if run.temperature == 0 else None,
        first_difference=difference,
        tokens_per_second_by_cycle=tuple(_rounded(speed) for speed in speeds),
    )


def _bytes(run: Runs) -> float:
    """Of a weight where it is read: native keeps those that bfloat16 has too, as the reference pair's, in that form."""
    is_half = run.setting.backend == "native" and run.pair == "reference"
    return BYTES["bf16" if is_half else run.stage.dtype]


def _round_ms(cycle: Sequence[Mapping[str, Any]], first_s: float) -> float:
    """Milliseconds of a step after the first token, which is what reading the prompt takes."""
    seconds = sum(a["seconds"] for a in cycle) - len(cycle) * first_s
    return 1e3 * seconds / max(1, sum(a["steps"] for a in cycle) - len(cycle))


def _overhead(answers: Sequence[Mapping[str, Any]]) -> float | None:
    shares = [a["overhead"] for a in answers if a.get("overhead") is not None]
    return _rounded(median(shares)) if shares else None


def _difference(answers: Sequence[Mapping[str, Any]], greedy: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Where an answer first leaves the target's own greedy text, None where none does."""
    for answer in answers:
        own = greedy[answer["prompt"]]
        for i, (token, expected) in enumerate(zip(answer["tokens"], own["tokens"], strict=False)):
            if token != expected:
                return {"prompt": answer["prompt"], "token": i, "gap": own["gaps"][i]}
    return None


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
