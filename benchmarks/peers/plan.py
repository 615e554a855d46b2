"""What is measured: settings of engines, and how long."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers import environments as env
from peers.protocol import Worker


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One line of the table: an engine, how it is set (its own words in `options`), and which worker runs it."""

    engine: str
    backend: str | None = None
    name: str
    worker: str
    options: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def key(self) -> str:
        return f"{self.worker} | {self.name}"


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Weights of one type under so many threads, at these temperatures."""

    dtype: str
    threads: int
    temperatures: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much: pairs with the prompts of each cycle, cycles, tokens an answer, and the stages of each pair."""

    prompts: dict[str, int]
    cycles: int
    tokens: int
    stages: dict[str, tuple[Stage, ...]]

    @classmethod
    def full(cls) -> "Plan":
        prompts = {"reference": 2, "30m-2m": 1, "120m-2m": 1, SMOLLM2: 1}
        return cls(prompts=prompts, cycles=3, tokens=64, stages={name: _stages(name) for name in prompts})

    @classmethod
    def quick(cls) -> "Plan":
        """A smoke run: every engine once with one thread, on the reference pair unless others are named."""
        full = cls.full()
        stages = {name: tuple(stage for stage in some if stage.threads == 1) for name, some in full.stages.items()}
        return cls(prompts={"reference": 1}, cycles=1, tokens=24, stages=stages)


SMOLLM2, QWEN_CODER = "smollm2", "qwen_coder"


def _stages(pair: str) -> tuple[Stage, ...]:
    both = (0.0, 1.0)
    if pair == SMOLLM2:
        return tuple(Stage(dtype=dtype, threads=n, temperatures=both) for dtype in ("q4_1", "bf16") for n in (1, 2))
    whole = tuple(Stage(dtype="f32", threads=n, temperatures=both) for n in (1, 2))
    packed = tuple(Stage(dtype=dtype, threads=n, temperatures=(0.0,)) for dtype in ("int8", "int4") for n in (1, 2))
    return (*whole, Stage(dtype="bf16", threads=1, temperatures=(0.0,)), *packed)


def settings(pair: str, stage: Stage) -> list[Setting]:
    """Every setting of every engine that has weights of this type."""
    found = [*_llama(), *_openvino(stage), *_ours_compiled("llama.cpp", pair), *_ours_compiled("native", pair)]
    if stage.dtype in ("int8", "int4", "q4_1"):
        found += _ours_compiled("native-int8", pair)
    if stage.dtype == "f32" or (pair == SMOLLM2 and stage.dtype == "bf16"):
        found += _transformers()
    if stage.dtype == "f32":
        found += [*_reference(), *_ours_torch(pair)]
    return [s for s in found if stage.dtype == "f32" or s.name in _FEW]


_FEW = ("target alone", "n-max 4", "n-max 8, p-min 0.4", "K = 4", "threshold 0.4", "cost-aware", "cumulative 0.2", "argmax")
"""What is measured of weights that are not float32."""


def _transformers() -> Iterator[Setting]:
    kinds: dict[str, dict[str, Any]] = {
        "target alone": {"assistant": None},
        "K = 4": {"assistant": 4, "schedule": "constant", "confidence": 0.0},
        "K = 8": {"assistant": 8, "schedule": "constant", "confidence": 0.0},
        "confidence 0.4": {"assistant": 20, "schedule": "constant", "confidence": 0.4},
    }
    for name, options in kinds.items():
        yield Setting(engine="transformers", name=name, worker="transformers", options=options)


def _reference() -> Iterator[Setting]:
    yield Setting(engine="reference step", name="h = 0.4", worker="reference step", options={"threshold": 0.4})


def _llama() -> Iterator[Setting]:
    kinds: dict[str, dict[str, Any]] = {
        "target alone": {"n_max": None},
        "n-max 2": {"n_max": 2, "p_min": 0.0},
        "n-max 4": {"n_max": 4, "p_min": 0.0},
        "n-max 8": {"n_max": 8, "p_min": 0.0},
        "n-max 8, p-min 0.4": {"n_max": 8, "p_min": 0.4},
        "n-max 16, p-min 0.6": {"n_max": 16, "p_min": 0.6},
    }
    for name, options in kinds.items():
        yield Setting(engine="llama.cpp", name=name, worker="llama.cpp", options=options)


def _openvino(stage: Stage) -> Iterator[Setting]:
    yield Setting(engine="openvino", name="target alone", worker="openvino alone")
    for k in (2, 4, 8):
        yield Setting(engine="openvino", name=f"K = {k}", worker="openvino", options={"num_assistant_tokens": k})
    options = {"assistant_confidence_threshold": 0.4}
    yield Setting(engine="openvino", name="threshold 0.4", worker="openvino", options=options)


def _ours(backend: str, name: str, policy: str) -> Setting:
    return Setting(engine="ours", backend=backend, name=name, worker=f"ours {backend}", options={"policy": policy})


def _adaptive(backend: str, pair: str) -> Iterator[Setting]:
    yield _ours(backend, "cost-aware", "cost-aware")
    yield _ours(backend, "cumulative 0.2", "cumulative:0.2")
    if pair != "reference":  # whose q say nothing
        yield _ours(backend, "EMA", "ema")
        yield _ours(backend, "argmax", "argmax")


def _ours_compiled(backend: str, pair: str) -> Iterator[Setting]:
    yield _ours(backend, "target alone", "target")
    for k in (2, 4, 8):
        yield _ours(backend, f"K = {k}", f"fixed:{k}")
    yield from _adaptive(backend, pair)


def _ours_torch(pair: str) -> Iterator[Setting]:
    for backend in ("eager", "lean"):
        for k in (4, 8) if backend == "eager" else (4,):
            yield _ours(backend, f"K = {k}", f"fixed:{k}")
    yield _ours("lean", "target alone", "target")
    yield from _adaptive("lean", pair)


def workers(names: set[str]) -> dict[str, Worker]:
    """A process for each name, not started."""
    torch, openvino = env.python(env.TORCH), env.python(env.OPENVINO)
    known: dict[str, tuple[Path, str, tuple[str, ...]]] = {
        "transformers": (torch, "hf", ()),
        "reference step": (torch, "reference_round", ()),
        "llama.cpp": (torch, "llama", (str(env.SERVER),)),
        "openvino": (openvino, "genai", ("speculative",)),
        "openvino alone": (openvino, "genai", ("alone",)),
        "openvino batching": (openvino, "genai_batch", ()),
        "vllm": (env.python(env.VLLM), "vllm_cpu", ()),
        "vllm, K = 1": (env.python(env.VLLM), "vllm_cpu", ("1",)),
        "vllm, K = 2": (env.python(env.VLLM), "vllm_cpu", ("2",)),
        "ours eager": (torch, "ours", ("eager",)),
        "ours lean": (torch, "ours", ("lean",)),
        "ours native": (torch, "ours", ("native",)),
        "ours native-int8": (torch, "ours", ("native-int8",)),
        "ours llama.cpp": (torch, "ours", ("llama.cpp",)),
    }
    return {
        name: Worker(
            name=name,
            python=known[name][0],
            module=f"peers.engines.{known[name][1]}",
            arguments=known[name][2],
            environment=env.environment(),
            log=env.LOGS / f"{name.replace(' ', '-').replace(',', '')}.log",
        )
        for name in sorted(names)
    }
