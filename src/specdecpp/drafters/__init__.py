"""Sources of draft tokens other than a model: the text itself."""

from specdecpp.drafters.suffix import SuffixDrafter

__all__ = ["SuffixDrafter"]
