"""Shared parts of the verbs: options, errors as one line, loading the pair, results on stdout."""

import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Unpack

import typer

from specdecpp import cache_dir
from specdecpp.errors import SpecdecError, UnsoundError, first_line
from specdecpp.loading import PAIRS

if TYPE_CHECKING:
    from specdecpp.decoder import Decoder, Options, Output, Prompt
    from specdecpp.loading.pair import Pair
    from specdecpp.session import Step

Examples = tuple[str, str]
BATCHED = ("lean", "eager")
"""The backends that can read whole batches, which offline work needs."""
DType = Literal["auto", "float64", "float32", "bfloat16", "float16"]
POLICY_HELP = (
    "When to stop drafting: fixed:K, none, heuristic, ema, argmax, max-confidence:T, cumulative:T, entropy:T, "
    "draft-verify:T, adaptive-entropy:T, disco:T, ucb-specstop, cascade, frontier, ema-skip, online-logistic, specdecpp:T, "
    "cost-aware, auto-off:POLICY, tree:SHAPE or bandit:POLICY|POLICY; key=value,... also stands after the "
    "colon. Without it: cost-aware, by q unless a head is named with --head."
)


def kind_of(name: str) -> str:
    """The name of a verification. Raises `typer.BadParameter` for another."""
    from specdecpp.policy_spec import VERIFICATION_NAMES

    if name not in VERIFICATION_NAMES:
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(map(repr, VERIFICATION_NAMES))}.")
    return name


