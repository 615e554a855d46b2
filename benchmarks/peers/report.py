"""Tables of what was measured, as markdown. Rows where ours lose are among the others."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from peers.plan import SMOLLM2
from peers.rows import Row

HEADER = (
    "| engine | setting | tokens/s | ratio to ours | ms/step | steps | drafts/step | x floor | overhead | MB | text |\n"
    "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---|"
)


def markdown(rows: Sequence[Row], provenance: Mapping[str, Any]) -> str:
    """All tables, the comparisons that matter first."""
    machine = provenance["machine"]
    speeds = ", ".join(f"{gb:g} GB/s on {n} thread{'s' * (int(n) > 1)}" for n, gb in machine["bandwidth_gb_per_s"].items())
    parts = [
        "# Ours beside other engines\n",
        f"`{provenance['command']}`, {provenance['date']}; {machine['cpu']}, {machine['cores']} cores; memory gives {speeds}. "
        f"{', '.join(f'{name} {version}' for name, version in sorted(provenance['versions'].items()))}.\n",
        f"Tokens/s are of whole answers, reading the prompt included; medians over {provenance['plan']['cycles']} interleaved "
        "cycles. ms/step are without the first token. Ratio to ours: tokens/s over those of our fastest setting in the same "
        "cycle. x floor: a step over the time memory takes to give the weights it reads. bf16, int8 and int4 change what the "
        "model says; so do engines, and native-int8, that step activations. The reference pair's weights are numbers that "
        "bfloat16 has too: in its f32 rows native keeps them as such and sums in float32, with the same bits as from 32-bit "
        "weights. smollm2 is SmolLM2-135M-Instruct as its Q4_1 file has it, and those values rounded to bfloat16, with "
        "the draft that ships (pairs of our own have drafts that were made to agree, and no head). OpenVINO packs weights "
        "itself, int4 and q4_1 in groups of 32 as the files do. Sampling with a draft it accepts most of smollm2's draft "
        "tokens (`accepted_per_round`) where the distribution allows few (`acceptance`), and writes what the target would not: "
        "those rows are in the tables, not in the summary.\n",
        "## In short\n",
        *_summary(rows),
        "",
    ]
    for group, some in _groups(rows):
        parts += [f"## {_title(*group)}\n", HEADER]
        parts += [_line(row) for row in sorted(some, key=lambda r: -(r.tokens_per_second or 0))]
        parts.append("")
    return "\n".join(parts)


def _groups(rows: Sequence[Row]) -> Iterator[tuple[tuple[str, str, int, float], list[Row]]]:
    def key(row: Row) -> tuple[str, str, int, float]:
        return row.pair, row.dtype, row.threads, row.temperature

    order = {group: i for i, group in enumerate(dict.fromkeys(map(key, rows)))}
    for group, some in groupby(sorted(rows, key=lambda r: order[key(r)]), key):
        yield group, list(some)


def _title(pair: str, dtype: str, threads: int, temperature: float) -> str:
    return f"{pair}, {dtype}, {threads} thread{'s' * (threads > 1)}, {f'T = {temperature:g}' if temperature else 'greedy'}"


def _line(row: Row) -> str:
    name = row.engine if row.backend is None else f"**ours**, {row.backend}"
    if row.note is not None:
        return f"| {name} | {row.setting} | {row.note} | | | | | | | | |"
    figures = (
        _text(row.tokens_per_second, 0),
        _text(row.ratio_to_ours, 2),
        _text(row.ms_per_round, 2),
        _text(row.steps, 1),
        _text(row.drafts_per_round, 2),
        _text(row.ratio_to_floor, 2),
        "" if row.overhead is None else f"{100 * row.overhead:.0f} %",
        _text(row.peak_memory_mb, 0),
        _equality(row),
    )
    return f"| {name} | {row.setting} | {' | '.join(figures)} |"


def _text(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def _equality(row: Row) -> str:
    if row.outputs_equal is None:
        return ""
    if row.outputs_equal:
        return "equal"
    found = row.first_difference or {}
    return f"differs at token {found['token']} (gap {found['gap']:.2g})"


def _summary(rows: Sequence[Row]) -> Iterator[str]:
    """Ours at its best over each engine at its best, with the rule that needs no tuning too, and eager over transformers at the
    same K."""
    for (pair, dtype, threads, temperature), some in _groups(rows):
        lawful = [row for row in some if row.tokens_per_second and _keeps_the_law(row)]
        best = {row.engine: row for row in sorted(lawful, key=lambda r: r.tokens_per_second or 0)}
        ours = best.pop("ours", None)
        if ours is None or ours.tokens_per_second is None or not best:
            continue
        rule = max(
            (r for r in some if r.setting == "cost-aware" and r.ratio_to_ours), key=lambda r: r.ratio_to_ours or 0, default=None
        )
        told = []
        for engine, row in best.items():
            if row.ratio_to_ours:
                untuned = f", CostAware {rule.ratio_to_ours / row.ratio_to_ours:.2f}" if rule and rule.ratio_to_ours else ""
                told.append(f"{engine} {1 / row.ratio_to_ours:.2f}{untuned} ({row.setting})")
        told += [f"eager over transformers at K = {k}: {ratio:.2f}" for k in (4, 8) if (ratio := _eager(some, f"K = {k}"))]
        told += _alone(some)
        head = f"- {_title(pair, dtype, threads, temperature)}: ours {ours.tokens_per_second:,.0f} tokens/s ({ours.backend}, "
        yield f"{head}{ours.setting}) over {'; '.join(told)}"


def _keeps_the_law(row: Row) -> bool:
    """Not where an engine accepts what its target would hardly ever say."""
    drafts = row.engine == "openvino" and row.setting != "target alone"
    return not (drafts and row.pair == SMOLLM2 and row.temperature)


def _alone(rows: Sequence[Row]) -> Iterator[str]:
    """Our compiled backends over other engines, the target alone."""
    alone = {(r.engine, r.backend): r.ratio_to_ours for r in rows if r.setting == "target alone" and r.ratio_to_ours}
    for (engine, backend), ratio in alone.items():
        theirs = {name: other for (name, _), other in alone.items() if name != "ours"}
        if engine == "ours" and backend in ("native", "native-int8") and theirs:
            found = ", ".join(f"{name} {ratio / other:.2f}" for name, other in theirs.items())
            yield f"target alone, {backend} over {found}"


def _eager(rows: Sequence[Row], setting: str) -> float | None:
    """Our eager backend over transformers at the same setting, None where one of them is missing."""
    speeds = {(r.engine, r.backend): r.tokens_per_second for r in rows if r.setting == setting}
    ours, theirs = speeds.get(("ours", "eager")), speeds.get(("transformers", None))
    return ours / theirs if ours and theirs else None
