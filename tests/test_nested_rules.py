"""Rules made of rules: every pair of an outer and an inner one is decoded, or refused with a sentence, at every door."""

from collections.abc import Iterator

import pytest
from served import Served, served
from typer.testing import CliRunner

import specdecpp as sd
from specdecpp import cli, lab
from specdecpp.lab.trees import Widths
from specdecpp.loading.pair import Pair
from specdecpp.policy_spec import KINDS, WRAPPERS
from specdecpp.testing import TableModel, tiny_tokenizer

pytestmark = pytest.mark.lab

INNER = ("none", *KINDS, "tree:costs", "tree:2x2", "auto-off:fixed:2", "bandit:none|fixed:2")
NESTED = [f"{outer}:{inner}" + ("|fixed:1" if outer == "bandit" else "") for outer in WRAPPERS for inner in INNER]
REFUSED = [spec for spec in NESTED if "tree:" in spec]


@pytest.fixture(scope="module")
def pair() -> Pair:
    target, draft = (TableModel.random(vocab_size=8, depth=1, seed=seed) for seed in (1, 2))
    return Pair(target=target, draft=draft, tokenizer=tiny_tokenizer(8))


@pytest.fixture(scope="module")
def server(pair: Pair) -> Iterator[Served]:
    with served(pair) as running:
        yield running


@pytest.mark.parametrize("spec", [*INNER, *NESTED])
def test_a_rule_is_followed_or_refused_when_the_request_is_read(server: Served, spec: str) -> None:
    """Catches 500 and a traceback in the log for rules that may not be nested, which were found out in the engine only."""
    for temperature in (0, 1):
        body = {"prompt": "abc", "max_tokens": 3, "temperature": temperature, "speculative": {"policy": spec}}
        reply = server.post("/v1/completions", body)
        assert reply.status_code in (200, 400), reply.text
        if spec in REFUSED:
            assert reply.status_code == 400
            assert "is made of rules for chains of one draft, and " in reply.json()["error"]["message"]


def test_it_is_refused_on_the_command_line_and_in_python(pair: Pair) -> None:
    """Catches a decoder that is made and fails at its first request."""
    said = CliRunner().invoke(
        cli.app, ["generate", "hello", "--target", "/nowhere", "--draft", "/x", "--policy", "auto-off:tree:2x2"]
    )
    assert (said.exit_code, said.stdout) == (2, "")
    assert said.stderr.startswith("error: AutoOff is made of rules for chains of one draft, and Widths drafts")
    with pytest.raises(ValueError, match="Widths drafts otherwise"):
        sd.Decoder(pair, policy=lab.AutoOff(policy=Widths()))
