"""Families of models as data: the names of their parameters, and the few points where families differ.

    model of transformers -> `described` -> Family, with a Layer of names for each layer

All of them are one function, in which brackets mark what not every family has:

    x = embedding[token] [* embedding_scale]
    in each layer:  q, k, v = qkv norm(x) [+ bias];  [norms of single heads of q and k]
                    q, k turned by the view's angles, and attention over the view's window
                    x = x + [norm] out attention;  x = x + [norm] down (activation(gate h) * up h), h = norm(x)
    logits = output norm(x)

Nothing here reads a weight: a model on the meta device can be described, and its weights be taken from elsewhere by name.

Sources: transformers, models/{llama,mistral,qwen2,qwen3,phi3,gemma3}/modeling_*.py.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any, Literal

import torch

from specdecpp.backends import trimmed
from specdecpp.backends.angles import frequencies

Activation = Literal["silu", "gelu_pytorch_tanh"]
_ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
_ANGLES = ("default", "linear", "llama3", "yarn", "longrope")
_TYPES = {"full_attention", "sliding_attention"}
POSITIONS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length")
CONFIG = (*POSITIONS, "rope_parameters", "original_max_position_embeddings", trimmed.KEY)
"""Fields of a config that say how many tokens a model can hold (the first of `POSITIONS` that it has) and which it scores."""


@dataclass(frozen=True, kw_only=True)
class View:
    """View of the layers of one kind: the angles that turn their keys and queries, and how far back they look."""

    angles: str | None
    """The kind of layer that the rotary embedding knows them by; None where it is one for all (`Angles`)."""
    window: int | None
    """Position p sees p - window + 1 to p; None: all up to p."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The parameters of one layer by name, as `model.get_parameter` takes them. Rows of several are stacked in their order."""

    norm: str
    qkv: tuple[str, ...]
    """Rows of all heads of q, then of k, then of v."""
    qkv_bias: tuple[str, ...]
    """Empty: there are none."""
    head_norms: tuple[str, str] | None
    """Norms of single heads of q and of k, before they are turned."""
    out: str
    out_norm: str | None
    """Norm of what attention adds, before it is added."""
    mlp_norm: str
    gate_up: tuple[str, ...]
    down: str
    down_norm: str | None
    """Norm of what the feed-forward part adds, before it is added."""
    view: int
    """Which of the family's views."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """Description of what a model computes (see the head of this file), and its parameters by name."""

    layers: tuple[Layer, ...]
    views: tuple[View, ...]
    embedding: str
    norm: str
    output: str
    """The embedding's name where the two are tied."""
    width: int
    heads: int
    kv_heads: int
    head_size: int
    rotary_size: int
    """Dimensions of a head that are turned: the first ones, in two halves. The others are left as they are."""
    hidden: int
    """Rows of gate, and of up."""
    eps: float
    norm_offset: float
    """Norms multiply by the stored weight plus this."""
    activation: Activation
    embedding_scale: float
    """Scale as transformers rounds it to the type of the weights."""
    score_scale: float
    """Products of queries and keys are multiplied by it."""


@dataclass(frozen=True, kw_only=True)
class _Form:
    """How a class of transformers names things."""

    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    out_norm: str | None = None
    mlp_norm: str = "post_attention_layernorm"
    down_norm: str | None = None
    norm_offset: float = 0.0
    activation: str = "hidden_act"
    score_size: str | None = None
    windows: Literal["no layer", "every layer", "layer types"] = "every layer"


