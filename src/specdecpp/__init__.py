"""specdecpp: adaptive speculative decoding that keeps the target model's exact distribution.

Public names are loaded on first use, so `import specdecpp` costs nothing and does not import torch.

    import specdecpp as sd
    decoder = sd.Decoder(sd.load_pair())
    print(decoder.generate("Why is the sky blue?", max_tokens=64, seed=0).text)
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.3.0"

if TYPE_CHECKING:
    from specdecpp.decoder import Decoder, Output
    from specdecpp.errors import (
        DataError,
        HeadError,
        MissingExtraError,
        PairError,
        PairWarning,
        PromptError,
        RunnerError,
        SpecdecError,
        UnsoundError,
    )
    from specdecpp.head import AcceptanceHead, Calibration, HeadCard
    from specdecpp.integrations.transformers import custom_generate
    from specdecpp.loading.pair import Pair, load_pair
    from specdecpp.metrics import Metrics
    from specdecpp.policies import (
        CostAware,
        Costs,
        CumulativeConfidence,
        Entropy,
        Fixed,
        MaxConfidence,
        NoDraft,
        Policy,
        SpecDecPP,
    )
    from specdecpp.runners import EagerRunner, GGUFRunner, GraphRunner, LeanRunner, NativeRunner, Runner
    from specdecpp.sampling import Sampling
    from specdecpp.session import Piece, Round
    from specdecpp.verify import BlockVerification, CompareVerification, GreedyVerification, TokenVerification, Verdict

_HOMES = {
    "specdecpp.decoder": ("Decoder", "Output"),
    "specdecpp.errors": (
        "DataError",
        "HeadError",
        "MissingExtraError",
        "PairError",
        "PairWarning",
        "PromptError",
        "RunnerError",
        "SpecdecError",
        "UnsoundError",
    ),
    "specdecpp.head": ("AcceptanceHead", "Calibration", "HeadCard"),
    "specdecpp.integrations.transformers": ("custom_generate",),
    "specdecpp.metrics": ("Metrics",),
    "specdecpp.loading.pair": ("Pair", "load_pair"),
    "specdecpp.policies": (
        "CostAware",
        "Costs",
        "CumulativeConfidence",
        "Entropy",
        "Fixed",
        "MaxConfidence",
        "NoDraft",
        "Policy",
        "SpecDecPP",
    ),
    "specdecpp.runners": ("EagerRunner", "GGUFRunner", "GraphRunner", "LeanRunner", "NativeRunner", "Runner"),
    "specdecpp.sampling": ("Sampling",),
    "specdecpp.session": ("Piece", "Round"),
    "specdecpp.verify": (
        "BlockVerification",
        "CompareVerification",
        "GreedyVerification",
        "TokenVerification",
        "Verdict",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [  # noqa: RUF022 (grouped by the order of use)
    "load_pair",
    "Pair",
    "Runner",
    "EagerRunner",
    "LeanRunner",
    "NativeRunner",
    "GGUFRunner",
    "GraphRunner",
    "Decoder",
    "Output",
    "Round",
    "Piece",
    "Metrics",
    "Sampling",
    "Policy",
    "NoDraft",
    "Fixed",
    "MaxConfidence",
    "CumulativeConfidence",
    "Entropy",
    "SpecDecPP",
    "CostAware",
    "Costs",
    "AcceptanceHead",
    "HeadCard",
    "Calibration",
    "TokenVerification",
    "BlockVerification",
    "GreedyVerification",
    "CompareVerification",
    "Verdict",
    "custom_generate",
    "SpecdecError",
    "PairError",
    "PairWarning",
    "RunnerError",
    "HeadError",
    "PromptError",
    "DataError",
    "UnsoundError",
    "MissingExtraError",
]


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'specdecpp' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
