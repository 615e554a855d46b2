"""The command line, called in this process."""

from typer.testing import CliRunner, Result

from specdecpp import cli


def call(*arguments: object, stdin: str | None = None) -> Result:
    """A call with 80 columns."""
    return CliRunner(env={"COLUMNS": "80"}).invoke(cli.app, [*map(str, arguments)], input=stdin, prog_name="specdecpp")


def refused(*arguments: object, code: int, stdin: str | None = None) -> str:
    """Standard error of a call that must fail, with nothing on stdout and without a traceback."""
    result = call(*arguments, stdin=stdin)
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    assert "Traceback" not in result.stderr
    return result.stderr