_FORMS = {
    "LlamaForCausalLM": _Form(windows="no layer"),
    "MistralForCausalLM": _Form(),
    "Qwen2ForCausalLM": _Form(windows="layer types"),
    "Qwen3ForCausalLM": _Form(windows="layer types"),
    "Phi3ForCausalLM": _Form(qkv=("qkv_proj",), gate_up=("gate_up_proj",)),
    "Gemma3ForCausalLM": _Form(
        out_norm="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        down_norm="post_feedforward_layernorm",
        norm_offset=1.0,
        activation="hidden_activation",
        score_size="query_pre_attn_scalar",
        windows="layer types",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Sketch:
    """A stand-in for a model whose weights lie in a file, as JSON: it spares the import of transformers' modelling.

    `config` has the fields `CONFIG` of the model's, `rotary` the frequencies and scalings of its rotary embedding.
    """

    family: Family
    num_rows: int
    config: Any
    rotary: Any

    @classmethod
    def of(cls, model: Any) -> "Sketch":
        """The sketch of a model that `refusal` does not refuse."""
        rotary, family = model.model.rotary_emb, described(model)
        if any(buffer.is_meta for buffer in rotary.buffers()):
            with torch.device("cpu"):
                rotary = type(rotary)(rotary.config)
        found: dict[str, Any] = {"rope_type": rotary.rope_type}
        for kind in {view.angles for view in family.views}:
            start = f"{kind}_" if kind else ""
            for name in (f"{start}inv_freq", f"{start}original_inv_freq", f"{start}attention_scaling"):
                if (value := getattr(rotary, name, None)) is not None:
                    found[name] = value
        config = {name: getattr(model.config, name, None) for name in CONFIG}
        rows = int(model.get_output_embeddings().weight.shape[0])
        return cls(family=family, num_rows=rows, config=SimpleNamespace(**config), rotary=SimpleNamespace(**found))

    def told(self) -> dict[str, Any]:
        """Form for JSON: float32 values are kept to the bit."""
        rotary = {name: x.tolist() if isinstance(x, torch.Tensor) else x for name, x in vars(self.rotary).items()}
        return {"family": asdict(self.family), "num_rows": self.num_rows, "config": vars(self.config), "rotary": rotary}

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> "Sketch":
        """The inverse of `told`. Raises KeyError, TypeError for anything else."""
        family, rotary = dict(values["family"]), dict(values["rotary"])
        family["views"] = tuple(View(**view) for view in family["views"])
        family["layers"] = tuple(Layer(**_tupled(layer)) for layer in family["layers"])
        rotary = {name: torch.tensor(x) if isinstance(x, list) else x for name, x in rotary.items()}
        config, found = SimpleNamespace(**values["config"]), SimpleNamespace(**rotary)
        return cls(family=Family(**family), num_rows=values["num_rows"], config=config, rotary=found)


def _tupled(values: Mapping[str, Any]) -> dict[str, Any]:
    """With tuples where JSON has lists."""
    return {name: tuple(x) if isinstance(x, list) else x for name, x in values.items()}


def refusal(model: Any) -> str | None:
    """Reason why a model is not described here; None where it is."""
    if isinstance(model, Sketch):
        return None
    config = model.config
    form = _FORMS.get(type(model).__name__)
    if form is None:
        return f"it is not one of {', '.join(_FORMS)}"
    if getattr(config, "use_bidirectional_attention", False):
        return "its tokens see those after them"
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if cap := getattr(config, name, None):
            return f"its {'scores' if name.startswith('attn') else 'logits'} are squeezed below {cap:g} ({name})"
    if form.windows == "no layer" and getattr(config, "sliding_window", None):
        return f"it asks for a window of {config.sliding_window}, which {type(model).__name__} does not have"
    if (window := getattr(config, "sliding_window", None)) is not None and window < 1:
        return f"its window is {window} positions wide"
    if form.windows == "layer types" and (unknown := {*config.layer_types} - _TYPES):
        return f"it has layers of {', '.join(sorted(unknown))}"
    found = model.model.rotary_emb.rope_type
    if unknown := ({found} if isinstance(found, str) else {*found.values()}) - {*_ANGLES}:
        return f"its rotary angles are {', '.join(sorted(unknown))}"
    if (activation := getattr(config, form.activation)) not in _ACTIVATIONS:
        return f"its feed-forward layers are gated by {activation}, not by {' or '.join(_ACTIVATIONS)}"
    if getattr(config, "mlp_bias", False):
        return "its feed-forward layers have biases"
    if any(layer.self_attn.o_proj.bias is not None for layer in model.model.layers):
        return "its attention has an output bias"
    return None


def refusal_of_weights(model: Any) -> str | None:
    """Reason why the weights of a model cannot be read as they are; None where they can."""
    linear = {type(m) for m in model.modules() if isinstance(m, torch.nn.Linear)}
    if linear != {torch.nn.Linear} or len({p.dtype for p in model.parameters()}) > 1:
        return "its weights are quantised or of several types"
    if len({p.device for p in model.parameters()}) > 1 or any(hasattr(m, "_hf_hook") for m in model.modules()):
        return "it is spread over devices"
    return None


def described(model: Any) -> Family:
    """The description of a model that `refusal` does not refuse."""
    if isinstance(model, Sketch):
        return model.family
    config, body, form = model.config, model.model, _FORMS[type(model).__name__]
    views = [_view(config, form, body.rotary_emb, i) for i in range(len(body.layers))]
    kinds = tuple(dict.fromkeys(views))
    heads, width = int(config.num_attention_heads), int(config.hidden_size)
    head_size = int(getattr(config, "head_dim", None) or width // heads)
    is_tied = model.lm_head.weight is body.embed_tokens.weight
    return Family(
        layers=tuple(_layer(layer, form, f"model.layers.{i}", kinds.index(views[i])) for i, layer in enumerate(body.layers)),
        views=kinds,
        embedding="model.embed_tokens.weight",
        norm="model.norm.weight",
        output="model.embed_tokens.weight" if is_tied else "lm_head.weight",
        width=width,
        heads=heads,
        kv_heads=int(config.num_key_value_heads),
        head_size=head_size,
        rotary_size=2 * len(frequencies(body.rotary_emb, views[0].angles if views else None)),
        hidden=int(config.intermediate_size),
        eps=float(config.rms_norm_eps),
        norm_offset=form.norm_offset,
        activation=getattr(config, form.activation),
        embedding_scale=_embedding_scale(body.embed_tokens),
        score_scale=float(getattr(config, form.score_size) if form.score_size else head_size) ** -0.5,
    )


def _view(config: Any, form: _Form, rotary: Any, i: int) -> View:
    kind = config.layer_types[i] if form.windows == "layer types" else None
    slides = form.windows == "every layer" or kind == "sliding_attention"
    return View(
        angles=kind if isinstance(rotary.rope_type, dict) else None,
        window=getattr(config, "sliding_window", None) if slides else None,
    )


def _layer(layer: Any, form: _Form, path: str, view: int) -> Layer:
    attention, name = f"{path}.self_attn", "{}.{}.weight".format
    has_bias = getattr(layer.self_attn, form.qkv[0]).bias is not None
    return Layer(
        norm=name(path, "input_layernorm"),
        qkv=tuple(name(attention, part) for part in form.qkv),
        qkv_bias=tuple(f"{attention}.{part}.bias" for part in form.qkv) if has_bias else (),
        head_norms=(name(attention, "q_norm"), name(attention, "k_norm")) if hasattr(layer.self_attn, "q_norm") else None,
        out=name(attention, "o_proj"),
        out_norm=form.out_norm and name(path, form.out_norm),
        mlp_norm=name(path, form.mlp_norm),
        gate_up=tuple(name(f"{path}.mlp", part) for part in form.gate_up),
        down=name(f"{path}.mlp", "down_proj"),
        down_norm=form.down_norm and name(path, form.down_norm),
        view=view,
    )


def _embedding_scale(embedding: Any) -> float:
    scale = getattr(embedding, "embed_scale", None)
    if scale is None:
        return 1.0
    if scale.is_meta:
        scale = scale.new_tensor(embedding.scalar_embed_scale, device="cpu")
    return float(scale.to(embedding.weight.dtype))
