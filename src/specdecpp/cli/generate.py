"""`specdecpp generate`: one answer from any pair, printed as it is decided."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specdecpp.cli import common

if TYPE_CHECKING:
    from specdecpp.decoder import Options

EXAMPLES = (
    'specdecpp generate "Why is the sky blue?" --policy fixed:4 --seed 1',
    "echo 'Write a haiku.' | specdecpp generate --temperature 0 --json",
)


@common.with_pair(copies=True)
def generate(
    names: common.PairNames,
    prompt: Annotated[str | None, typer.Argument(metavar="PROMPT", help="The prompt; - or none: standard input.")] = None,
    policy: common.PolicyOption = None,
    verification: common.Verification = "token",
    lossy: common.Lossy = False,
    max_tokens: common.MaxTokens = 256,
    temperature: common.Temperature = None,
    top_p: common.TopPOfModel = None,
    seed: Annotated[int | None, typer.Option(metavar="N", min=0, help="Same seed, same answer.")] = None,
    json_schema: Annotated[
        Path | None, typer.Option("--json-schema", metavar="FILE", exists=True, help="Answer with JSON that fits this schema.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Plain text, though there is a chat template.")] = False,
    as_json: common.Json = False,
    stats: Annotated[bool, typer.Option("--stats", help="Figures on stderr, where a terminal has them anyway.")] = False,
) -> None:
    """Answer one prompt, printing the text as it is decided."""
    from specdecpp.decoder import Decoder
    from specdecpp.policy_spec import as_prompt, label_of, spec_of
    from specdecpp.report import render
    from specdecpp.sampling import asked
    from specdecpp.verify import check_lossless, is_lossless, verifications

    names.check(policy)
    text = _prompt_text(prompt)
    options: Options = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "seed": seed,
        "json_schema": json_schema and json_schema.read_text(encoding="utf-8"),
    }
    asked(options, {})  # a mistake is seen before a model is loaded
    kind = verifications()[verification]
    check_lossless(kind, lossless=not lossy)
    pair = names.load()
    if asked(options, pair.sampling).is_greedy and is_lossless(kind):
        kind = verifications()["greedy"]
    decoder = Decoder(pair, policy=policy, verification=kind, lossless=not lossy)
    show = (lambda step: None) if as_json else (lambda step: common.write(step.text))
    output = common.watched(decoder, as_prompt(pair, text, chat=False if raw else None), show, **options)
    if not (as_json or output.text.endswith("\n")):
        common.write("\n")
    if as_json:
        keys = ("num_drafted", "num_accepted", "stop_reason")
        found = {"text": output.text, "tokens": list(output.tokens), "finish_reason": output.finish_reason}
        found |= {
            "metrics": output.metrics.to_dict(),
            "policy": spec_of(decoder.policy),
            "lossless": output.lossless,
            "seed": seed,
        }
        found |= {"steps": [{key: getattr(r, key) for key in keys} for r in output.steps]}
        common.print_json(found | {"sampling": asdict(output.sampling)})
    err = render.console(stderr=True)
    if stats or (err.is_terminal and not as_json):
        err.print(render.stats(output.metrics, policy=label_of(decoder.policy), seed=seed, finish_reason=output.finish_reason))


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
