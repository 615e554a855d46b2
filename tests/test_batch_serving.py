"""Many requests in the passes of a server: prompts beside steps, and what fails, which fails alone."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from batched import PROMPTS, compiled_pair, session
from served import Listener

from specdecpp import Decoder, Pair
from specdecpp.backends import EagerModel, NativeModel, native
from specdecpp.policies import Fixed
from specdecpp.scheduler import decode
from specdecpp.serving import engine
from specdecpp.serving.engine import FEW, EngineThread, Job, Pace, Part
from specdecpp.serving.evidence import StepEvidence
from specdecpp.serving.schema import CompletionRequest
from specdecpp.serving.settings import ServerSettings
from specdecpp.serving.validation import RequestValidator
from specdecpp.session import Session
from specdecpp.testing import tiny_model

pytestmark = pytest.mark.skipif(native.compiler() is None, reason="there is no C++ compiler")


@pytest.fixture(scope="module")
def pair() -> Pair:
    return compiled_pair()


@pytest.fixture(scope="module")
def decoder(pair: Pair) -> Decoder:
    return Decoder(pair, policy=Fixed(k=2))


@pytest.fixture(scope="module")
def alone(decoder: Decoder) -> list[list[int]]:
    """The answers to the prompts, one after the other."""
    return [list(decoder.generate(prompt, max_tokens=20, seed=i).tokens) for i, prompt in enumerate(PROMPTS)]


def served(decoder: Decoder, *, recorder: Any = lambda session: None) -> list[Listener]:
    """Five requests to a server at once."""
    thread, listeners = EngineThread(ServerSettings(max_running=4)), [Listener() for _ in PROMPTS]
    thread.start()
    for i, (prompt, listener) in enumerate(zip(PROMPTS, listeners, strict=True)):
        part = Part(prompt=prompt, options={"max_tokens": 20, "seed": i})
        thread.submit(Job(decoder=decoder, parts=[part], listener=listener, timeout_s=60.0, recorder=recorder))
    thread.stop()
    return listeners


def failed(found: list[Listener], alone: list[list[int]]) -> list[int]:
    """Requests that ended with an error; all others have their answers."""
    numbers = [i for i, listener in enumerate(found) if listener.end.error is not None]
    assert all(listener.tokens == alone[i] for i, listener in enumerate(found) if i not in numbers)
    return numbers


@pytest.mark.parametrize(("backend", "seeds"), [("native", [None, None]), ("eager", [0, 1])])
def test_greedy_requests_follow_the_load_where_their_answers_do_not(pair: Pair, backend: str, seeds: list[int | None]) -> None:
    """Catches greedy requests of a server that draft as if each were alone, and answers rounded as the clock has it."""
    if backend == "eager":
        model, draft = (tiny_model("llama", seed=seed, vocab_size=pair.target.vocab_size) for seed in (1, 2))
        pair = replace(pair, target=EagerModel(model), draft=EagerModel(draft))
    validator = RequestValidator(pair, ServerSettings(policy=Fixed(k=2)))
    for asked, expected in (
        ({"temperature": 0}, seeds),
        ({"temperature": 1}, [None, None]),
        ({"temperature": 0, "seed": 7}, [7, 8]),
    ):
        plan = validator.plan(CompletionRequest(prompt=["abc", "de"], max_tokens=4, **asked))
        assert [part.options.get("seed") for part in plan.parts] == expected


def test_the_server_decodes_together(decoder: Decoder, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a server that still takes turns, and answers that depend on who else is there."""
    widths, verify = [], NativeModel.verify
    monkeypatch.setattr(NativeModel, "verify", lambda *args: widths.append(len(args[2])) or verify(*args))
    assert [listener.tokens for listener in served(decoder)] == alone
    assert max(widths) == 4


def broken(monkeypatch: pytest.MonkeyPatch, name: str, when: Callable[[Any], bool]) -> None:
    """Have a method of compiled models fail, after it has been run, where its first argument is so."""
    method = getattr(NativeModel, name)

    def fails(self: NativeModel, given: Any, *more: Any) -> Any:
        result = method(self, given, *more)
        if when(given):
            raise MemoryError("no room")
        return result

    monkeypatch.setattr(NativeModel, name, fails)


