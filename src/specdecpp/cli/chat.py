"""`specdecpp chat`: a conversation in the terminal. Lines come from standard input, answers go to stdout, figures to stderr."""

import re
import signal
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from specdecpp.cli.common import MaxTokens, PairNames, PolicyOption, Temperature, TopPOfModel, with_pair, write

if TYPE_CHECKING:
    from specdecpp.decoder import Decoder, Options

EXAMPLES = (
    "specdecpp chat",
    'specdecpp chat --system "Be short." --temperature 0.7 --top-p 0.9',
)
HELP = "An empty line is skipped; /new begins anew, /exit or Ctrl-D ends, Ctrl-C stops an answer."

Messages = list[dict[str, str]]


@with_pair(copies=True)
def chat(
    names: PairNames,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="The system message.")] = None,
    policy: PolicyOption = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = None,
    top_p: TopPOfModel = None,
) -> None:
    """Talk to a pair in the terminal.

    It remembers, and shows its speed.
    """
    from specdecpp.decoder import Decoder
    from specdecpp.errors import PairError
    from specdecpp.sampling import asked

    names.check(policy)
    options: Options = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p}
    asked(options, {})  # a mistake is seen before a model is loaded
    pair = names.load()
    if not getattr(pair.tokenizer, "chat_template", None):
        raise PairError(
            "the target's tokenizer has no chat template, so there is no telling who said what. Name a chat model "
            "(--target smollm2), or give plain text to specdecpp generate."
        )
    talk(Decoder(pair, policy=policy), system, options)


def talk(decoder: "Decoder", system: str | None, options: "Options") -> None:
    """Read a line, answer it, until the input ends. An interrupted answer stays in the conversation as it is."""
    from specdecpp.errors import PromptError

    start: Messages = [] if system is None else [{"role": "system", "content": system}]
    messages, is_terminal = list(start), sys.stdin.isatty()
    if is_terminal:
        import readline  # noqa: F401 (a line can be edited, and called back)

        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts us in the background ignores it
        print(HELP, file=sys.stderr)
    while True:
        try:
            line = input("> " if is_terminal else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            write("\n")
            continue
        if line == "/exit":
            return
        if line == "/new":
            messages = list(start)
        elif re.fullmatch(r"/\w*", line):
            print(HELP, file=sys.stderr)
        elif line:
            asked = [*messages, {"role": "user", "content": line}]
            try:
                asked = recalled(decoder, asked, len(start), options.get("max_tokens", 0))
                messages = [*asked, {"role": "assistant", "content": answered(decoder, asked, options)}]
            except PromptError as error:  # the conversation goes on without that line
                print(f"error: {error}", file=sys.stderr)


def recalled(decoder: "Decoder", messages: Messages, num_first: int, max_tokens: int) -> Messages:
    """The messages that fit in the target's context with room for an answer: the oldest turns go, the first messages never."""
    from specdecpp.decoder import encode

    most = decoder.pair.target.max_length
    while most is not None and len(messages) > num_first + 2:
        if len(encode(decoder.pair, messages)) <= most - min(max_tokens, most // 2):
            break
        messages = [*messages[:num_first], *messages[num_first + 2 :]]
        print("(the oldest question and its answer are forgotten: the model reads no more at once)", file=sys.stderr)
    return messages


def answered(decoder: "Decoder", messages: Messages, options: "Options") -> str:
    """The model's answer, printed as it is decided; what there is of it where it was interrupted."""
    from specdecpp.decoder import metrics_of

    session = decoder.start(messages, **options)
    steps, said, ending = [], "", ""
    try:
        session.prefill()
        while session.finish_reason is None:
            steps.append(session.step())
            said += steps[-1].text
            write(steps[-1].text)
    except KeyboardInterrupt:
        ending = ", stopped"
        session.release()
    if session.finish_reason == "length":
        ending = ", as many as asked for"
    write("" if said.endswith("\n") else "\n")
    if steps and (ending or sys.stderr.isatty()):
        metrics = metrics_of(session, steps)
        figures = f"{metrics.num_tokens} tokens, {metrics.tokens_per_second:.0f} a second"
        print(f"[{figures}, {metrics.mean_acceptance_length:.2f} a pass{ending}]", file=sys.stderr)
    return said
