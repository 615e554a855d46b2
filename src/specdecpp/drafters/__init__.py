"""Where draft tokens come from beside a draft model: the text itself."""

from specdecpp.drafters.suffix import SuffixDrafter

__all__ = ["SuffixDrafter"]
