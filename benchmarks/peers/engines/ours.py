"""Ours, through the public API: `load_pair`, `Decoder`. The argument is the backend.

Settings: {"policy": "fixed:4"}, in the words of the command line, or "default". The seed 0 is none.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peers.protocol import Answer, Load, Request, serve


class Ours:
    """A pair under one backend (None: that of `load_pair`), with a head that lies elsewhere, and a decoder per setting."""

    def __init__(self, backend: str | None = None, head: Path | None = None):
        self.backend, self.head = backend, head

    def load(self, load: Load) -> dict[str, str]:
        import torch
        import transformers

        import specdecpp as sd

        transformers.utils.logging.set_verbosity_error()
        torch.set_num_threads(load.threads)
        names = "head", f"head-{load.dtype}"  # of all forms of the draft, or of this one
        head = self.head or next((folder for name in names if (folder := Path(load.folder, name)).exists()), None)
        versions = {"specdecpp": sd.__version__, "torch": torch.__version__}
        target, draft = (f"{load.folder}/{role}-{load.dtype}.gguf" for role in ("target", "draft"))
        self.pair = sd.load_pair(target, draft=draft, head=head, backend=self.backend)
        self.decoders: dict[str, Any] = {}
        return versions

    def pids(self) -> list[int]:
        return []

    def run(self, request: Request) -> Answer:
        out = self._decoder(request.options["policy"]).generate(
            request.prompt,
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=0,
            seed=request.seed or None,
            ignore_eos=request.ignore_eos,
        )
        found = out.metrics
        return Answer(
            tokens=list(out.tokens),
            steps=found.num_spec_steps,
            drafted=found.num_draft_tokens,
            accepted=found.num_accepted_draft_tokens,
            overhead=1 - found.forward_s / (found.elapsed_s - found.prefill_s) if found.forward_s else None,
        )

    def ready(self, at_once: int) -> None:
        self.at_once = at_once

    def run_all(self, requests: Sequence[Request]) -> list[int]:
        """All alike; without a seed, as people ask, so that lengths follow the load."""
        first = requests[0]
        options = {"max_tokens": first.max_tokens, "temperature": first.temperature, "ignore_eos": first.ignore_eos}
        prompts = [request.prompt for request in requests]
        found = self._decoder(first.options["policy"]).generate_all(prompts, at_once=self.at_once, **options)
        return [len(out.tokens) for out in found]

    def _decoder(self, policy: str) -> Any:
        import specdecpp as sd
        from specdecpp.policy_spec import parse_policy

        if policy not in self.decoders:
            rule = None if policy == "default" else parse_policy(policy).build(self.pair.head)
            self.decoders[policy] = sd.Decoder(self.pair, policy=rule, reuses=False)
        return self.decoders[policy]


if __name__ == "__main__":
    serve(Ours(sys.argv[1]))
