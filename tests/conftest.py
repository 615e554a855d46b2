"""Settings shared by all tests: property tests are reproducible and say nothing about absolute time."""

from hypothesis import settings

settings.register_profile("specdecpp", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("specdecpp")
