"""The results file: one JSON object with a row for every setting that was measured or replayed, and where it came from.

`contest` and `replays` make it, reports are made of it. Rates are ratios of sums over prompts; intervals are 95 %, by a
paired bootstrap over prompts. R_d and R_v are the paper's.
"""

import json
import math
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import TypeAdapter, ValidationError

from specdecpp import cache_dir
from specdecpp.costs import Costs
from specdecpp.errors import DataError

if TYPE_CHECKING:
    from specdecpp.head import AcceptanceHead
    from specdecpp.loading.pair import Pair

Role = Literal["target", "fixed", "free", "other", "specdecpp", "cost_aware", "oracle"]
"""In the order in which tables show them."""
Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Costs of a step with a name: measured here, read from a file, or given as c in units of a target pass."""

    name: str
    costs: Costs

    @classmethod
    def relative(cls, c: float) -> "Machine":
        """A draft token costs c target passes, and a pass the same at any width: the paper's cost model.

        Raises ValueError unless c is a finite number of at least 0.

        >>> Machine.relative(0.22).name
        'c = 0.22'
        """
        if not 0 <= c < math.inf:
            raise ValueError(
                f"c, the time of a draft step over that of a target pass, must be finite and at least 0, got {c:g}."
            )
        return cls(name=f"c = {c:g}", costs=Costs.relative(c))

    @classmethod
    def read(cls, path: Path | str) -> "Machine":
        """From a JSON file with draft_s and passes, by itself or as `costs` of a results file. Raises `DataError`."""
        try:
            found: Any = json.loads(Path(path).read_text(encoding="utf-8"))
            found = found.get("costs", found) if isinstance(found, dict) else found
            if not isinstance(found, dict):
                raise ValueError(f"a {type(found).__name__} where an object was expected")
            return cls(name=str(found.get("name", Path(path).stem)), costs=Costs.parse(found))
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise DataError(
                f"{path} does not hold costs ({reason}). Give a number c, or JSON with the seconds of a draft token and "
                'of passes by positions: {"draft_s": 0.02, "passes": {"1": 0.1, "5": 0.11}}.'
            ) from error

    def to_dict(self) -> dict[str, Any]:
        """The form of a results file; `c` is a draft token over a target pass of one position."""
        costs = self.costs
        seconds = {name: getattr(costs, name) for name in ("draft_s", "start_s", "head_s", "switch_s")}
        passes = {str(n): s for n, s in costs.passes.items()}
        return {"name": self.name, **seconds, "passes": passes, "c": costs.draft_s / costs.verify_s(1)}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting of one rule on one set of prompts."""

    dataset: str
    temperature: float
    verification: str
    role: Role
    policy: str
    label: str
    chosen: bool
    """True for the setting of its rule that the development split chose, or the only one."""


@dataclass(frozen=True, kw_only=True)
class Row(Setting):
    """Figures of one setting.

    `gain_over_best_fixed` is a fraction, against the chosen fixed K under token verification (at temperature 0, greedy);
    `share_of_headroom` is (own - best fixed)/(oracle - best fixed) in tokens/s, None where no oracle was run.
    """

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
    num_prompts: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class Results:
    """A whole comparison. `costs` says what a step costs, as `Machine` writes it."""

    kind: Literal["bench", "replay"]
    provenance: Mapping[str, Any]
    costs: Mapping[str, Any]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    is_partial: bool = False
    """Tell whether the run was interrupted; the notes then say how far it came."""

    def to_dict(self) -> dict[str, Any]:
        """The content of the file."""
        return json.loads(json.dumps(asdict(self)))

    def write(self, path: Path | str) -> None:
        """Write the file whole or not at all. Raises `DataError` where that cannot be done."""
        write(path, json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n")

    @classmethod
    def read(cls, path: Path | str) -> "Results":
        """Read a file made by `write`. Raises `DataError` for one that is missing or holds something else."""
        try:
            found = TypeAdapter(cls).validate_json(Path(path).read_bytes())
            Costs.parse(found.costs)
            if not (isinstance(found.costs.get("c"), int | float) and isinstance(found.costs.get("name"), str)):
                raise ValueError("its costs lack their name, or c")
            return found
        except OSError as error:
            raise DataError(
                f"the results {path} cannot be read ({error.strerror}). Make them with: specdecpp bench --out FILE"
            ) from error
        except (TypeError, ValueError) as error:
            reason: object = error
            if isinstance(error, ValidationError):
                first = error.errors()[0]
                reason = ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))
            raise DataError(f"{path} is no file of bench, or damaged ({reason}). Make it again with bench.") from error


def writable(path: Path | str) -> Path:
    """The path, with its folder made: before a long run, so that its end is not lost. Raises `DataError` if it cannot."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"the folder {path.parent} cannot be made ({error.strerror}). Name another file.") from error
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise DataError(f"{path} {'is a folder' if path.is_dir() else 'lies in a folder without write access'}. Name a file.")
    return path


def write(path: Path | str, text: str) -> None:
    """Write a text whole or not at all. Raises `DataError` where that cannot be done."""
    path = writable(path)
    try:
        cache_dir.write(path, text)
    except OSError as error:
        raise DataError(f"{path} cannot be written ({error.strerror}). Name another file.") from error


def provenance_of(pair: "Pair | None" = None, *, seed: int, **more: Any) -> dict[str, Any]:
    """Where results come from: the command, versions, the machine, the pair; `more` as it is (data, plan, ...)."""
    import torch

    from specdecpp.training.collect import git_sha, versions

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    about = {
        "command": command(sys.argv),
        "git": git_sha(),
        **versions("torch", "transformers"),
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
    return {name: getattr(head.card, name) for name in ("form", "is_calibrated", "sampling", "stopping")}


def _about(pair: "Pair") -> dict[str, Any]:
    """The two models: names without folders, fingerprints, and how they were run."""
    prints = {"target": pair.target_fingerprint, "draft": pair.draft_fingerprint}
    return {"backends": pair.backends} | {
        role: {
            "name": pair.names[role],
            "fingerprint": prints[role],
            "backend": type(model).__name__,
            "device": str(model.device),
            "dtype": str(getattr(getattr(model, "model", model), "dtype", None)).removeprefix("torch."),
        }
        for role, model in (("target", pair.target), ("draft", pair.draft))
    }
