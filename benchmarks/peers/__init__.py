"""Ours beside the engines a person would pick instead, on the same weights.

    environments  what each engine needs, made under .engines/ where it is not there (`make bench-peers`)
    smollm2       the pair `smollm2` in the forms that they read; `export` makes those of OpenVINO
    pool          one worker process for each engine, one at work at a time (`engines`, `protocol`)
    cells, batch  one request after another, and many at once

Modules that workers import stay with the standard library, because each engine lives in an environment of its own.
"""
