"""A plugin for vLLM: the engine serves, and the number of tokens that its draft model drafts is ours to choose.

vLLM loads `register` in every process through the entry point group `vllm.general_plugins`. Nothing changes until an engine is
configured for it:

    vllm serve TARGET --speculative-config '{"method": "draft_model", "model": DRAFT, "num_speculative_tokens": 8}'
                      --additional-config '{"specdecpp": {}}'

    configuring  settings, refusals, the way in        scheduler    vLLM's, which asks for the length of a batch's steps
    lengths      that length                           stopping     a threshold that may end a step
    speculator   the passes of the draft, as graphs
"""

import functools
from typing import Any

MARK = "_specdecpp"


def register() -> None:
    """Have engines and workers call `configuring` before they read their configuration. May be called again."""
    try:
        from vllm.v1.executor.abstract import Executor  # pyright: ignore[reportMissingImports]
        from vllm.v1.worker.worker_base import WorkerBase  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        from specdecpp.integrations.vllm.configuring import logger

        logger.error('specdecpp finds no way into this vLLM (%s): additional_config["specdecpp"] would be ignored', error)
        return
    for kind, ask in ((Executor, "configure"), (WorkerBase, "attach")):
        if not hasattr(kind.__init__, MARK):
            kind.__init__ = _asking(kind.__init__, ask)


def _asking(make: Any, ask: str) -> Any:
    @functools.wraps(make)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        from specdecpp.integrations.vllm import configuring

        getattr(configuring, ask)(kwargs.get("vllm_config") or args[0])
        make(self, *args, **kwargs)

    setattr(init, MARK, True)
    return init