def are_several_or_long(caches: Any) -> bool:
    return len(caches) > 1 or caches[0].length > 30  # the third prompt's


@pytest.mark.parametrize(
    ("name", "when", "number"),
    [("propose", are_several_or_long, 2), ("verify", are_several_or_long, 2), ("check_ids", lambda tokens: 9 in tokens, 1)],
)
def test_what_fails_together_is_run_again_alone(
    name: str, when: Any, number: int, pair: Pair, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches one request, or a prompt that cannot be read, that takes all others with it, and uniforms that the failed step
    has used up: the answers of the others were not those of their seeds."""
    broken(monkeypatch, name, when)
    assert failed(served(Decoder(pair, policy=Fixed(k=2), reuses=False)), alone) == [number]


def test_a_batch_of_two_groups_of_which_one_fails(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches requests over other weights whose uniforms are used up by steps that nobody saw."""
    decoders = [Decoder(of, policy=Fixed(k=2)) for of in (pair, compiled_pair(seed=5))]
    given, alone = ([session(decoders[n], i, temperature=1.0) for n, i in ((0, 0), (1, 1), (1, 4))] for _ in range(2))
    for one in alone:
        one.step()
    broken(monkeypatch, "verify", lambda caches: len(caches) > 1)
    with pytest.raises(MemoryError):
        decode(given)
    for one, other in zip(given, alone, strict=True):
        one.rewind()
        one.step()
        assert one.tokens == other.tokens
        one.rewind()  # of a step that is over there is nothing to be drawn again
        assert one.step().tokens == other.step().tokens


def test_what_somebody_makes_of_a_step_ends_one_request(decoder: Decoder, alone: list[list[int]]) -> None:
    """Catches a recorder that fails, and takes from the others a step that they have committed: it was never told."""

    def recorder(session: Session) -> Any:
        if session.tokens != PROMPTS[1]:
            return None

        def fails(plan: Any, result: Any) -> None:
            if len(session.tokens) > session.num_prompt_tokens + 5:
                raise ZeroDivisionError("a recorder fails")

        fails.evidence = lambda outcome, at_s: StepEvidence()  # pyright: ignore[reportFunctionMemberAccess]
        return fails

    found = served(decoder, recorder=recorder)
    assert failed(found, alone) == [1]
    assert found[1].tokens == alone[1][: len(found[1].tokens)] != []


def test_a_long_prompt_is_read_beside_the_steps_of_others(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a server that reads more of a prompt in a turn than it may, or that lets the others wait meanwhile."""
    decoder, verify = Decoder(pair, policy=Fixed(k=2), reuses=False), NativeModel.verify
    passes: list[tuple[int, int]] = []

    def noted(self: NativeModel, caches: Any, tasks: Any) -> None:
        read = [task.num_tokens for task in tasks if task.num < 0]
        passes.append((sum(read), len(tasks) - len(read)))
        verify(self, caches, tasks)

    monkeypatch.setattr(NativeModel, "verify", noted)
    monkeypatch.setattr(engine, "FEW", 5)
    monkeypatch.setattr(engine, "ROWS", 5)
    served(decoder)
    assert max(num for num, _ in passes) <= 5
    assert sum(num for num, _ in passes) == sum(len(prompt) - 1 for prompt in PROMPTS)
    assert any(num and others for num, others in passes)


def test_pieces_are_cut_to_the_time_that_others_may_wait() -> None:
    """Catches a piece that grows without a bound, one that shrinks to nothing, and pieces that nobody waits for."""
    pace = Pace()
    assert (pace.rows(is_alone=True), pace.rows(is_alone=False)) == (256, FEW)
    pace.learn(0, 9.9)
    assert pace.rows(is_alone=False) == FEW
    pace.learn(50, 0.1)
    assert pace.rows(is_alone=False) == 50
    for _ in range(40):
        pace.learn(10, 10.0)
    assert (pace.rows(is_alone=True), pace.rows(is_alone=False)) == (256, FEW)
    for _ in range(40):
        pace.learn(100, 1e-6)
    assert pace.rows(is_alone=False) == 256
