"""Triton reads this when it is imported: without a GPU its kernels are interpreted."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
