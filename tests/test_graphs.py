"""The backend of CUDA graphs, by the same code without recording: padding, rehearsals, caches that grow."""

import gc
import importlib.util
import json
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from distributions import unchecked
from hypothesis import given, settings
from kinds import LONG, TEXT, built, model_of
from test_eager import STEPS, check_steps
from torch import Tensor

import specdecpp as sd
from specdecpp import Pair
from specdecpp.backends import GraphModel, LeanModel
from specdecpp.backends.graphs import cache as static_cache
from specdecpp.backends.graphs.cache import WIDTHS, Cuda, _rehearse, bucket, span_of
from specdecpp.backends.graphs.layers import _kernels
from specdecpp.backends.lean import FusedNorm, Norm
from specdecpp.bench import check
from specdecpp.distillation import finishing
from specdecpp.errors import BackendError
from specdecpp.policies import CumulativeConfidence, Fixed
from specdecpp.testing import tiny_draft, tiny_model, tiny_tokenizer


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_any_sequence_of_extend_and_rollback_equals_one_fresh_pass(kind: str) -> None:
    """Catches a padded or forgotten row that is seen, and a rehearsal that overwrites the text. (Beside lean: float64.)"""
    model = model_of(kind, torch.float64)
    graphs, lean = GraphModel(model), LeanModel(model)

    @settings(max_examples=30)
    @given(STEPS)
    def run(steps: list[tuple[int, list[int]]]) -> None:
        check_steps(lambda tokens: lean.new_cache().extend(tokens, rows=len(tokens)), graphs.new_cache(), steps)

    run()


def test_a_context_that_takes_little_memory_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a cache that grows where there is room for the whole context, and graphs of where it was before it grew."""
    held = 2 * 2 * 2 * 2048 * 16 * 4  # keys and values of two layers, two heads of 16 numbers in float32
    for free, capacities, is_kept in ((32 * held, {2048}, True), (32 * held - 1, {256, 512}, False)):
        monkeypatch.setattr("specdecpp.backends.graphs.model.free_bytes", lambda device, free=free: free)
        backend = GraphModel(built("llama", max_position_embeddings=1024)).new_cache()
        backend.extend(LONG[:3], rows=1)
        before, found = dict(backend.static._programs), {backend.static.capacity}
        backend.extend(LONG[3:300], rows=1)
        backend.extend(LONG[300:303], rows=1)
        assert found | {backend.static.capacity} == capacities
        now = backend.static._programs
        assert before.items() <= now.items() if is_kept else not set(before.values()) & set(now.values())


def test_a_cache_is_used_again_and_says_the_same() -> None:
    """Catches requests that record everything anew, a cache given to two, and bits that depend on who used it before."""
    backend = GraphModel(built("llama", max_position_embeddings=1024))

    def ask(text: list[int]) -> tuple[Tensor, int]:
        request = backend.new_cache()
        request.extend(text[:-3], rows=1)
        return request.extend(text[-3:], rows=3)[0], id(request.static)

    first, cache = ask(TEXT)
    gc.collect()
    _, grown = ask(LONG[:400])
    gc.collect()
    again, same = ask(TEXT)
    assert torch.equal(first, again)
    assert cache == grown == same
    held = backend.new_cache()
    held.extend(TEXT, rows=1)
    assert id(held.static) == cache
    assert ask(TEXT)[1] != cache


def test_the_program_used_longest_ago_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a store that grows with every new kind of request."""
    monkeypatch.setattr("specdecpp.backends.graphs.cache._MOST_PROGRAMS", 2)
    backend = GraphModel(built("llama")).new_cache()
    for n in (1, 2, 1, 3):
        backend.extend(TEXT[:n], rows=1)
    assert list(backend.static._programs) == [("pass", 1, 256), ("pass", 3, 256)]


