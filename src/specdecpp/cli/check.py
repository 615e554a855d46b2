"""`specdecpp check`: whether a pair is worth it here, and what to do if not."""

import sys
from contextlib import suppress
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer

from specdecpp.cli.common import (
    Json,
    PairNames,
    PromptKind,
    Prompts,
    Quick,
    TopP,
    clock,
    interruptible,
    print_json,
    with_pair,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdecpp.bench.check import Check, Trial
    from specdecpp.bench.questions import Questions
    from specdecpp.loading.pair import Pair

EXAMPLES = (
    "specdecpp check",
    "specdecpp check --target Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B",
)


@with_pair()
def check(
    names: PairNames,
    prompts: Prompts = None,
    prompt: PromptKind = None,
    num: Annotated[int, typer.Option(metavar="N", min=2, help="Of each file, at most.")] = 8,
    temperature: Annotated[float, typer.Option(metavar="X", help="0 is greedy.")] = 1.0,
    top_p: TopP = 1.0,
    quick: Quick = False,
    minutes: Annotated[
        float | None,
        typer.Option(metavar="N", help="At most N minutes, and as long for figures that are kept.  [default: 1; quick: 1/4]"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure a pair in a minute: is it worth it?

    Real steps on practice prompts: what a draft token and a target pass cost here, how often the target accepts what is
    drafted, which length or rule is therefore fastest, and what stands in the way. The estimate is refined until it is
    tight or the time is over, loading not counted; Ctrl-C ends it with what is known. Then acceptance is measured and kept, so
    that later requests show when it has fallen.
    """
    from specdecpp.bench import check as checking
    from specdecpp.bench import questions
    from specdecpp.report import advice

    if quick and minutes is not None:
        raise ValueError(f"--quick is 15 seconds, and --minutes {minutes:g} is another time. Give one.")
    seconds = checking.QUICK_S if quick else checking.USUAL_S if minutes is None else 60 * minutes
    trial = checking.Trial(seconds=seconds, temperature=temperature, top_p=top_p)
    names.check()
    texts = questions.read(prompts or (), prompt or ())
    started = perf_counter()
    pair = names.load()
    print(f"loaded in {clock(perf_counter() - started)}", file=sys.stderr)
    sets = [questions.encoded(pair, of, num_dev=num // 2, num_test=num - num // 2) for of in texts]
    found = _checked(pair, sets, trial)
    if as_json:
        print_json(advice.to_dict(found))
    else:
        _show(found)
    if not found.is_interrupted:
        _keep(pair, texts, trial)


def _keep(pair: "Pair", texts: "Sequence[Questions]", trial: "Trial") -> None:
    """With the verdict said, decode some more, for later requests to be compared with; Ctrl-C ends it."""
    from specdecpp.bench import check as checking
    from specdecpp.report import render

    with suppress(KeyboardInterrupt), interruptible(), render.live("keeping figures for later") as tell:
        checking.keep_figures(pair, _more(pair, texts), trial, tell=tell)


def _more(pair: "Pair", texts: "Sequence[Questions]") -> list[tuple[int, ...]]:
    """Prompts whose answers are compared with later ones: of the files, else practice prompts of every kind."""
    from specdecpp.bench import check, questions
    from specdecpp.testing import practice_prompts

    if texts == [questions.BUILT_IN]:
        texts = [questions.Questions(dataset="practice", dev=(), test=tuple(practice_prompts()))]
    return [ids for of in texts for ids in questions.encoded(pair, of, num_dev=0, num_test=check.REQUESTS).test]


def _checked(pair: "Pair", sets: "Sequence[Questions]", trial: "Trial") -> "Check":
    """The result when the check ends, by itself or by Ctrl-C. Raises `typer.Exit` with 130 where that is nothing."""
    from specdecpp.bench import check as checking
    from specdecpp.report import advice, render

    try:
        with interruptible(), render.live("checking") as tell:
            print(f"checking for at most {clock(trial.seconds)}; Ctrl-C ends it with what is known", file=sys.stderr)
            return checking.check(pair, sets, trial, tell=lambda now: tell(advice.now(now)), may_interrupt=True)
    except KeyboardInterrupt:
        print("interrupted before anything was known of this pair.", file=sys.stderr)
        raise typer.Exit(130) from None


def _show(found: "Check") -> None:
    """The sentences, then every rule."""
    from rich.padding import Padding
    from rich.text import Text

    from specdecpp.report import advice, render

    out = render.console()
    out.print(render.heading("The pair", advice.verdict(found)))
    for sentence in advice.sentences(found):
        out.print(Padding(Text(sentence), (0, 1)), width=render.width_of(out))
    out.print(render.heading("Rules", "over the target alone; answers with the reading of their prompts"))
    out.print(Padding(advice.table(found), (0, 1)), width=render.width_of(out))
