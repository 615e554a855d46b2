"""`specdecpp generate`: one answer from any pair, printed as it is decided."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from specdecpp.cli.common import (
    BackendOption,
    Device,
    DraftOrCopies,
    DType,
    DTypeOption,
    Head,
    Json,
    Lossy,
    Target,
    Verification,
    check_names,
    load,
    print_json,
    told,
    usual,
    write,
)

if TYPE_CHECKING:
    from specdecpp.decoder import Decoder, Options, Output, Prompt
    from specdecpp.loading.pair import Pair
    from specdecpp.policies import Policy

EXAMPLES = (
    'specdecpp generate "Why is the sky blue?" --policy fixed:4 --seed 1',
    "echo 'Write a haiku.' | specdecpp generate --temperature 0 --json",
)
POLICY_HELP = (
    "When to stop drafting: fixed:K, none, heuristic, ema, argmax, max-confidence:T, cumulative:T, entropy:T, "
    "draft-verify:T, adaptive-entropy:T, disco:T, ucb-specstop, cascade, online-logistic, specdecpp:T, cost-aware, "
    "auto-off:POLICY, copies:POLICY, tree:SHAPE or bandit:POLICY|POLICY; key=value,... also stands after the colon. Without "
    "it: cost-aware, or specdecpp with a head that nobody has calibrated."
)
MODELS_OWN = "[default: the model's own, or 1]"


def generate(
    prompt: Annotated[str | None, typer.Argument(metavar="PROMPT", help="The prompt; - or none: standard input.")] = None,
    target: Target = None,
    draft: DraftOrCopies = None,
    head: Head = None,
    policy: Annotated[str | None, typer.Option(metavar="SPEC", help=POLICY_HELP)] = None,
    verification: Verification = "token",
    lossy: Lossy = False,
    max_tokens: Annotated[int, typer.Option(metavar="N", help="The most tokens to generate.")] = 256,
    temperature: Annotated[float | None, typer.Option(metavar="X", help=f"0 is greedy.  {MODELS_OWN}")] = None,
    top_k: Annotated[int | None, typer.Option(metavar="N", help="Keep the N likeliest tokens; 0: all.")] = None,
    top_p: Annotated[float | None, typer.Option(metavar="X", help="Keep the likeliest, of mass X.")] = None,
    min_p: Annotated[float | None, typer.Option(metavar="X", help="Drop those below X times the best.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(metavar="X", help="Above 1: fewer repeats.")] = None,
    stop: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="End before this text; repeatable.")] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", min=0, help="Same seed, same answer.")] = None,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--raw", help="A user message, or plain text.  [default: by template]"),
    ] = None,
    show_steps: Annotated[bool, typer.Option("--show-rounds", help="Tell accepted, corrected and bonus tokens apart.")] = False,
    as_json: Json = False,
    is_stats: Annotated[
        bool | None, typer.Option("--stats/--no-stats", help="Figures on stderr.  [default: if a terminal]")
    ] = None,
    dtype: DTypeOption = DType.auto,
    device: Device = None,
    backend: BackendOption = None,
) -> None:
    """Answer one prompt, printing the text as it is decided."""
    with told():
        from specdecpp.policy_spec import as_prompt, check_sampling, parse_policy, spec_of, to_dict
        from specdecpp.sampling import asked

        spec = None if policy is None else parse_policy(policy)
        text = _prompt_text(prompt)
        check_names(target, draft, head, spec, copies=True)
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
        pair = load(usual(target, draft, head), draft, head, dtype=dtype, device=device, backend=backend)
        is_greedy = asked(options, pair.sampling).is_greedy
        rule = None if spec is None else spec.build(pair.head)
        decoder = _decoder(pair, rule, verification, is_greedy=is_greedy, lossless=not lossy)
        output = _answer(decoder, as_prompt(pair, text, chat=chat), silent=as_json, show_steps=show_steps, options=options)
        name = spec_of(decoder.policy)
        if as_json:
            print_json(to_dict(output, policy=name, seed=seed))
        _print_stats(output, policy=name, seed=seed, wanted=False if as_json and is_stats is None else is_stats)


def _prompt_text(argument: str | None) -> str:
    """The prompt: the argument, or stdin without its last line end. Raises ValueError when there is none."""
    if argument is not None and argument != "-":
        return argument
    if argument is None and sys.stdin.isatty():
        raise ValueError("there is no prompt. Give one as an argument, or pipe it in.")
    try:
        text = sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is not UTF-8 text ({error.reason} at byte {error.start}). Pipe in text.") from error
    if not text:
        raise ValueError("there is no prompt: standard input is empty. Give one as an argument, or pipe it in.")
    return text


def _decoder(pair: "Pair", policy: "Policy | None", kind: str, *, is_greedy: bool, lossless: bool) -> "Decoder":
    from specdecpp.decoder import Decoder
    from specdecpp.verify import is_lossless, verifications

    if is_greedy and is_lossless(verifications()[kind]):
        kind = "greedy"
    return Decoder(pair, policy=policy, verification=verifications()[kind], lossless=lossless)


def _answer(decoder: "Decoder", prompt: "Prompt", *, silent: bool, show_steps: bool, options: "Options") -> "Output":
    """Decode, writing the text as it is decided: plain, or in styles where a terminal can show them."""
    from specdecpp.policy_spec import watched
    from specdecpp.report import render

    out = render.console()
    if silent:
        return watched(decoder, prompt, lambda _: None, **options)
    if not (show_steps and out.is_terminal):
        output = watched(decoder, prompt, lambda r: write(r.text), **options)
        write("" if output.text.endswith("\n") else "\n")
        return output
    live = render.LiveText(out)
    err = render.console(stderr=True)
    err.print(render.legend(), "")
    output = watched(decoder, prompt, live.push, **options)
    live.finish()
    err.print("", render.tally(live.counts))
    return output


def _print_stats(output: "Output", *, policy: str, seed: int | None, wanted: bool | None) -> None:
    """A few lines on stderr; without --stats only where that is a terminal."""
    from specdecpp.report import render

    err = render.console(stderr=True)
    if err.is_terminal if wanted is None else wanted:
        err.print(render.stats(output.metrics, policy=policy, seed=seed, finish_reason=output.finish_reason))
