"""`specdecpp check`: whether a pair is worth it here, and what to do if not."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from specdecpp.cli.bench import Builder, Data
from specdecpp.cli.common import (
    BATCHED,
    Device,
    Draft,
    DType,
    DTypeOption,
    Head,
    Json,
    RunnerOption,
    Seed,
    TopP,
    check_names,
    load,
    print_json,
    told,
    usual,
)
from specdecpp.cli.report import show

if TYPE_CHECKING:
    from specdecpp.bench.check import Check

EXAMPLES = (
    "specdecpp check",
    "specdecpp check Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B --dtype bfloat16",
)


def check(
    target: Annotated[str | None, typer.Argument(metavar="TARGET", help="A folder or a hub name.")] = None,
    draft: Draft = None,
    head: Head = None,
    data: Data = None,
    prompt: Builder = None,
    prompts: Annotated[int, typer.Option(metavar="N", min=2, help="Of each file, at most.")] = 8,
    max_tokens: Annotated[int, typer.Option(metavar="N", help="The most tokens per answer.")] = 96,
    temperature: Annotated[float, typer.Option(metavar="X", help="0 is greedy.")] = 1.0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    as_json: Json = False,
    dtype: DTypeOption = DType.auto,
    device: Device = None,
    runner: RunnerOption = None,
) -> None:
    """Measure a pair in a minute: is it worth it?

    What a draft step and a target pass cost here, how often the target accepts what is drafted, what every rule would
    therefore bring, and what stands in the way.
    """
    with told():
        from specdecpp.bench import check as checking
        from specdecpp.bench import questions
        from specdecpp.errors import RunnerError
        from specdecpp.report import advice, render

        trial = checking.Trial(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
        check_names(target, draft, head)
        target = usual(target, draft, head)
        texts = questions.read(data or (), prompt or ())
        pair = load(target, draft, head, dtype=dtype, device=device, runner=runner)
        sets = [questions.encoded(pair, of, num_dev=prompts // 2, num_test=prompts - prompts // 2) for of in texts]
        recorder = pair
        if not checking.is_batched(pair):
            recorder = load(target, draft, None, dtype=dtype, device=device, runner=BATCHED)
        if not checking.is_batched(recorder):
            raise RunnerError(
                f"a check reads whole batches, which llama.cpp does not do here ({recorder.runners}). Name checkpoints, or "
                "time the files themselves: specdecpp bench --target T.gguf --draft D.gguf"
            )
        recorder = replace(recorder, head=pair.head)
        with render.stages("checking", len(checking.STEPS)) as (tick, tell):
            found = checking.check(pair, sets, trial, recorder=recorder, tick=tick, tell=tell)
        if as_json:
            print_json(advice.to_dict(found))
        else:
            _show(found)


def _show(found: "Check") -> None:
    """The sentences, then every rule."""
    from rich.padding import Padding
    from rich.text import Text

    from specdecpp.report import advice, render
    from specdecpp.report.boards import boards

    out = render.console()
    out.print(render.heading("The pair", advice.verdict(found)))
    for sentence in advice.sentences(found):
        out.print(Padding(Text(sentence), (0, 1)), width=render.width_of(out))
    show(boards([advice.table(found)]))
