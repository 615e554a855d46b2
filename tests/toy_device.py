"""A device that is none, to find tensors that were made without one: `test_distil_kept.py` distils on it in a process of its
own, since torch keeps a device once it is registered.

    python toy_device.py FOLDER     # which has target/, target.gguf and prompts.jsonl

Its tensors lie in the machine's memory and are computed there. What a GPU refuses is refused: a tensor of numbers on the CPU
beside one on the device, unless it is copied or names rows of one that is there. torch.Generator is the CPU's.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "toy"
COPIES = ("aten::copy_", "aten::_to_copy", "aten::to")
INDICES = ("aten::index", "aten::index_put", "aten::index_put_")


class Module:
    """What torch asks about a device."""

    def is_available(self) -> bool:
        return True

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


class There(torch.Tensor):
    """A tensor on the device; `here` is what it holds."""

    here: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, here: torch.Tensor) -> "There":
        like = {"dtype": here.dtype, "device": torch.device(NAME, 0), "storage_offset": here.storage_offset()}
        self = torch.Tensor._make_wrapper_subclass(cls, here.shape, strides=here.stride(), **like)
        self.here = here
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})

    def tolist(self) -> Any:
        return self.here.tolist()

    def untyped_storage(self) -> Any:
        return self.here.untyped_storage()

    def data_ptr(self) -> int:
        return self.here.data_ptr()

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        made = self.detach().clone()
        if isinstance(self, torch.nn.Parameter):
            made = torch.nn.Parameter(made, self.requires_grad)
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, protocol: int) -> Any:
        return self.cpu().__reduce_ex__(protocol)


class Toy(TorchDispatchMode):
    """Work on the device within this block."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def run(func: Any, args: Any, kwargs: Any) -> Any:
    flat, spec = tree_flatten((args, kwargs))
    check(func, flat)
    asked = [x for x in flat if isinstance(x, torch.device)]
    is_there = asked[0].type == NAME if asked else any(isinstance(x, There) for x in flat)
    whose = {id(x.here): x for x in flat if isinstance(x, There)}
    inputs = {id(x) for x in flat if isinstance(x, torch.Tensor)}
    if func is torch.ops.aten._fused_sdp_choice.default:
        return 0
    args, kwargs = tree_unflatten([local(x) for x in flat], spec)
    out, out_spec = tree_flatten(func(*args, **kwargs))

    def placed(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        if not is_there:
            return x.clone() if id(x) in whose else x
        return whose[id(x)] if id(x) in whose else There(x.clone() if id(x) in inputs else x)

    return tree_unflatten([placed(x) for x in out], out_spec)


def local(x: Any) -> Any:
    if isinstance(x, torch.device) and x.type == NAME:
        return torch.device("cpu")
    return x.here if isinstance(x, There) else x


def empty_there(size: Any, stride: Any, dtype: Any = None, **where: Any) -> There:
    return There(torch.empty_strided(size, stride, dtype=dtype))


def copied_there(source: Any, target: Any, non_blocking: bool = False) -> Any:
    local(target).copy_(local(source))
    return target


def check(func: Any, flat: list[Any]) -> None:
    """Raise `RuntimeError` as CUDA does."""
    tensors = [x for x in flat if isinstance(x, torch.Tensor)]
    name = func._schema.name
    if name in COPIES or not any(isinstance(x, There) for x in tensors):
        return
    if name in INDICES and isinstance(tensors[0], There):
        return
    if any(x.ndim and not isinstance(x, There) for x in tensors):
        places = [(str(x.device), tuple(x.shape)) for x in tensors]
        raise RuntimeError(f"{name}: expected all tensors to be on the same device, found {places}")


class Generator:
    """The CPU's, whatever device is asked for."""

    MADE = torch.Generator

    def __new__(cls, device: Any = "cpu") -> Any:
        return cls.MADE()


def main() -> None:
    _setup_privateuseone_for_python_backend(NAME, backend_module=Module())
    outside = torch.library.Library("aten", "IMPL")  # for `torch.tensor`, which no mode sees
    outside.impl("empty_strided", empty_there, "PrivateUse1")
    outside.impl("_copy_from", copied_there, "PrivateUse1")
    torch.Generator = Generator  # pyright: ignore
    torch.inference_mode = torch.no_grad  # pyright: ignore  # what is made in it cannot be a view of what is not, wrapped so
    torch.is_inference_mode_enabled = lambda: not torch.is_grad_enabled()  # pyright: ignore
    from test_distil import plan_of

    from specdecpp.distillation.run import distil

    folder = Path(sys.argv[1])
    plan = replace(plan_of(folder, folder), device=NAME, tokens=600)
    with Toy():
        for name, shape in (("target", None), ("target.gguf", plan.shape)):
            card = distil(replace(plan, target=str(folder / name), out=folder / f"of {name}", shape=shape))
            print(*card["draft"]["files"])


if __name__ == "__main__":
    main()
