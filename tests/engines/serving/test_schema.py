"""The server against its own OpenAPI document: whatever it allows or forbids, no 5xx, and replies as it says."""

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from served import Served, served

from specdecpp import Pair
from specdecpp.backends import NativeModel
from specdecpp.testing import tiny_draft, tiny_model, tiny_tokenizer

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
NUM_EXAMPLES = 100
OPERATIONS = [
    ("/health", "GET"),
    ("/metrics", "GET"),
    ("/v1/models", "GET"),
    ("/v1/models/{name}", "GET"),
    ("/v1/completions", "POST"),
    ("/v1/chat/completions", "POST"),
    ("/completion", "POST"),
    ("/props", "GET"),
]

# Shape checks of the server, in a thread of this process, draw from `random`; hypothesis takes these draws for its own.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """A tiny pair under the backend that shares passes, with a chat template, so that both endpoints answer."""
    model = tiny_model("llama", seed=1, head_dim=16)
    target, draft = (NativeModel(of) for of in (model, tiny_draft(model)))
    pair = Pair(target=target, draft=draft, tokenizer=tiny_tokenizer())
    pair.tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    with served(pair, max_new_tokens=400, name="tiny") as running:
        yield running


@pytest.fixture(scope="module")
def document(server: Served) -> Any:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_nothing_that_is_sent_breaks_the_server(document: Any, path: str, method: str, mode: GenerationMode) -> None:
    """Catches exceptions that become a 5xx, and replies of a status, type or shape that the document does not name."""
    num = 0

    # Not the plugin of schemathesis: it does not know this pytest.
    @given(case=document[path][method].as_strategy(generation_mode=mode))
    @settings(max_examples=NUM_EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
    def sent(case: Any) -> None:
        nonlocal num
        num += 1
        case.call_and_validate(checks=CHECKS, timeout=120)

    try:
        sent()
    except Unsatisfiable:
        assert mode is GenerationMode.NEGATIVE, "what has no parameters cannot be asked wrongly"
    assert num or mode is GenerationMode.NEGATIVE


def test_all_that_is_documented_is_tried(document: Any) -> None:
    """Catches an endpoint that was added without its turn here."""
    documented = {(path, method.upper()) for path, methods in document.raw_schema["paths"].items() for method in methods}
    assert documented == set(OPERATIONS)


def test_the_server_is_well_afterwards(server: Served) -> None:
    """Catches work that was left behind."""
    assert server.get("/health").json() == {"status": "ok", "running": 0, "waiting": 0}
