"""The pairs, and a process for each engine."""

from pathlib import Path

from peers import environments as env
from peers.protocol import Worker

SMOLLM2, QWEN_CODER = "smollm2", "qwen_coder"


def workers(names: set[str]) -> dict[str, Worker]:
    """A process for each name, not started."""
    torch, openvino = env.python(env.TORCH), env.python(env.OPENVINO)
    known: dict[str, tuple[Path, str, tuple[str, ...]]] = {
        "transformers": (torch, "hf", ()),
        "llama.cpp": (torch, "llama", (str(env.SERVER),)),
        "openvino": (openvino, "genai", ("speculative",)),
        "openvino alone": (openvino, "genai", ("alone",)),
        "openvino batching": (openvino, "genai_batch", ()),
        "vllm": (env.python(env.VLLM), "vllm_cpu", ()),
        "vllm, K = 1": (env.python(env.VLLM), "vllm_cpu", ("1",)),
        "vllm, K = 2": (env.python(env.VLLM), "vllm_cpu", ("2",)),
        "ours native": (torch, "ours", ("native",)),
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