def test_widths_and_spans() -> None:
    """Catches a width without room behind the text: padding and rehearsals write there."""
    assert [bucket(n) for n in (1, 2, 3, 4, 5, 6, 9, 10, 17, 33)] == [1, 2, 3, 5, 5, 9, 9, 17, 17, 33]
    for length in (0, 1, 222, 223, 224, 479, 480, 5000):
        assert span_of(length) - WIDTHS[-1] >= length
        assert span_of(length) == 256 or span_of(length) // 2 - WIDTHS[-1] < length


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_a_gpu_is_the_norm(dtype: torch.dtype) -> None:
    """Catches an epsilon or a weight in another place than the six operations of a CPU have it."""
    norm = built("llama").to(dtype).model.norm
    norm.weight.data.uniform_(0.5, 2.0, generator=torch.Generator().manual_seed(0))
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).to(dtype) * 0.01
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    fused, plain = (kind(norm.weight, eps=norm.variance_epsilon)(x) for kind in (FusedNorm, Norm))
    torch.testing.assert_close(fused, plain, atol=tolerance, rtol=tolerance)


def test_without_triton_it_goes_on_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a machine without a compiler on which nothing runs any more."""
    monkeypatch.setitem(sys.modules, "specdecpp.backends.graphs.kernels.layers", None)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    _kernels.cache_clear()
    with pytest.warns(UserWarning, match=r"Triton does not work here \(ModuleNotFoundError: .*slower without it"):
        backend = GraphModel(tiny_model("llama", seed=1)).new_cache()
    _kernels.cache_clear()
    assert type(backend.static.body) is LeanModel


class StandIn(Cuda):
    """CUDA graphs on a CPU: their memory dies with its last graph, and recording there again fails, as in torch."""

    def __init__(self) -> None:
        self.graphs = 0
        self.pools: dict[object, int] = {}

    def settle(self) -> None: ...

    def recorded(self, work: Callable[[], None], reset: Callable[[], object], pool: object) -> Any:
        _rehearse(work, reset)
        pool = object() if pool is None else pool
        if self.pools.get(pool) == 0:
            raise BackendError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        graph = Replayed(work)
        self.pools[pool] = self.pools.get(pool, 0) + 1
        self.graphs += 1
        weakref.finalize(graph, self.freed, pool)
        return graph.replay, pool

    def freed(self, pool: object) -> None:
        self.pools[pool] -= 1


@dataclass(eq=False)
class Replayed:
    """A graph of the stand-in."""

    work: Callable[[], None]

    def replay(self) -> None:
        self.work()


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    graphs = StandIn()
    monkeypatch.setattr(static_cache, "graphs_of", lambda device: graphs)
    return graphs


def growing_pairs(device: str) -> tuple[Pair, Pair]:
    """One whose passes are recorded, and the same by `LeanModel`, in float64."""
    target = tiny_model("llama", seed=1, max_position_embeddings=4096)
    models = [model.to(device, torch.float64) for model in (target, tiny_draft(target, noise=0.4))]
    backends = [[kind(model) for model in models] for kind in (GraphModel, LeanModel)]
    recorded, plain = (Pair(target=p, draft=q, tokenizer=tiny_tokenizer()) for p, q in backends)
    return recorded, plain


def growing(device: str) -> None:
    """Texts in turns, answers that outgrow a cache, many requests at once and dropped ones: all say what the target says."""
    pair, plain = growing_pairs(device)
    options: Any = {"max_tokens": 30, "temperature": 0.0, "ignore_eos": True}
    text = [3 + token % 60 for token in (LONG * 3)[:1500]]
    expected = {n: sd.Decoder(plain, policy=Fixed(k=0)).generate(text[:n], **options).tokens for n in (20, 200, 400, 1500)}
    decoder, dropping = (sd.Decoder(pair, policy=CumulativeConfidence(), reuses=reuses) for reuses in (True, False))
    for n in (20, 400, 1500, 20, 200):
        assert decoder.generate(text[:n], **options).tokens == expected[n], n
    for lengths in ((200, 20, 400, 200), (1500, 20, 400)):
        sessions = [dropping.start(text[:n], **options) for n in lengths]
        for session in sessions:
            session.prefill()
        for _ in range(3):
            for session in sessions:
                session.step()
        del session, sessions
        gc.collect()
    for n in (20, 400):
        assert dropping.generate(text[:n], **options).tokens == expected[n], n


def test_the_memory_of_dead_graphs_is_never_recorded_in(stand_in: StandIn) -> None:
    """Catches a pool that is kept when the cache has grown and its graphs are gone: on a GPU all requests then failed."""
    with unchecked():
        growing("cpu")
    assert stand_in.graphs > 20
    assert any(living == 0 for living in stand_in.pools.values())


def test_passes_are_recorded_when_a_pair_is_loaded(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a request that waits for the recording of a pass: of every width, and over a growing text."""
    monkeypatch.setattr("specdecpp.backends.graphs.model.free_bytes", lambda device: 2**40)
    pair, _ = growing_pairs("cpu")

    def passes() -> list[set[Any]]:
        stores = [backend.idle for backend in (pair.target, pair.draft)]  # pyright: ignore[reportAttributeAccessIssue]
        return [{key for key in store[0]._programs if key[0] == "pass"} for store in stores]  # pyright: ignore[reportIndexIssue]

    with unchecked():
        decoder = sd.Decoder(pair, policy=Fixed(k=4))
        before = passes()
        for prompt in ([3, 5, 9], [3 + token % 60 for token in LONG[:500]]):
            decoder.generate(prompt, max_tokens=40, temperature=0.0, ignore_eos=True)
            gc.collect()
    assert [len(keys) for keys in before] == [3 * 7, 3 * 2 + 2]  # two more of the draft: those of the probe
    assert passes() == before


