"""`specdecpp serve`: a pair behind OpenAI's API. The address goes to stdout, logs to stderr as lines of JSON."""

from typing import Annotated

import typer

from specdecpp.cli.common import PairNames, PolicyOption, Verification, with_pair, write

EXAMPLES = (
    "specdecpp serve --port 8000",
    "specdecpp serve --target TARGET --draft DRAFT --host 0.0.0.0 --api-key KEY",
)


@with_pair(copies=True)
def serve(
    names: PairNames,
    policy: PolicyOption = None,
    verification: Verification = "token",
    host: Annotated[str, typer.Option(metavar="HOST", help="Where to listen; 0.0.0.0: everywhere.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", min=0, max=65535, help="0: one that is free.")] = 8000,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="The model's name.  [default: the target's]")] = None,
    api_key: Annotated[
        str | None, typer.Option(metavar="KEY", envvar="SPECDECPP_API_KEY", help="Ask clients for this key.")
    ] = None,
    allowed_hosts: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Answer to this name too; repeatable; * for any.  [default: localhost, addresses and --host; with a key any]",
        ),
    ] = None,
    max_running: Annotated[int, typer.Option(metavar="N", min=1, help="Requests that are answered at once.")] = 8,
    max_waiting: Annotated[int, typer.Option(metavar="N", min=0, help="Requests that wait; more get 429.")] = 64,
    max_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="New tokens a request may have in all.")] = 8192,
    max_body: Annotated[int, typer.Option(metavar="N", min=1, help="Longest body of a request, bytes.")] = 2**20,
    timeout: Annotated[float, typer.Option(metavar="S", help="A request may take so many seconds.")] = 300.0,
    grace: Annotated[float, typer.Option(metavar="S", help="Seconds to finish after a signal to stop.")] = 30.0,
) -> None:
    """Serve a pair to OpenAI's clients, until Ctrl-C."""
    from specdecpp.serving import ServerSettings, check_extra

    check_extra()
    from specdecpp.serving import server
    from specdecpp.serving.validation import check_verification

    names.check(policy)
    settings = ServerSettings(
        policy=policy,
        verification=verification,
        name=name,
        api_key=api_key,
        allowed_hosts=(host, *(allowed_hosts or ())) if allowed_hosts or api_key is None else (),
        max_running=max_running,
        max_waiting=max_waiting,
        max_new_tokens=max_tokens,
        max_body_bytes=max_body,
        timeout_s=timeout,
        grace_s=grace,
    )
    check_verification(verification)
    listening = server.bound(host, port)
    pair = names.load(every_s=10)
    server.serve(pair, settings, listening=listening, on_ready=lambda: write(server.address(listening) + "\n"))
