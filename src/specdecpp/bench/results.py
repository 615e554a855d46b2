"""The results file: one JSON object with a row for every setting that was measured or replayed, and where it came from.

`run` and `replays` make it, reports are made of it. Rates are ratios of sums over prompts; intervals are 95 %, by a paired
bootstrap over prompts. R_d and R_v are the paper's.
"""

import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from specdecpp.costs import Costs
from specdecpp.errors import DataError

if TYPE_CHECKING:
    from specdecpp.head import AcceptanceHead
    from specdecpp.loading.pair import Pair

Role = Literal["target", "fixed", "free", "specdecpp", "cost_aware", "other", "oracle"]
Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One setting of one rule on one set of prompts.

    `gain_over_best_fixed` is a fraction, against the chosen fixed K under token verification (at temperature 0, greedy);
    `share_of_headroom` is (own - best fixed)/(oracle - best fixed) in tokens/s, None where no oracle was run.
    """

    dataset: str
    temperature: float
    verification: str
    role: Role
    policy: str
    label: str
    chosen: bool
    """Tell whether this is the setting of its rule that the development split chose, or the only one."""
    tokens_per_second: float
    speedup: float
    speedup_interval: Interval | None
    gain_over_best_fixed: float | None
    gain_interval: Interval | None
    mean_acceptance_length: float
    discard_rate: float
    verification_rate: float
    share_of_headroom: Mapping[str, float | None]
    time_shares: Mapping[str, float] | None
    drafted_histogram: Mapping[str, int]
    num_prompts: int
    num_tokens: int
    rate_interval: Interval | None = None
    """Of `tokens_per_second`: 95 % over prompts."""
    lossless: bool = True
    mean_tv: float = 0.0
    """Total variation a token from the target's distribution (`Metrics.mean_tv`)."""

    @property
    def arena(self) -> tuple[str, float, str]:
        """Keys that rows must share to be compared under one verification."""
        return self.dataset, self.temperature, self.verification


