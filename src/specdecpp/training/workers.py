"""Shards made by the workers of a Ray cluster: several processes on this machine, or several machines.

A task is a shard; what it is made of goes out and the bytes of its files come back, so that the machines need no common disk.
A worker keeps its models from task to task. Ray runs a task again whose worker was killed, which costs its time only: the
bytes depend on the number of the shard alone. Labels are spread so (`Labels`), and the text that a draft learns from
(`distillation.writing`).
"""

import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch

from specdecpp.errors import DataError, MissingExtraError, PairError, first_line
from specdecpp.loading.pair import Pair
from specdecpp.training import jobs
from specdecpp.training.jobs import Question, ShardWork
from specdecpp.training.recipe import PairPlan

LOCAL = "local"
RETRIES = 3
"""How often a shard is tried again after its worker was killed."""
_CONNECT_S = 10.0
_TOKEN = (
    "A cluster whose first machine has a token (~/.ray/auth_token) asks everybody for it: bring that file here and set "
    "RAY_AUTH_MODE=token, which is not the default where one joins. Python and Ray must have the versions of the cluster."
)
Files = TypeVar("Files", covariant=True)
Items = TypeVar("Items", contravariant=True)


@runtime_checkable
class Maker(Protocol[Items, Files]):
    """The maker of a shard; it travels to the workers, so it says what to load and holds no model."""

    @property
    def device(self) -> str | None: ...

    def __call__(self, index: int, items: Items) -> tuple[Files, int]:
        """(The bytes of the shard's files, how many tokens were sampled.)"""
        ...


def spread(
    maker: Maker[Items, Files], missing: Mapping[int, Items], *, address: str, threads: int
) -> Iterator[tuple[int, Files, int]]:
    """(number, files, tokens sampled) of each shard, in the order in which they are finished.

    `address` is "local" or that of a cluster, as `ray.init` takes it. A task reserves `threads` processors, and a GPU where the
    maker's device is one. Raises `MissingExtraError` without Ray, and `DataError` when the cluster cannot be reached or kills a
    shard again and again.
    """
    ray = _ray()
    is_ours = not ray.is_initialized()
    if is_ours:
        _connect(ray, address)
    try:
        num_cpus = ray.cluster_resources().get("CPU", 0)
        if num_cpus < threads:
            raise DataError(
                f"a shard is made with {threads} threads and the Ray cluster has {num_cpus:g} processors. Begin with fewer "
                "threads (OMP_NUM_THREADS), or start a larger cluster."
            )
        num_gpus = 1 if maker.device is not None and maker.device.startswith("cuda") else 0
        task = ray.remote(num_cpus=threads, num_gpus=num_gpus, max_retries=RETRIES)(_make)
        room = 2 * int(num_cpus / threads)
        waiting, running = list(missing.items()), []
        while waiting or running:
            while waiting and len(running) < room:  # what is finished and not yet fetched fills Ray's memory
                running.append(task.remote(maker, threads, *waiting.pop(0)))
            finished, running = ray.wait(running, num_returns=1)
            yield _fetched(ray, finished[0])
    finally:
        if is_ours:
            ray.shutdown()


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError(
            "spreading shards over workers needs the package ray. Install it with: pip install 'specdecpp[ray]'"
        ) from error
    return ray


def _connect(ray: Any, address: str) -> None:
    host, _, port = address.rpartition("/")[2].rpartition(":")
    try:
        if port.isdigit():  # Ray itself tries for minutes
            socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except OSError as error:
        raise DataError(
            f"nothing answers at {address!r} ({error}). Start a Ray cluster with `ray start --head`, or say --ray {LOCAL}."
        ) from error
    try:
        ray.init(address, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    except Exception as error:  # Ray has many ways to fail to connect
        if address == LOCAL:
            raise DataError(f"Ray could not be started ({_sentence(error)}).") from error
        raise DataError(f"the Ray cluster at {address!r} could not be joined ({_sentence(error)}). {_TOKEN}") from error


def _sentence(error: Exception) -> str:
    """The first one of a message of Ray's, which are long."""
    return first_line(error).partition(". ")[0].rstrip(".")


def _fetched(ray: Any, reference: Any) -> tuple[int, Any, int]:
    """A task's result; an error in it as if it had been raised here."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    except ray.exceptions.RayError as error:
        raise DataError(
            f"a shard was given up after {RETRIES} more tries: {_sentence(error)}. Workers that are killed "
            "often lack memory. Finished shards are kept; run the same command again."
        ) from error


def _make(maker: Maker[Items, Files], threads: int, index: int, items: Items) -> tuple[int, Files, int]:
    """In a worker: one shard, with as many threads as it was begun with."""
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    return index, *maker(index, items)


@dataclass(frozen=True, kw_only=True)
class Labels:
    """Makes the shards of a collection. Raises `PairError` where the pair is not the one that it was begun with."""

    pair: PairPlan
    work: ShardWork

    @property
    def device(self) -> str | None:
        return self.pair.device

    def __call__(self, index: int, items: Sequence[Question]) -> tuple[tuple[bytes, bytes], int]:
        num_tokens = 0

        def tick(num: int) -> None:
            nonlocal num_tokens
            num_tokens += num

        pair, of = _pair(self.pair), self.work.provenance["pair"]
        if (pair.target_fingerprint, pair.draft_fingerprint) != (of["target"], of["draft"]):
            raise PairError(
                f"a worker loaded {pair.target_name} and {pair.draft_name} and they are other models than those the collection "
                "was begun with. Give the workers the same files."
            )
        return jobs.make(pair, self.work, index, items, tick=tick), num_tokens


@cache
def _pair(plan: PairPlan) -> Pair:
    """The pair of this process."""
    return plan.load()
