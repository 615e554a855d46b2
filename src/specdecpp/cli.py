"""The command line: verbs that parse, call and render. Results go to stdout, chatter to stderr.

`--help` must be quick, so heavy modules are imported inside the verbs.

    specdecpp demo                                       the reference pair, live, and a fair comparison of policies
    specdecpp generate "Why is the sky blue?" --seed 1   one answer from any pair

Exit codes: 0 done; 1 the run failed (unreadable model, wrong head, prompt too long); 2 bad usage; 130 interrupted.
"""

import io
import json
import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdecpp import __version__
from specdecpp.errors import SpecdecError, UnsoundError

if TYPE_CHECKING:
    from rich.console import Console

    from specdecpp.decoder import Decoder, Options, Output, Prompt
    from specdecpp.demo import Comparison, Plan
    from specdecpp.pair import Pair
    from specdecpp.policies import Policy
    from specdecpp.request import PolicySpec

EXAMPLES = {
    "specdecpp": ("specdecpp demo", 'specdecpp generate "Why is the sky blue?" --seed 1'),
    "generate": (
        'specdecpp generate "Why is the sky blue?" --policy fixed:4 --seed 1',
        "echo 'Write a haiku.' | specdecpp generate --temperature 0 --json",
    ),
    "demo": (
        "specdecpp demo --prompts 2 --cycles 1",
        "specdecpp demo --json --quiet | tail -1 > comparison.json",
    ),
}
POLICY_HELP = (
    "When to stop drafting: fixed:K, target, heuristic, max-confidence:T, cumulative:T, entropy:T or specdecpp:T; "
    "key=value,... also stands after the colon. Without it: specdecpp with a head, else cumulative."
)


class Verification(StrEnum):
    """How candidates are tested."""

    token = "token"
    block = "block"
    compare = "compare"


class DType(StrEnum):
    """The type of the weights."""

    auto = "auto"
    float64 = "float64"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def epilog(verb: str) -> str:
    r"""The two examples under a help page; \b keeps click from filling the lines."""
    return "\n  ".join(["\b\nExamples:", *EXAMPLES[verb]])


app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help: quick, and the same under NO_COLOR
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
    epilog=epilog("specdecpp"),
)

Target = Annotated[str | None, typer.Option(metavar="NAME", help="Target model: a folder or a hub name.")]
Draft = Annotated[str | None, typer.Option(metavar="NAME", help="Draft model. Neither: the reference pair.")]
Head = Annotated[str | None, typer.Option(metavar="NAME", help="Acceptance head: a folder or a hub name.")]
DTypeOption = Annotated[DType, typer.Option(metavar="TYPE", help="auto, float64, float32, bfloat16 or float16.")]
Device = Annotated[str | None, typer.Option(metavar="NAME", help="Device, such as cpu or cuda.")]
Json = Annotated[bool, typer.Option("--json", help="One line of JSON on stdout, and nothing else.")]


def _show_version(is_asked: bool) -> bool:
    if is_asked:
        print(f"specdecpp {__version__}")
        raise typer.Exit
    return is_asked


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Adaptive speculative decoding that keeps the target model's distribution."""


