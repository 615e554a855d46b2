"""Rows of a comparison in plain sentences; a loss is stated as plainly as a win."""

from collections.abc import Iterator, Sequence

from specdecpp.bench.results import Interval, Row


def said(rows: Sequence[Row]) -> Iterator[str]:
    """Sentences about the rows of one data set and temperature: the fastest rule, and the rule without a threshold."""
    drafting = [row for row in rows if row.chosen and row.role != "target"]
    if not drafting:
        return
    best = max(drafting, key=lambda row: row.speedup)
    speed = f"{times(best.speedup, best.speedup_interval)} the target alone"
    if round(best.speedup, 2) <= 1:
        yield f"No rule is faster than the target alone; {name_of(best)} comes closest with {speed}."
    else:
        yield f"{name_of(best)} is fastest, {speed}{_gain(best)}."
    for row in drafting:
        if row.role == "cost_aware" and row is not best:
            yield f"{name_of(row)} reaches {times(row.speedup, row.speedup_interval)}{_gain(row)}."


def name_of(row: Row) -> str:
    """The label, and the verification where it is not the usual one."""
    return row.label if row.verification in ("token", "greedy") else f"{row.label} ({row.verification})"


def times(value: float, interval: Interval | None) -> str:
    """Text such as "1.25 times [1.20, 1.31]"."""
    return f"{value:.2f} times" + ("" if interval is None else f" [{interval[0]:.2f}, {interval[1]:.2f}]")


def _gain(row: Row) -> str:
    gain, interval = row.gain_over_best_fixed, row.gain_interval
    if gain is None or (interval is None and gain == 0):
        return ""
    spread = "" if interval is None else f" [{100 * interval[0]:+.1f}, {100 * interval[1]:+.1f}]"
    doubt = ": too close to call" if interval is not None and interval[0] < 0 < interval[1] else ""
    return f", {100 * gain:+.1f} %{spread} on the best fixed K{doubt}"
