"""What was measured so far, a JSON object a line: a run that is killed goes on where it was."""

import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from peers.provenance import provenance

from realpair.prompts import SETS
from specdecpp.bench.contest import interleaved

Record = dict[str, Any]
SAMPLINGS = ((0.0, 1.0), (0.7, 0.9))
"""Temperature and top_p."""
WARM_UP = 8
"""Tokens of an answer before the first that is timed: what is measured or started at first use."""
KEY = "pair", "part", "set", "temperature", "prompt", "setting"


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A prompt under a sampling; every contestant answers it before the next turn."""

    set: str
    temperature: float
    top_p: float
    prompt: int


Run = Callable[[list[int], Turn, int], Mapping[str, float]]
"""(Prompt, turn, most tokens) to tokens, seconds, and those of them in which the prompt was read."""


def turns(num: int) -> list[Turn]:
    """Sets and samplings alternate, so that a slow hour falls on all of them."""
    return [Turn(set=name, temperature=t, top_p=top_p, prompt=i) for i in range(num) for name in SETS for t, top_p in SAMPLINGS]


@dataclass
class Log:
    """Records in a file; of two with one key the later counts."""

    path: Path
    records: dict[tuple[Any, ...], Record] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path.exists():
            *whole, last = self.path.read_text(encoding="utf-8").split("\n")
            if last:  # a process that was killed while writing it
                self.path.write_text("".join(f"{line}\n" for line in whole), encoding="utf-8")
            for line in whole:
                self._keep(json.loads(line))

    def _keep(self, record: Record) -> None:
        self.records[tuple(record.get(name) for name in KEY)] = record

    def add(self, **record: Any) -> None:
        self._keep(record)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def of(self, pair: str, part: str) -> Iterator[Record]:
        return (record for record in self.records.values() if (record.get("pair"), record["part"]) == (pair, part))

    def get(self, pair: str, part: str, turn: Turn | None, setting: str) -> Record | None:
        place = (turn.set, turn.temperature, turn.prompt) if turn else (None, None, None)
        return self.records.get((pair, part, *place, setting))

    def has(self, pair: str, part: str, turn: Turn | None, settings: Collection[str]) -> bool:
        """Tells whether all of them have answered; a turn that was interrupted is done again as a whole."""
        return all(self.get(pair, part, turn, setting) for setting in settings)

    def measure(
        self,
        pair: str,
        part: str,
        runs: Mapping[str, Run],
        waiting: Sequence[Turn],
        prompt_of: Callable[[Turn], list[int]],
        *,
        tokens: int,
    ) -> None:
        """Everybody's answers to the prompts that are missing, in a random order for each prompt."""

        def run(answer: Run, turn: Turn, tokens: int) -> Mapping[str, float]:
            return answer(prompt_of(turn), turn, tokens)

        own = {name: partial(run, answer) for name, answer in runs.items()}
        found = interleaved(own, waiting, max_tokens=tokens, warm_up=WARM_UP, at_random=True)
        for number, (name, turn, answer) in enumerate(found, 1):
            place = {"set": turn.set, "temperature": turn.temperature, "prompt": turn.prompt}
            self.add(pair=pair, part=part, **place, setting=name, **answer)
            if number % len(own) == 0:
                print(f"  {pair}, {part}: turn {number // len(own)} of {len(waiting)}", file=sys.stderr, flush=True)

    def agree(self, **plan: Any) -> None:
        """Keep the plan. Raises ValueError where the file was begun under another one: its runs would not be comparable."""
        begun: Record = next(self.of("all", "plan"), {})
        if begun and begun["plan"] != plan:
            raise ValueError(
                f"{self.path} was begun with {begun['plan']}, and {plan} is asked for. Name another folder with --work, or "
                "delete this one to measure everything anew."
            )
        if not begun:
            origin = {name: value for name, value in provenance().items() if name in ("date", "git")}
            self.add(pair="all", part="plan", setting="plan", plan=plan, origin=origin)

    @property
    def origin(self) -> Record:
        """Day and commit of the first measurement: later commands that find everything there do not make it newer."""
        return dict(next(self.of("all", "plan"), {}).get("origin", {}))
