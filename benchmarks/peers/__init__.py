"""Ours beside the engines a person would pick instead, on the same weights: `make bench-peers`.

    environments  what each engine needs, made under .engines/ where it is not there
    pairs         the three pairs as float32 checkpoints, their GGUF and OpenVINO forms, prompts, the target's own greedy text
    plan          which settings of which engine
    run           one worker process per engine, cycles interleaved over all settings, one at work at a time
    rows, report  medians and ratios; JSON, markdown, SVG

Modules that workers import stay with the standard library, because each engine lives in an environment of its own.
"""
