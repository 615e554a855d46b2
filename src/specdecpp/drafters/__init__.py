"""Where candidates come from beside a draft model: the text itself (`suffix.py`), heads on a draft's state (`parallel.py`)."""

from specdecpp.drafters.parallel import ParallelDraft, ParallelHeads
from specdecpp.drafters.suffix import SuffixDrafter

__all__ = ["ParallelDraft", "ParallelHeads", "SuffixDrafter"]
