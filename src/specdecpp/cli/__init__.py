"""The command line: verbs that parse, call and render. Results go to stdout, chatter to stderr.

One file per verb; what they share is in `common`. `--help` must be quick, so heavy modules are imported inside the verbs.

Exit codes: 0 done; 1 the run failed (unreadable model, wrong head, prompt too long); 2 bad usage; 130 interrupted, also where
what was finished is kept and shown (`bench`, `train`). A check may end at any moment: interrupted it is done (0), and ends
with 130 only where nothing was known.
"""

import io
import sys
from typing import Annotated

import typer

from specdecpp import __version__
from specdecpp.cli import bench, chat, check, demo, distil, generate, report, serve, train
from specdecpp.cli.common import epilog, told

VERBS = {  # in the order of the help page
    "generate": (generate.generate, generate.EXAMPLES),
    "chat": (chat.chat, chat.EXAMPLES),
    "serve": (serve.serve, serve.EXAMPLES),
    "check": (check.check, check.EXAMPLES),
    "bench": (bench.bench, bench.EXAMPLES),
    "train": (train.train, train.EXAMPLES),
    "distil": (distil.distil, distil.EXAMPLES),
    "report": (report.report, report.EXAMPLES),
    "demo": (demo.demo, demo.EXAMPLES),
}
EXAMPLES = {"specdecpp": ("specdecpp demo", 'specdecpp generate "Why is the sky blue?" --seed 1')}
EXAMPLES |= {name: examples for name, (_, examples) in VERBS.items()}


app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help: quick, and the same under NO_COLOR
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
    epilog=epilog(EXAMPLES["specdecpp"]),
)
for _name, (_verb, _examples) in VERBS.items():
    app.command(_name, epilog=epilog(_examples))(told()(_verb))


def _show_version(is_asked: bool) -> None:
    if is_asked:
        print(f"specdecpp {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Adaptive speculative decoding that keeps the target model's distribution."""


def main() -> None:
    """The console script. Characters that a terminal cannot show become question marks instead of errors."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    app(prog_name="specdecpp")