Target = Annotated[str | None, typer.Option(metavar="NAME", help="Target model: a folder, a file or a hub name.")]
Draft = Annotated[str | None, typer.Option(metavar="NAME", help="Draft model. Neither: smollm2, else reference.")]
DraftOrCopies = Annotated[str | None, typer.Option("--draft", metavar="NAME", help="Draft model; none: copies of the text.")]
Head = Annotated[str | None, typer.Option(metavar="NAME", help="Acceptance head: a folder or a hub name.")]
DTypeOption = Annotated[DType, typer.Option(metavar="TYPE", help="auto, float64, float32, bfloat16 or float16.")]
Device = Annotated[str | None, typer.Option(metavar="NAME", help="Device, such as cpu or cuda.")]
BackendOption = Annotated[
    str | None,
    typer.Option(
        "--backend",
        metavar="NAME",
        help="native-int8, native, llama.cpp, graphs, lean or eager.  [default: the fastest here]",
    ),
]
PolicyOption = Annotated[str | None, typer.Option("--policy", metavar="SPEC", help=POLICY_HELP)]
PolicySpecs = Annotated[list[str] | None, typer.Option("--policy", metavar="SPEC", help="These instead of all; repeatable.")]
Verification = Annotated[
    str, typer.Option(metavar="KIND", parser=kind_of, help="Test draft tokens by token, block or compare.")
]
Lossy = Annotated[
    bool,
    typer.Option("--lossy", help="Permit other distributions than the target's: fuzzy, chow, opt, token-cascade, typical, tv."),
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", metavar="N", help="The most tokens of an answer.")]
TopP = Annotated[float, typer.Option("--top-p", metavar="X", help="Keep the most probable tokens of this mass.")]
MODELS_OWN = "[default: the model's own, or 1]"
Temperature = Annotated[float | None, typer.Option(metavar="X", help=f"0 is greedy.  {MODELS_OWN}")]
TopPOfModel = Annotated[
    float | None, typer.Option("--top-p", metavar="X", help=f"Keep the most probable tokens of this mass.  {MODELS_OWN}")
]
Prompts = Annotated[
    list[str] | None, typer.Option("--prompts", metavar="FILE", help="As in recipes; repeatable.  [default: a few]")
]
PromptKind = Annotated[
    list[str] | None,
    typer.Option("--prompt", metavar="KIND", help="How a row becomes a prompt: gsm8k, alpaca, humaneval, text, field:NAME."),
]
Quick = Annotated[bool, typer.Option("--quick", help="Less of everything, for a first look.")]
Out = Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the results, for report.")]
Seed = Annotated[int, typer.Option(metavar="N", min=0, help="Same seed, same answers.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress.")]
Json = Annotated[bool, typer.Option("--json", help="One line of JSON on stdout, and nothing else.")]


def epilog(examples: Examples) -> str:
    r"""The two examples under a help page; \b keeps click from filling the lines."""
    return "\n  ".join(["\b\nExamples:", *examples])


@dataclass(frozen=True, kw_only=True)
class PairNames:
    """A pair as it is named on the command line, and how it is to be run."""

    target: str | None
    draft: str | None
    head: str | None
    dtype: DType
    device: str | None
    backend: str | tuple[str, ...] | None = None
    copies: bool = False

    def check(self, *policies: str | None) -> None:
        """Refuse, before models are loaded, names that cannot make a pair, and policies that lack their head."""
        from specdecpp.policy_spec import parse_policy

        name = self.target or ""
        if name not in PAIRS and not Path(name).exists() and (close := get_close_matches(name, PAIRS, cutoff=0.8)):
            raise ValueError(f"there is no pair {name}. Did you mean {close[0]}? A folder must exist; a hub name is org/name.")
        is_named = self.target is not None and self.target not in PAIRS
        if is_named and self.draft is None and self.head is not None:
            raise ValueError("a head needs --draft: it judges what a draft model proposes. Name the one it was trained for.")
        is_alone = self.draft is None and self.head is None and self.copies
        if (self.target is None) != (self.draft is None) and self.target not in PAIRS and not is_alone:
            raise ValueError(
                "--target and --draft go together. Name both, or neither, or a whole pair: --target "
                f"{' or --target '.join(PAIRS)}."
            )
        for spec in map(parse_policy, filter(None, policies)):
            if is_named and self.head is None:
                spec.build(None)

    @property
    def usual(self) -> str | None:
        """The target, or where no part of a pair is named a pair's name: `smollm2` where it can be had, else `reference`.

        A head alone is one for the reference pair.
        """
        if self.target is not None or self.draft is not None:
            return self.target
        from specdecpp.loading import shipped

        return "reference" if self.head else shipped.usual()

    def load(self, *, every_s: float | None = None, quiet: bool = False) -> "Pair":
        """The pair, with the messages of transformers off, and on a terminal a line that says what is being done; without one
        a line every `every_s` seconds."""
        from specdecpp.report import render

        with render.live("loading the pair", every_s=every_s, quiet=quiet) as tell, _heard(tell):
            tell("importing")  # torch and transformers, which takes seconds
            from specdecpp.loading import shipped
            from specdecpp.loading.pair import load_pair

            check_device(self.device)
            silence(self.target, self.draft)
            options: Any = {"dtype": self.dtype, "device": self.device, "backend": self.backend}
            pair = load_pair(self.usual, draft=self.draft, head=self.head, **options)
        if not quiet and self.target is None and self.head is None and self.usual == "reference":
            print(f"note: this is the pair reference, which writes nonsense; SmolLM2 does not. {shipped.HOW}", file=sys.stderr)
        if (trouble := cache_dir.trouble()) and not quiet:
            print(f"warning: the next start will be as slow as this one, nothing can be kept: {trouble}", file=sys.stderr)
        return pair


def with_pair(*, copies: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a verb the options that name a pair, as `names`. `copies`: a target may stand alone; drafts are then copied."""
    options = {"target": Target, "draft": DraftOrCopies if copies else Draft, "head": Head}
    options |= {"dtype": DTypeOption, "device": Device, "backend": BackendOption}
    parameters = [
        Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, annotation=option, default="auto" if name == "dtype" else None)
        for name, option in options.items()
    ]

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        @wraps(verb)
        def run(**given: Any) -> None:
            verb(PairNames(**{name: given.pop(name) for name in options}, copies=copies), **given)

        _, *own = signature(verb, eval_str=True).parameters.values()
        shown = [*parameters[:3], *own, *parameters[3:]]
        run.__signature__ = Signature(shown)  # pyright: ignore[reportAttributeAccessIssue] (typer reads it)
        return run

    return decorate


def check_device(device: str | None) -> None:
    """Refuse, before models are loaded, a device that torch does not know or cannot use here."""
    import torch

    try:
        torch.empty(0, device=device).cpu()  # of "meta" too, which holds no numbers
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"--device {device} cannot be used here: {first_line(error)}. Leave it out, or name another, such as cpu."
        ) from error


def silence(*names: str | None) -> None:
    """Only errors of transformers are shown; its progress bars stay for models that must be downloaded."""
    from transformers.utils import logging as of_transformers

    of_transformers.set_verbosity_error()
    if all(name is None or name in PAIRS or Path(name).exists() for name in names):
        of_transformers.disable_progress_bar()


@contextmanager
def _heard(tell: Callable[[str], None]) -> Iterator[None]:
    """Pass what `load_pair` logs to this function, and print its warnings."""

    def emit(record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            print(f"warning: {record.getMessage()}", file=sys.stderr)
        else:
            tell(record.getMessage())

    log, handler = logging.getLogger("specdecpp.loading"), logging.Handler()
    handler.emit = emit
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def clock(seconds: float) -> str:
    """5 s, 3 min 20 s, 2 h 5 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"


def write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def print_json(value: dict[str, Any]) -> None:
    write(json.dumps(value, ensure_ascii=False) + "\n")


@contextmanager
def interruptible() -> Iterator[None]:
    """Have SIGINT raise `KeyboardInterrupt` meanwhile, also where a shell that starts us in the background has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def told() -> Iterator[None]:
    """Expected errors become one line on stderr and an exit code; a closed pipe is no error."""
    try:
        yield
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still buffered goes nowhere
        raise typer.Exit(0) from None
    except (SpecdecError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        is_usage = isinstance(error, UnsoundError) or not isinstance(error, SpecdecError)
        raise typer.Exit(2 if is_usage else 1) from None
    except RecursionError:
        print(
            "error: a file is nested too deeply to be read. Give one that this program or a person has written.",
            file=sys.stderr,
        )
        raise typer.Exit(1) from None
    except OSError as error:  # of a disk or a folder, where no code above has a message of its own
        where = f" ({error.filename})" if error.filename else ""
        print(f"error: {error.strerror or error}{where}. Nothing that was finished is lost.", file=sys.stderr)
        raise typer.Exit(1) from None


def watched(decoder: "Decoder", prompt: "Prompt", on_step: "Callable[[Step], None]", **options: "Unpack[Options]") -> "Output":
    """`Decoder.generate`, showing every step as soon as it is decided."""
    from specdecpp.decoder import finished, run

    session = decoder.start(prompt, **options)
    steps = []
    for outcome in run(session):
        steps.append(outcome)
        on_step(outcome)
    return finished(session, steps)