@app.command(epilog=epilog("generate"))
def generate(
    prompt: Annotated[str | None, typer.Argument(metavar="PROMPT", help="The prompt; - or none: standard input.")] = None,
    target: Target = None,
    draft: Draft = None,
    head: Head = None,
    policy: Annotated[str | None, typer.Option(metavar="SPEC", help=POLICY_HELP)] = None,
    verification: Annotated[
        Verification, typer.Option(metavar="KIND", help="Test candidates by token, block or compare.")
    ] = Verification.token,
    max_tokens: Annotated[int, typer.Option(metavar="N", help="The most tokens to generate.")] = 256,
    temperature: Annotated[float, typer.Option(metavar="X", help="0 is greedy.")] = 1.0,
    top_k: Annotated[int | None, typer.Option(metavar="N", help="Keep the N likeliest tokens.")] = None,
    top_p: Annotated[float, typer.Option(metavar="X", help="Keep the likeliest, of mass X.")] = 1.0,
    min_p: Annotated[float, typer.Option(metavar="X", help="Drop those below X times the best.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(metavar="X", help="Above 1: fewer repeats.")] = 1.0,
    stop: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="End before this text; repeatable.")] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", min=0, help="Same seed, same answer.  [default: random]")] = None,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--raw", help="A user message, or plain text.  [default: by template]"),
    ] = None,
    show_rounds: Annotated[
        bool, typer.Option("--show-rounds", help="Tell accepted, corrected and bonus tokens apart.")
    ] = False,
    as_json: Json = False,
    is_stats: Annotated[
        bool | None, typer.Option("--stats/--no-stats", help="Figures on stderr.  [default: if a terminal]")
    ] = None,
    dtype: DTypeOption = DType.auto,
    device: Device = None,
) -> None:
    """Answer one prompt, printing the text as it is decided."""
    with _told():
        from specdecpp.request import as_prompt, check_sampling, parse_policy, spec_of, to_dict

        spec = None if policy is None else parse_policy(policy)
        text = _prompt_text(prompt)
        _check_names(target, draft, head, spec)
        seed = secrets.randbelow(2**31) if seed is None else seed
        options: Options = {
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "repetition_penalty": repetition_penalty,
            "stop": stop or (),
            "seed": seed,
        }
        check_sampling(options)
        pair = _load(target, draft, head, dtype=dtype, device=device)
        decoder = _decoder(pair, None if spec is None else spec.build(pair.head), verification, is_greedy=temperature == 0)
        output = _answer(decoder, as_prompt(pair, text, chat=chat), silent=as_json, show_rounds=show_rounds, options=options)
        name = spec_of(decoder.policy)
        if as_json:
            _print_json(to_dict(output, policy=name, seed=seed))
        _print_stats(output, policy=name, seed=seed, wanted=False if as_json and is_stats is None else is_stats)


@app.command(epilog=epilog("demo"))
def demo(
    target: Target = None,
    draft: Draft = None,
    head: Head = None,
    max_tokens: Annotated[int, typer.Option(metavar="N", help="The most tokens per answer.")] = 128,
    prompts: Annotated[int, typer.Option(metavar="N", help="How many of the built-in prompts, 1 to 4.")] = 4,
    cycles: Annotated[int, typer.Option(metavar="N", help="How often all of them are timed.")] = 3,
    temperature: Annotated[float, typer.Option(metavar="X", help="0 is greedy.")] = 1.0,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Same seed, same answers.")] = 0,
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Only the result: no live text, no progress.")] = False,
    dtype: DTypeOption = DType.auto,
    device: Device = None,
) -> None:
    """Watch SpecDec++ decode, then compare policies.

    The comparison is fair: same prompts, seeds and code; policies interleaved; the rivals tuned on other prompts. With
    the reference pair it takes less than a minute.
    """
    with _told():
        _check_names(target, draft, head)
        from specdecpp.demo import Plan, to_dict

        plan = Plan(max_tokens=max_tokens, num_prompts=prompts, num_cycles=cycles, temperature=temperature, seed=seed)
        pair = _load(target, draft, head, dtype=dtype, device=device, quiet=quiet)
        comparison = _run_demo(pair, plan, stderr=as_json, quiet=quiet)
        if as_json:
            _print_json(to_dict(comparison))


def _run_demo(pair: "Pair", plan: "Plan", *, stderr: bool, quiet: bool) -> "Comparison":
    """The stages in order: tune the rivals, live text, comparison, table. With `stderr`, stdout is left to the JSON."""
    from specdecpp import demo, render

    out = render.console(stderr=stderr)
    if not quiet:
        out.print(render.heading("The pair", demo.description(pair)))
    with render.progress("tuning the rivals", demo.NUM_DEV_RUNS, quiet=quiet) as tick:
        rivals = demo.tuned_rivals(pair, plan, tick)
    if not quiet:
        _live(pair, plan, out)
    policies = demo.contestants(pair, rivals)
    with render.progress("comparing", len(policies) * plan.num_runs, quiet=quiet) as tick:
        comparison = demo.compare(pair, policies, plan, tick)
    if not (quiet and stderr):
        out.print(render.heading("The comparison", demo.conditions(plan)))
        out.print(render.comparison_view(comparison, out))
    return comparison


