"""llama.cpp's own endpoint, /completion: its request, its reply, and the properties of a server that its clients ask for.

What a request leaves out is the server's own, as there; /props has it. Sampling is this library's: the temperature comes before
the cuts, and the repetition penalty is over the whole context.
"""

from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, Field, model_validator

from specdecpp import __version__
from specdecpp.loading.pair import Pair
from specdecpp.sampling import Sampling, asked
from specdecpp.serving.answers import Answer, AnswerState, Json, timings
from specdecpp.serving.engine import StepEvent
from specdecpp.serving.replies import Timings
from specdecpp.serving.schema import UNSUPPORTED, Neutral, TextRequest
from specdecpp.serving.settings import ServerSettings

RANDOM = (-1, 2**32 - 1)
"""Seeds that llama.cpp takes for none."""
_NEUTRAL: Neutral = {
    **dict.fromkeys(("grammar", "json_schema", "samplers"), ("", {}, [])),
    **dict.fromkeys(("dry_multiplier", "dynatemp_range", "mirostat", "n_indent", "n_probs", "xtc_probability"), (0,)),
    **dict.fromkeys(("image_data", "lora", "response_fields"), ([],)),
    **dict.fromkeys(("tfs_z", "typical_p"), (1,)),
    **dict.fromkeys(("adaptive_target", "t_max_predict_ms", "top_n_sigma"), (-1, 0)),
    **dict.fromkeys(("return_progress", "verbose"), (False,)),
    "logit_bias": ({}, []),
    "min_keep": (0, 1),
}
_OF_SAMPLERS_THAT_ARE_OFF = ("adaptive_decay", "dry_allowed_length", "dry_base", "dry_penalty_last_n", "dry_sequence_breakers")
_OF_SAMPLERS_THAT_ARE_OFF += ("dynatemp_exponent", "mirostat_eta", "mirostat_tau", "penalize_nl", "xtc_threshold")
_OF_CACHES = ("cache_prompt", "id_slot", "n_cache_reuse", "n_discard", "n_keep")
_OF_DRAFTING = ("speculative.n_max", "speculative.n_min", "speculative.p_min")
MEANINGLESS = (*_OF_SAMPLERS_THAT_ARE_OFF, *_OF_CACHES, *_OF_DRAFTING, "post_sampling_probs")
"""Fields that change no answer here. Drafting has the server's policy, or that of `speculative`; llama.cpp's server follows no
such field of a request either."""


class NativeRequest(TextRequest):
    """The body of /completion."""

    unsupported: ClassVar[Neutral] = {**UNSUPPORTED, **_NEUTRAL, **dict.fromkeys(MEANINGLESS)}
    is_cut = True

    max_tokens: int | None = Field(
        default=None, alias="n_predict", ge=-1, le=2**31, description="At most; -1 or left out: what there is room for."
    )
    top_k: Annotated[int | None, AfterValidator(lambda k: k and max(0, k))] = Field(
        default=None, ge=-(2**31), le=2**31, description="0 or less: all."
    )
    seed: Annotated[int | None, AfterValidator(lambda seed: None if seed in RANDOM else seed)] = Field(
        default=None, ge=-1, lt=2**63, description="-1: none."
    )
    repetition_penalty: float | None = Field(default=None, alias="repeat_penalty", ge=0.01, le=100)
    repeat_last_n: int | None = Field(default=None, ge=-1, description="-1: the penalty is over all tokens; 0: there is none.")
    return_tokens: bool = False
    timings_per_token: bool = Field(default=False, description="Timings in every chunk.")

    @model_validator(mode="after")
    def _check_words(self) -> "NativeRequest":
        if self.max_tokens == 0:
            raise ValueError("n_predict must be -1 or at least 1, got 0. Ask for 1 token to have the prompt read.")
        if self.repeat_last_n == 0:
            self.repetition_penalty = 1.0
        elif self.repeat_last_n not in (None, -1) and self.repetition_penalty not in (None, 1.0):
            message = f"repeat_last_n must be -1 with a repeat_penalty, got {self.repeat_last_n}: it is over the whole context."
            raise ValueError(f"{message} Send -1 or leave it out.")
        if self.speculative.details:
            raise ValueError("speculative.details goes with /v1/completions. Leave it out, or ask there.")
        return self

    @property
    def num_new(self) -> int | None:
        return None if self.max_tokens == -1 else self.max_tokens


