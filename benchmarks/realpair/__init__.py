"""Parts of `benchmarks/real_pair.py`."""
