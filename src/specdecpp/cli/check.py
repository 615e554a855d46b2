"""`specdecpp check`: whether a pair is worth it here, and what to do if not."""

import sys
from contextlib import suppress
from time import perf_counter
from typing import Annotated

import typer

from specdecpp.cli import common

EXAMPLES = (
    "specdecpp check",
    "specdecpp check --target Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B",
)


@common.with_pair()
def check(
    names: common.PairNames,
    prompts: common.Prompts = None,
    prompt: common.PromptKind = None,
    num: Annotated[int, typer.Option(metavar="N", min=2, help="Of each file, at most.")] = 8,
    temperature: Annotated[float, typer.Option(metavar="X", help="0 is greedy.")] = 1.0,
    top_p: common.TopP = 1.0,
    quick: common.Quick = False,
    minutes: Annotated[
        float | None,
        typer.Option(metavar="N", help="At most N minutes, and as long for figures that are kept.  [default: 1; quick: 1/4]"),
    ] = None,
    as_json: common.Json = False,
) -> None:
    """Measure a pair in a minute: is it worth it?

    Real steps on practice prompts: what a draft token and a target pass cost here, how often the target accepts what is
    drafted, which length or rule is therefore fastest, and what stands in the way. The estimate is refined until it is
    tight or the time is over, loading not counted; Ctrl-C ends it with what is known. Then acceptance is measured and kept, so
    that later requests show when it has fallen.
    """
    from specdecpp.bench import check as checking
    from specdecpp.bench import questions
    from specdecpp.report import advice, render
    from specdecpp.sampling import Sampling

    if quick and minutes is not None:
        raise ValueError(f"--quick is 15 seconds, and --minutes {minutes:g} is another time. Give one.")
    seconds = checking.QUICK_S if quick else checking.USUAL_S if minutes is None else 60 * minutes
    trial = checking.Trial(seconds=seconds, sampling=Sampling(temperature=temperature, top_p=top_p))
    names.check()
    texts = questions.read(prompts or (), prompt or ())
    started = perf_counter()
    pair = names.load()
    print(f"loaded in {common.clock(perf_counter() - started)}", file=sys.stderr)
    sets = [questions.encoded(pair, of, num_dev=num // 2, num_test=num - num // 2) for of in texts]
    try:
        with common.interruptible(), render.live("checking") as tell:
            print(f"checking for at most {common.clock(trial.seconds)}; Ctrl-C ends it with what is known", file=sys.stderr)
            found = checking.check(pair, sets, trial, tell=lambda now: tell(advice.now(now)), may_interrupt=True)
    except KeyboardInterrupt:
        print("interrupted before anything was known of this pair.", file=sys.stderr)
        raise typer.Exit(130) from None
    if as_json:
        common.print_json(advice.to_dict(found))
    else:
        out = render.console()
        out.print(advice.terminal(found), width=render.width_of(out))
    if not found.is_interrupted:
        with suppress(KeyboardInterrupt), common.interruptible(), render.live("measuring acceptance") as tell:
            limit = common.clock(trial.seconds)
            print(f"measuring acceptance for at most {limit}, to notice when it falls; Ctrl-C ends it", file=sys.stderr)
            later = texts if prompts else [questions.PRACTICE]
            asked = [ids for of in later for ids in questions.encoded(pair, of, num_dev=0, num_test=checking.REQUESTS).test]
            checking.keep_figures(pair, asked, trial, tell=tell)
