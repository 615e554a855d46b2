"""Settings shared by all tests: property tests are reproducible and say nothing about absolute time; no test asks a hub."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers reads it

from hypothesis import settings

settings.register_profile("specdecpp", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("specdecpp")