def _live(pair: "Pair", plan: "Plan", out: "Console") -> None:
    """SpecDec++ answering the first prompts, every token in the style of its origin."""
    from specdecpp import demo, render
    from specdecpp.decoder import Decoder
    from specdecpp.request import as_prompt, watched

    decoder = Decoder(pair)
    options = {"max_tokens": plan.max_tokens, "temperature": plan.temperature, "seed": plan.seed}
    if out.is_terminal:
        out.print(render.legend())
    for text in demo.PROMPTS[: min(plan.num_prompts, demo.NUM_LIVE)]:
        out.print(render.quoted(text))
        live = render.LiveText(out)
        watched(decoder, as_prompt(pair, text), live.push, **options)
        live.finish()
        out.print("", render.tally(live.counts), sep="\n")


def _prompt_text(argument: str | None) -> str:
    """The prompt: the argument, or stdin without its last line end. Raises ValueError when there is none."""
    if argument is not None and argument != "-":
        return argument
    if argument is None and sys.stdin.isatty():
        raise ValueError("there is no prompt. Give one as an argument, or pipe it in.")
    text = sys.stdin.read().removesuffix("\n")
    if not text:
        raise ValueError("there is no prompt: standard input is empty. Give one as an argument, or pipe it in.")
    return text


def _check_names(target: str | None, draft: str | None, head: str | None, spec: "PolicySpec | None" = None) -> None:
    """Refuse, before models are loaded, names that cannot make a pair, and a policy that lacks its head."""
    if (target is None) != (draft is None):
        raise ValueError("--target and --draft go together. Name both, or neither for the reference pair.")
    if spec is not None and target is not None and head is None:
        spec.build(None)


def _load(
    target: str | None, draft: str | None, head: str | None, *, dtype: DType, device: str | None, quiet: bool = False
) -> "Pair":
    """The pair, with transformers silenced and a spinner where somebody looks."""
    import torch
    from transformers.utils import logging

    from specdecpp import render
    from specdecpp.pair import load_pair

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {device} cannot be used here: {str(error).splitlines()[0]}") from error
    logging.set_verbosity_error()
    if all(name is None or Path(name).exists() for name in (target, draft)):
        logging.disable_progress_bar()  # it stays for what must be fetched
    with render.waiting("loading the pair", quiet=quiet):
        return load_pair(target, draft=draft, head=head, dtype=dtype.value, device=device)


def _decoder(pair: "Pair", policy: "Policy | None", kind: Verification, *, is_greedy: bool) -> "Decoder":
    from specdecpp import verification as v
    from specdecpp.decoder import Decoder

    kinds = {"token": v.TokenVerification(), "block": v.BlockVerification(), "compare": v.CompareVerification()}
    return Decoder(pair, policy=policy, verification=v.GreedyVerification() if is_greedy else kinds[kind.value])


def _answer(decoder: "Decoder", prompt: "Prompt", *, silent: bool, show_rounds: bool, options: "Options") -> "Output":
    """Decode, writing the text as it is decided: plain, or in styles where a terminal can show them."""
    from specdecpp import render
    from specdecpp.request import watched

    out = render.console()
    if silent:
        return watched(decoder, prompt, lambda _: None, **options)
    if not (show_rounds and out.is_terminal):
        output = watched(decoder, prompt, lambda r: _write(r.text), **options)
        _write("" if output.text.endswith("\n") else "\n")
        return output
    live = render.LiveText(out, indent=0)
    err = render.console(stderr=True)
    err.print(render.legend(), "")
    output = watched(decoder, prompt, live.push, **options)
    live.finish()
    err.print("", render.tally(live.counts))
    return output


def _print_stats(output: "Output", *, policy: str, seed: int, wanted: bool | None) -> None:
    """A few lines on stderr; unasked, only where somebody looks."""
    from specdecpp import render

    err = render.console(stderr=True)
    if err.is_terminal if wanted is None else wanted:
        err.print(render.stats(output.metrics, policy=policy, seed=seed, finish_reason=output.finish_reason))


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _print_json(value: dict[str, Any]) -> None:
    _write(json.dumps(value, ensure_ascii=False) + "\n")


@contextmanager
def _told() -> Iterator[None]:
    """Expected errors become one line on stderr and an exit code; a reader that has gone away is no error."""
    try:
        yield
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still buffered goes nowhere
        raise typer.Exit(0) from None
    except (SpecdecError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        is_usage = isinstance(error, UnsoundError) or not isinstance(error, SpecdecError)
        raise typer.Exit(2 if is_usage else 1) from None


def main() -> None:
    """The console script. Characters that a terminal cannot show become question marks instead of errors."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    app(prog_name="specdecpp")
