"""Known families on a GPU: passes and steps as CUDA graphs.

    model    passes over a static cache           engine     a step: draft steps queued, flags read, one verdict
    cache    fixed addresses, and what is         steps      a draft step and a verdict as recorded work
             recorded over them                   verdicts   acceptance tests by torch's operations
    layers   a pass by `kernels`                  launches   draws and verdicts by `kernels`
    tiling   how products are cut                 slots      passes that several sequences share
    trees    children of nodes and their tests,   together   a step of several requests
             for the lab

`kernels/` is Triton. Without it passes and steps are recorded operations of torch, which tests run on a CPU.
"""
