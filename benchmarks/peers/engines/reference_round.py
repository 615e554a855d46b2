"""The step of the paper's reference implementation, written anew from its description (method: SpecDec++, section 5).

Plain models of transformers with a `DynamicCache` each; per draft token one forward with all hidden states, one judgement of
the head, one draw, and a host synchronisation for both; S is the product of the judgements, and drafting stops once 1 - S > h
within [2, 20]. The head is that of the pair, asked where the description asks: after the forward pass that reads the draft
token.

Settings: {"threshold": h}.
"""

import math
from typing import Any

from peers.protocol import Answer, Load, Request, serve

LEAST, MOST = 2, 20


class ReferenceRound:
    """Draft, verify, crop; nothing else."""

    def load(self, load: Load) -> dict[str, str]:
        import torch
        import transformers
        from transformers import AutoModelForCausalLM

        from specdecpp.head import AcceptanceHead

        transformers.utils.logging.set_verbosity_error()
        torch.set_num_threads(load.threads)
        self.target, self.draft = (
            AutoModelForCausalLM.from_pretrained(f"{load.folder}/{role}", dtype=torch.float32).eval()
            for role in ("target", "draft")
        )
        self.judge = AcceptanceHead.from_pretrained(f"{load.folder}/head").estimator(calibrated=True)
        return {"transformers": transformers.__version__, "torch": torch.__version__}

    def pids(self) -> list[int]:
        return []

    def run(self, request: Request) -> Answer:
        import torch
        from transformers import DynamicCache

        torch.manual_seed(request.seed)
        tokens, caches = list(request.prompt), (DynamicCache(), DynamicCache())
        steps = drafted = accepted = 0
        with torch.inference_mode():
            while (left := request.max_tokens - (len(tokens) - len(request.prompt))) > 0:
                candidates, q = self._candidates(tokens, caches[1], request, room=left - 1)
                kept, final = self._verified(tokens, candidates, q, caches[0], request)
                tokens += [*candidates[:kept], final]
                for cache in caches:
                    if (excess := cache.get_seq_length() - (len(tokens) - 1)) > 0:
                        cache.crop(-excess)
                steps, drafted, accepted = steps + 1, drafted + len(candidates), accepted + kept
        return Answer(tokens=tokens[len(request.prompt) :], steps=steps, drafted=drafted, accepted=accepted)

    def _candidates(self, tokens: list[int], cache: Any, request: Request, *, room: int) -> tuple[list[int], list[Any]]:
        """Draft tokens and what each was drawn from, until the head thinks that one is rejected."""
        import torch

        candidates: list[int] = []
        q: list[Any] = []
        unread = torch.tensor([tokens[cache.get_seq_length() :]])
        survival = 1.0
        hidden: Any = None
        while len(candidates) < min(MOST, room):
            out = self.draft(unread, past_key_values=cache, use_cache=True, output_hidden_states=True)
            if candidates:  # the pass that has read the last draft token is paid for: it is judged, its successor is free
                scalars = (math.log(max(q[-1][candidates[-1]].item(), 1e-30)),)
                survival *= self.judge(hidden, candidates[-1], scalars)
            hidden = out.hidden_states[-1][0, -1]
            row = self._distribution(out.logits[0, -1], request.temperature)
            token = self._drawn(row, request.temperature)
            q.append(row)
            candidates.append(token)
            unread = torch.tensor([[token]])
            if 1 - survival > request.options["threshold"] and len(candidates) >= LEAST:
                break
        return candidates, q

    def _verified(
        self, tokens: list[int], candidates: list[int], q: list[Any], cache: Any, request: Request
    ) -> tuple[int, int]:
        """How many draft tokens pass the ratio test, and the target's own token after them."""
        import torch

        inputs = torch.tensor([tokens[cache.get_seq_length() :] + candidates])
        logits = self.target(inputs, past_key_values=cache, use_cache=True).logits[0, -len(candidates) - 1 :]
        p = [self._distribution(row, request.temperature) for row in logits]
        for i, token in enumerate(candidates):
            if request.temperature == 0:
                if int(p[i].argmax()) != token:
                    return i, int(p[i].argmax())
            elif torch.rand(()).item() > (p[i][token] / q[i][token]).item():
                return i, self._drawn((p[i] - q[i]).clamp(min=0), request.temperature)
        return len(candidates), self._drawn(p[-1], request.temperature)

    @staticmethod
    def _distribution(logits: Any, temperature: float) -> Any:
        return (logits / temperature if temperature else logits).softmax(-1)

    @staticmethod
    def _drawn(weights: Any, temperature: float) -> int:
        return int(weights.multinomial(1).item() if temperature else weights.argmax().item())


if __name__ == "__main__":
    serve(ReferenceRound())
