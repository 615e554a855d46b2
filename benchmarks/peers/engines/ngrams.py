"""llama.cpp with drafts of n-grams, through llama-cpp-python (`LlamaPromptLookupDecoding`). The argument is a GGUF file.

Settings: {"n_max": K}, null for the target alone. Neither keeps what it has read of an earlier prompt.
"""

import sys
from typing import Any

from peers.protocol import Answer, Load, Request, serve


class Ngrams:
    """A model for each setting, loaded when it is first asked."""

    def __init__(self, file: str):
        self.file = file
        self.models: dict[int | None, Any] = {}

    def load(self, load: Load) -> dict[str, str]:
        import llama_cpp  # pyright: ignore[reportMissingImports]

        self.threads = load.threads
        return {"llama-cpp-python": llama_cpp.__version__}

    def pids(self) -> list[int]:
        return []

    def run(self, request: Request) -> Answer:
        model = self._model(request.options["n_max"])
        model.reset()
        model.set_seed(request.seed)
        tokens: list[int] = []
        how = {"temp": request.temperature, "top_p": request.top_p, "top_k": 0, "min_p": 0.0, "repeat_penalty": 1.0}
        for token in model.generate(request.prompt, **how):
            tokens.append(token)
            if len(tokens) == request.max_tokens or (token == model.token_eos() and not request.ignore_eos):
                break
        return Answer(tokens=tokens, steps=len(tokens))

    def _model(self, num: int | None) -> Any:
        from llama_cpp import Llama  # pyright: ignore[reportMissingImports]
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding  # pyright: ignore[reportMissingImports]

        if num not in self.models:
            draft = None if num is None else LlamaPromptLookupDecoding(num_pred_tokens=num)
            how = {"n_threads": self.threads, "n_threads_batch": self.threads, "logits_all": num is not None}
            self.models[num] = Llama(self.file, n_ctx=2048, draft_model=draft, verbose=False, **how)
        return self.models[num]


if __name__ == "__main__":
    serve(Ngrams(sys.argv[1]))
