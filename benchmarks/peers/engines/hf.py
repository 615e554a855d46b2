"""transformers: `generate`, alone and with `assistant_model`.

Settings: {"assistant": null} or {"assistant": K, "schedule": "constant", "confidence": 0.0}.
"""

from typing import Any

from peers.protocol import Answer, Load, Request, serve


class Transformers:
    """`generate` over plain models; forwards are counted where they are called."""

    def load(self, load: Load) -> dict[str, str]:
        import torch
        import transformers
        from transformers import AutoModelForCausalLM

        transformers.utils.logging.set_verbosity_error()
        torch.set_num_threads(load.threads)
        self.calls = {"target": 0, "draft": 0}
        self.models: dict[str, Any] = {}
        for role in self.calls:
            model = AutoModelForCausalLM.from_pretrained(f"{load.folder}/{role}", dtype=torch.bfloat16).eval()
            model.generation_config.eos_token_id = None
            model.register_forward_pre_hook(lambda *_, role=role: self._count(role))
            self.models[role] = model
        return {"transformers": transformers.__version__, "torch": torch.__version__}

    def _count(self, role: str) -> None:
        self.calls[role] += 1

    def pids(self) -> list[int]:
        return []

    def run(self, request: Request) -> Answer:
        import torch

        torch.manual_seed(request.seed)
        target, draft = self.models["target"], self.models["draft"]
        options: dict[str, Any] = {"max_new_tokens": request.max_tokens, "pad_token_id": 0, "do_sample": False}
        if request.temperature > 0:
            options |= {"do_sample": True, "temperature": request.temperature, "top_k": 0, "top_p": request.top_p}
        if request.ends:
            options["eos_token_id"] = request.ends
        if k := request.options["assistant"]:
            options["assistant_model"] = draft
            draft.generation_config.num_assistant_tokens = k
            draft.generation_config.num_assistant_tokens_schedule = request.options["schedule"]
            draft.generation_config.assistant_confidence_threshold = request.options["confidence"]
        self.calls |= {"target": 0, "draft": 0}
        ids = torch.tensor([request.prompt])
        with torch.inference_mode():
            out = target.generate(ids, attention_mask=torch.ones_like(ids), **options)
        tokens = out[0, len(request.prompt) :].tolist()
        steps, drafted = self.calls["target"], self.calls["draft"]
        return Answer(tokens=tokens, steps=steps, drafted=drafted, accepted=max(0, len(tokens) - steps) if drafted else 0)


if __name__ == "__main__":
    serve(Transformers())
