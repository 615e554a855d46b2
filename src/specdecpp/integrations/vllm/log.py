"""The plugin's log, below vLLM's own, so that an engine shows it as it shows its own lines."""

import logging

logger = logging.getLogger("vllm.specdecpp")
