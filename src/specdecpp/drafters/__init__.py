"""Where candidates come from when no model drafts them: the text itself (`suffix.py`)."""

from specdecpp.drafters.suffix import SuffixDrafter

__all__ = ["SuffixDrafter"]
