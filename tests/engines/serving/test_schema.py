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


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_nothing_that_is_sent_breaks_the_server(server: Served, mode: GenerationMode) -> None:
    """Catches exceptions that become a 5xx, replies that the document does not name, and work that is left behind."""
    document: Any = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [(path, method) for path, methods in document.raw_schema["paths"].items() for method in methods]
    assert len(operations) == 8
    for path, method in operations:
        cases = document[path][method.upper()].as_strategy(generation_mode=mode)

        # Not the plugin of schemathesis: it does not know this pytest.
        @given(case=cases)
        @settings(max_examples=NUM_EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
        def sent(case: Any) -> None:
            case.call_and_validate(checks=CHECKS, timeout=120)

        try:
            sent()
        except Unsatisfiable:
            assert mode is GenerationMode.NEGATIVE, "what has no parameters cannot be asked wrongly"
    assert server.get("/health").json() == {"status": "ok", "running": 0, "waiting": 0}
