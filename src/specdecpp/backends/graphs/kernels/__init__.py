"""Kernels in Triton: the layers of a pass, their products, draws and verdicts."""
