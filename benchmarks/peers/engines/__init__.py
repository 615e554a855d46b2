"""One worker per engine: `python -m peers.engines.NAME` speaks JSON lines (see `peers.protocol`)."""