def test_nor_where_the_last_graph_made_room(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches the same where the only program of a store makes room, and graphs of one cache that do not share memory."""
    backend = GraphModel(built("llama")).new_cache()
    for n in (1, 2, 3):
        backend.extend(TEXT[:n], rows=1)
    assert len(stand_in.pools) == 1
    assert stand_in.graphs > 1
    monkeypatch.setattr(static_cache, "_MOST_PROGRAMS", 1)
    for n in (4, 1, 2):
        backend.extend(TEXT[:n], rows=1)


def benchmark(name: str = "gpu") -> Any:
    path = Path(__file__).parent.parent / "benchmarks" / f"{name}.py"
    if not path.is_file():
        pytest.skip("the benchmarks are not shipped with the tests")
    spec = importlib.util.spec_from_file_location(f"{name}_benchmark", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.elsewhere
def test_every_stage_of_the_gpu_benchmark_runs(tmp_path: Path) -> None:
    """Catches a stage that would fail on the one day that a GPU is there, and a draft that does not agree as it should."""
    with unchecked():
        benchmark().main(["--device", "cpu", "--tiny", "--pairs", "1b", "--budget", "1e9", "--out", str(tmp_path / "gpu.json")])
    result = json.loads((tmp_path / "gpu.json").read_text())
    stages = {stage: [row for row in result["rows"] if row["stage"] == stage] for stage in ("steps", "waits", "speed", "pair")}
    assert result["is_complete"]
    assert [len(stages[name]) for name in ("steps", "waits", "speed")] == [7, 4, 39]
    assert not any("left_out" in row for row in result["rows"])
    assert abs(stages["pair"][0]["acceptance"] - 0.75) < 0.05


@pytest.mark.parametrize("lines", ["that", pytest.param("", marks=pytest.mark.slow)])
def test_the_smoke_test_of_a_gpu_runs(lines: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a line that would fail on the one day that a GPU is there, and a result that does not say what was tried."""
    smoke, out = benchmark("gpu_smoke"), tmp_path / "smoke.json"
    monkeypatch.setitem(smoke.LINES, "one that fails", lambda place: 1 / 0)
    for owner, name, value in ((finishing, "CHECKED", 2), (check, "REQUESTS", 16)):
        monkeypatch.setattr(owner, name, value)
    with unchecked():
        assert smoke.main(["--device", "cpu", "--only", lines, "--budget", "1e9", "--out", str(out)]) == 1
    found = json.loads(out.read_text())
    assert (found["is_dry_run"], found["card"]) == (True, None)
    failed = [row for row in found["lines"] if row["outcome"] == "failed"]
    assert [row["note"] for row in failed] == ["ZeroDivisionError: division by zero"]
    assert {row["line"] for row in found["lines"]} == {line for line in smoke.LINES if lines in line}
    assert smoke.main(["--device", "cpu", "--only", "that grow", "--budget", "0", "--out", str(out)]) == 0
    assert [row["outcome"] for row in json.loads(out.read_text())["lines"]] == ["left out"]