class NativeReply(BaseModel):
    """The reply of /completion; a list of them where there are several answers. A chunk has the first six
    fields; the last one of an answer has all of them, and no content of its own."""

    index: int
    content: str
    tokens: list[int] = Field(description="Ids; in a whole reply where return_tokens asks for them.")
    tokens_predicted: int
    tokens_evaluated: int = Field(description="Tokens of the prompt.")
    stop: bool
    timings: Timings
    model: str
    prompt: str | list[int]
    generation_settings: dict[str, Any]
    has_new_line: bool
    truncated: bool = Field(description="The context, or the server's limit, ended the answer before n_predict.")
    stop_type: Literal["eos", "word", "limit"]


class NativeAnswer(Answer):
    """The reply to a `NativeRequest`, updated with every event."""

    done = b""

    _body: NativeRequest

    def whole(self, queue_s: float | None) -> Any:
        replies = []
        for choice in self.choices:
            tokens = [token for step in choice.steps for token in step.tokens] if self._body.return_tokens else []
            replies.append(self._last(choice, choice.text, tokens))
        return replies if len(replies) > 1 else replies[0]

    def chunks(self, events: Sequence[StepEvent], queue_s: float | None) -> list[Any]:
        """A chunk of the steps of an answer that came together, and a last one where it has ended."""
        found: list[Any] = []
        for index, group in groupby(events, attrgetter("index")):
            choice, new = self.choices[index], list(group)
            for event in new:
                self.add(event)
            tokens = [token for event in new for token in event.step.tokens]
            timed = {"timings": timings([choice])} if self._body.timings_per_token else {}
            text = "".join(event.step.text for event in new)
            found.append({**self._part(choice, text, tokens), "stop": False, **timed})
            if new[-1].step.finish_reason is not None:
                found.append(self._last(choice, "", []))
        return found

    def closing(self) -> None:
        """Nothing: every answer has its own last chunk."""

    def _part(self, choice: AnswerState, text: str, tokens: list[int]) -> Json:
        num = choice.metrics.num_tokens
        head: Json = {"index": choice.index, "content": text, "tokens": tokens}
        return {**head, "tokens_predicted": num, "tokens_evaluated": choice.num_prompt_tokens}

    def _last(self, choice: AnswerState, text: str, tokens: list[int]) -> NativeReply:
        body, part, num = self._body, self.plan.parts[choice.index], choice.metrics.num_tokens
        ended = choice.steps[-1].finish_reason
        options: Any = part.options
        settings = generation_settings(self.plan.sampling, n_predict=options["max_tokens"], seed=options["seed"])
        return NativeReply(
            **self._part(choice, text, tokens),
            stop=True,
            timings=timings([choice]),
            model=self._head["model"],
            prompt=body.prompts[choice.index // body.n],
            generation_settings=settings | {"stop": body.stop, "ignore_eos": body.ignore_eos, "stream": bool(body.stream)},
            has_new_line="\n" in choice.text,
            truncated=ended == "length" and (body.num_new is None or num < body.num_new),
            stop_type="eos" if ended in ("eos", "grammar") else "word" if ended == "stop" else "limit",
        )


class Props(BaseModel):
    """Properties of a server: what it has, and does by default."""

    default_generation_settings: dict[str, Any]
    total_slots: int = Field(description="Requests that are decoded at once.")
    model_alias: str
    model_path: str
    chat_template: str
    bos_token: str
    eos_token: str
    modalities: dict[str, bool]
    build_info: str


def generation_settings(sampling: Sampling, *, n_predict: int = -1, seed: int | None = None) -> Json:
    """Parameters of a request under llama.cpp's names."""
    return {
        "n_predict": n_predict,
        "seed": -1 if seed is None else seed,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k or 0,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repeat_penalty": sampling.repetition_penalty,
        "repeat_last_n": -1,
    }


def props(pair: Pair, settings: ServerSettings, *, name: str) -> Props:
    """The properties of a server."""
    tokenizer = pair.tokenizer
    template = getattr(tokenizer, "chat_template", None)
    return Props(
        default_generation_settings={"n_ctx": pair.target.max_length, "params": generation_settings(asked({}, pair.sampling))},
        total_slots=settings.max_running,
        model_alias=name,
        model_path=pair.target_name,
        chat_template=template if isinstance(template, str) else "",
        bos_token=tokenizer.bos_token or "",
        eos_token=tokenizer.eos_token or "",
        modalities={"vision": False, "audio": False},
        build_info=f"specdecpp {__version__}",
    )
