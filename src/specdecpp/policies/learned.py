"""A rule that is trained but asks no hidden state: a tiny network on what the draft says about itself anyway.

The features are those of C2T (Huo et al. 2025, arXiv 2502.13652), for a chain; DISCO (Mamou et al. 2024, arXiv 2405.04304)
asks a classifier likewise. `training.tiny` fits the network. It is so small that plain Python evaluates it fastest.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdecpp import machine
from specdecpp.errors import HeadError
from specdecpp.policies.protocol import Policy, check_probability

if TYPE_CHECKING:
    from specdecpp.policies.protocol import Candidates

FEATURES = ("log_q", "entropy", "depth")
"""log of the product of q over the round and the entropy of q at the last candidate, in nats; the number of candidates."""


@dataclass(frozen=True, kw_only=True)
class Net:
    """P(all candidates so far are accepted) = sigmoid(bias + output . tanh(biases + weights x)), x the three features.

    >>> net = Net(weights=((1.0, 0.0, 0.0),), biases=(0.0,), output=(2.0,), bias=0.5)
    >>> round(net(0.0, 1.0, 1.0), 3)
    0.622
    """

    weights: tuple[tuple[float, ...], ...]
    biases: tuple[float, ...]
    output: tuple[float, ...]
    bias: float
    notes: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """Provenance and figures: labels, losses, seeds."""
    source: str | None = field(default=None, compare=False, repr=False)
    """The file it was read from."""

    def __post_init__(self) -> None:
        sizes = {len(self.weights), len(self.biases), len(self.output)}
        if len(sizes) != 1 or any(len(row) != len(FEATURES) for row in self.weights):
            raise HeadError(
                f"a net has a row of {len(FEATURES)} weights, a bias and an output weight for each unit, got rows of "
                f"{sorted({len(row) for row in self.weights})} for {len(self.weights)}, {len(self.biases)} and "
                f"{len(self.output)} units"
            )
        numbers = [*(w for row in self.weights for w in row), *self.biases, *self.output, self.bias]
        if not all(map(math.isfinite, numbers)):
            raise HeadError("a net needs finite weights")

    def __call__(self, log_q: float, entropy: float, depth: float) -> float:
        """P(all accepted) from the three features."""
        logit = self.bias
        for (a, b, c), bias, out in zip(self.weights, self.biases, self.output, strict=True):
            logit += out * math.tanh(bias + a * log_q + b * entropy + c * depth)
        return 1 / (1 + math.exp(-min(max(logit, -700.0), 700.0)))

    def save(self, path: str | Path) -> None:
        """Write it as JSON, whole or not at all."""

        names = ("weights", "biases", "output", "bias", "notes")
        machine.write(path, json.dumps({name: getattr(self, name) for name in names}, indent=1) + "\n")

    @classmethod
    def from_pretrained(cls, path: str | Path) -> "Net":
        """Read what `save` wrote. Raises `HeadError` when nothing is there or the file is not a net."""
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
            return cls(
                weights=tuple(tuple(map(float, row)) for row in found["weights"]),
                biases=tuple(map(float, found["biases"])),
                output=tuple(map(float, found["output"])),
                bias=float(found["bias"]),
                notes=dict(found.get("notes", {})),
                source=str(path),
            )
        except HeadError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise HeadError(
                f"{path} does not hold a readable net ({type(error).__name__}: {error}). Train one with "
                "specdecpp.training.tiny and write it with save."
            ) from error


@dataclass(frozen=True, kw_only=True)
class Classifier(Policy):
    """Stop once a small trained network gives all candidates so far a chance below the threshold (default 0.4).

    MLP(prod q, entropy, depth) < t, with t between 0.3 and 0.5 in C2T. It costs as little as `CumulativeConfidence` and knows
    what that does not: how far q can be trusted on this pair, and how entropy and depth change that.

    >>> policy = Classifier(net=Net.from_pretrained("net.json"))                                  # doctest: +SKIP
    """

    net: Net
    threshold: float = 0.4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_probability("Classifier.threshold", self.threshold)

    def stop(self, draft: "Candidates", memory: Any) -> str | None:
        if not draft.num_tokens:
            return None
        log_q = math.log(max(draft.cumulative_confidence, 1e-30))
        if (chance := self.net(log_q, draft.entropy(-1), float(draft.num_tokens))) < self.threshold:
            return f"P(all accepted) = {chance:.2f} < {self.threshold:g}"
        return None
