"""A program: sampled steps of our speculator with vLLM's own sampler and rejection sampler, whose kernels are interpreted.

CUDA_VISIBLE_DEVICES= TRITON_INTERPRET=1 python draws.py NUM POLICY [trims]

Prints, for every pair of first two tokens, how often it came out and how likely the target has it; and the lengths of steps.
With `trims` vLLM's own estimator of acceptance leaves out draft tokens.
"""

import json
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import vllm.platforms

vllm.platforms.vllm_version_matches_substr = lambda name: False  # or the build for CPUs does without Triton
vllm.platforms.Platform.import_kernels = lambda *cls: None  # compiled for AVX-512; those of Triton are enough

from vllm.utils import torch_utils  # noqa: E402

torch_utils.is_pin_memory_available = lambda: False

from triton.runtime import interpreter  # noqa: E402


def _with_bool_masks(name: str, place: int) -> None:
    """Triton 3.9's interpreter refuses masks that are the "and" of two: they come as bytes."""
    of = getattr(interpreter.InterpreterBuilder, name)

    def call(self: Any, *args: Any) -> Any:
        args[place].data = args[place].data.astype(bool)
        return of(self, *args)

    setattr(interpreter.InterpreterBuilder, name, call)


_with_bool_masks("create_masked_load", 1)
_with_bool_masks("create_masked_store", 2)

from vllm.v1.worker.gpu.spec_decode.acceptance_estimator import OnlineAcceptanceEstimator  # noqa: E402

sys.path.append(str(Path(__file__).parents[2]))
from test_vllm import Table  # noqa: E402
from world import Request, World  # noqa: E402

from specdecpp.integrations.vllm import stopping  # noqa: E402

MOST, TEMPERATURE, LEAST = 3, 0.8, 0.2


class Drawn(World):
    """Verification by vLLM's rejection sampler."""

    def verify(self, request: Any, draft: list[int]) -> list[int]:
        from vllm.triton_utils import tl
        from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils

        rejection_sampler_utils.tldevice = SimpleNamespace(log1p=lambda x: tl.log(1 + x))  # a GPU's own function
        if not draft:
            return [int(self.target(request.tokens).argmax())]  # the end of the prompt: the same for all
        contexts = [[*request.tokens, *(max(t, 0) for t in draft[:i])] for i in range(len(draft) + 1)]
        num, slot = len(contexts), torch.tensor([request.slot])
        sampled, counts = rejection_sampler_utils.rejection_sample(
            torch.stack([self.target(c) for c in contexts]) / TEMPERATURE,
            self.speculator.draft_logits,
            torch.tensor([request.tokens[-1], *draft]),
            torch.tensor([0, num], dtype=torch.int32),
            torch.arange(len(request.tokens) - 1, len(request.tokens) - 1 + num),
            slot,
            slot.expand(num).contiguous(),
            torch.arange(num, dtype=torch.int32),
            self.temperature,
            self.seeds,
            MOST,
        )
        self.speculator.observe_verification(slot, counts, num - counts)
        return sampled[0, : int(counts)].tolist()

    def admitted(self, request: Request, row: int, length: int) -> int:
        """Catches an estimate that reads the token that was drawn, and a place without a token that would be verified."""
        estimator = self.speculator.acceptance_estimator
        if estimator is None:
            return length
        found = self.speculator.draft_token_confidence_probs[row, :length]
        drawn = [t for t in request.draft[:length] if t >= 0]
        for i in range(len(drawn)):
            q = (self.draft.network([*request.tokens, *drawn[:i]]) / TEMPERATURE).softmax(-1).max()
            expected = torch.sigmoid(estimator.slope * torch.logit(q) + estimator.intercepts[i])
            assert torch.allclose(found[i], expected, atol=1e-5)
        assert not found[len(drawn) :].any()
        return int((found.cumprod(0) > LEAST).sum())


def main(policy: str, num: int, trims: bool) -> None:
    target = Table(0)
    draft = Table(1, like=target, share=0.5)
    stopping.LAG = 0  # a step ends where the rule says
    world = Drawn(draft, target, ours={"policy": policy}, most=MOST, max_num_reqs=2, draws=True)
    world.temperature.fill_(TEMPERATURE)
    if trims:
        world.speculator.acceptance_estimator = OnlineAcceptanceEstimator(2, MOST, torch.device("cpu"))
    prompt, seen, lengths, accepted = [3, 1, 2], Counter(), Counter(), Counter()
    for i in range(num):
        world.seeds.fill_(1000 + i)
        world.add("a", prompt)
        request = world.requests["a"]
        while len(request.tokens) < len(prompt) + 3:
            world.step(MOST)
        seen[tuple(request.tokens[len(prompt) + 1 :][:2])] += 1
        lengths[request.steps[0][0]] += 1
        accepted[request.steps[0][1]] += 1
        world.remove("a")
    first = [*prompt, int(target(prompt).argmax())]
    p = (target(first) / TEMPERATURE).softmax(-1)
    rows = []
    for x in range(target.num_ids):
        then = (target([*first, x]) / TEMPERATURE).softmax(-1)
        rows += [(seen[x, y], float(p[x] * then[y])) for y in range(target.num_ids)]
    print(json.dumps({"rows": rows, "lengths": lengths, "accepted": accepted}))


if __name__ == "__main__":
    with torch.inference_mode():
        main(sys.argv[2], int(sys.argv[1]), "trims" in sys.argv)