@dataclass(frozen=True, kw_only=True)
class Results:
    """A whole comparison. `costs` says what a step costs, as `machines.Machine` writes it."""

    kind: Literal["bench", "replay"]
    provenance: Mapping[str, Any]
    costs: Mapping[str, Any]
    rows: tuple[Row, ...]
    reliability: Mapping[str, Mapping[str, Sequence[float]]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    is_partial: bool = False
    """Tell whether the run was interrupted; the notes then say how far it came."""

    def to_dict(self) -> dict[str, Any]:
        """The content of the file."""
        content = asdict(self)
        content["rows"] = [asdict(row) for row in self.rows]
        if not self.reliability:
            del content["reliability"]
        if not self.is_partial:
            del content["is_partial"]
        return json.loads(json.dumps(content))

    @classmethod
    def from_dict(cls, content: Any, *, name: str = "the results") -> "Results":
        """The inverse of `to_dict`. Raises `DataError` where a key is missing or has no place here, and for costs, rows or a
        role that are none."""
        top = _checked(cls, content, name)
        try:
            _check_costs(top["costs"])
            rows = tuple(Row(**_row(_checked(Row, row, f"row {i} of {name}"))) for i, row in enumerate(top["rows"], 1))
            return cls(**top | {"rows": rows, "notes": tuple(top.get("notes", ()))})
        except DataError:
            raise
        except (TypeError, ValueError) as error:
            raise DataError(f"{name} is damaged ({error}). Make it again with bench.") from error

    def write(self, path: Path | str) -> None:
        """Write the file whole or not at all. Raises `DataError` where that cannot be done."""
        from specdecpp import cache_dir

        path = writable(path)
        try:
            cache_dir.write(path, json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n")
        except OSError as error:
            raise DataError(f"the results cannot be written to {path} ({error.strerror}). Name another file.") from error

    @classmethod
    def read(cls, path: Path | str) -> "Results":
        """Read a file made by `write`. Raises `DataError` for one that is missing, is not JSON, or holds something else."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise DataError(
                f"the results {path} cannot be read ({error.strerror}). Make them with: specdecpp bench --out FILE"
            ) from error
        except ValueError as error:
            raise DataError(f"{path} is not readable JSON ({error}). Make it again.") from error
        return cls.from_dict(content, name=str(path))


def write_all(found: Sequence[Results], path: Path | str) -> list[Path]:
    """Write results of several costs, each into a file named after its costs; one alone into the very file. The paths."""
    path = Path(path)
    names = [re.sub(r"[^\w.]+", "", str(results.costs["name"])) for results in found]
    paths = [path.with_name(f"{path.stem}-{name}{path.suffix}") for name in names] if len(found) > 1 else [path]
    for results, own in zip(found, paths, strict=True):
        results.write(own)
    return paths


def writable(path: Path | str) -> Path:
    """The path, with its folder made: asked before a long run, so that its end is not lost. Raises `DataError` if it
    cannot."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"the folder {path.parent} cannot be made ({error.strerror}). Name another file.") from error
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise DataError(f"{path} {'is a folder' if path.is_dir() else 'lies in a folder without write access'}. Name a file.")
    return path


def provenance_of(pair: "Pair | None" = None, *, seed: int, **more: Any) -> dict[str, Any]:
    """Where results come from: the command, versions, the machine, the pair; `more` as it is (data, plan, ...)."""
    from importlib.metadata import version

    import torch

    import specdecpp
    from specdecpp.training.collect import git_sha

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    about = {
        "command": command(sys.argv),
        "specdecpp": specdecpp.__version__,
        "git": git_sha(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": version("transformers"),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores" + (f", {gpu}" if gpu else ""),
        "threads": torch.get_num_threads(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": seed,
    }
    return about | ({} if pair is None else {"pair": _about(pair), "head": pair.head and head_about(pair.head)}) | more


def command(arguments: Sequence[str]) -> str:
    """The command line with files by their names, since their folders mean nothing elsewhere; a script by its own."""
    script = Path(arguments[0])
    program = ["python", script.name] if script.suffix == ".py" and script.name != "__main__.py" else ["specdecpp"]
    named = [Path(a).name if "/" in a and Path(a).exists() else a for a in arguments[1:]]
    return shlex.join([*program, *named])


def head_about(head: "AcceptanceHead") -> dict[str, Any]:
    """A head in short."""
    card = head.card
    return {"form": card.form, "is_calibrated": card.is_calibrated, "sampling": card.sampling, "stopping": dict(card.stopping)}


def _about(pair: "Pair") -> dict[str, Any]:
    """The two models: names without folders, fingerprints, and how they were run."""
    backends = {"target": pair.target, "draft": pair.draft}
    prints = {"target": pair.target_fingerprint, "draft": pair.draft_fingerprint}
    return {"runners": pair.backends} | {
        role: {
            "name": pair.names[role],
            "fingerprint": prints[role],
            "runner": type(backend).__name__,
            "device": str(backend.device),
            "dtype": str(getattr(getattr(backend, "model", backend), "dtype", None)).removeprefix("torch."),
        }
        for role, backend in backends.items()
    }


def _checked(kind: type[Any], content: Any, name: str) -> dict[str, Any]:
    """The content as arguments of `kind`, once it has every key that is needed and none that is unknown."""
    if not isinstance(content, dict):
        raise DataError(f"{name} is a {type(content).__name__} where an object was expected. Give a file of bench.")
    known = {f.name: f.default is MISSING and f.default_factory is MISSING for f in fields(kind)}
    missing = [n for n, is_needed in known.items() if is_needed and n not in content]
    unknown = [n for n in content if n not in known]
    if missing or unknown:
        lacks = f"lacks {', '.join(missing)}" if missing else f"has {', '.join(unknown)}, which has no place here"
        raise DataError(f"{name} {lacks}. Give a file that bench of this version has written.")
    return content


def _check_costs(costs: Any) -> None:
    """Raise ValueError unless these are costs as `machines.Machine` writes them."""
    Costs.parse(costs)
    if not (isinstance(costs.get("c"), int | float) and isinstance(costs.get("name"), str)):
        raise ValueError("its costs lack their name, or c")


def _row(content: dict[str, Any]) -> dict[str, Any]:
    """Intervals as pairs again. Raises ValueError for an unknown role."""
    if content["role"] not in get_args(Role):
        raise ValueError(f"there is no role {content['role']!r}, only {', '.join(get_args(Role))}")
    names = ("speedup_interval", "gain_interval", "rate_interval")
    pairs = {n: content[n] and tuple(content[n]) for n in names if n in content}
    return content | pairs
