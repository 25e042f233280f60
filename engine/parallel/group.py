"""Communication between one engine's processes: sums of tensors, and messages of rank 0.

Gloo's process group, on the loopback interface, with a file to meet in: nothing listens on others.
Where each rank has a GPU of its own, sums are by NCCL, and tensors stay on the GPUs. Every call is
made by all ranks in the same order. When a rank dies the others' calls raise.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
from torch._C import _distributed_c10d

from kvplane.errors import InternalError

# These parts of torch.distributed are missing in its stubs.
_C10D: Final[Any] = _distributed_c10d
_LONG: Final = timedelta(days=365)


class RankGroup:
    """Connects the processes of one engine: this one is ``rank`` of ``num_ranks``. ``timeout_s``
    bounds the rendezvous, each all-reduce, and each send by rank 0. Receives have no timeout: they
    fail when gloo notices that a peer has died.
    """

    def __init__(
        self,
        meeting: Path,
        rank: int,
        num_ranks: int,
        timeout_s: float,
        *,
        gpu: torch.device | None = None,
    ) -> None:
        """Wait for the other ranks at the file ``meeting``, which need not exist. ``gpu``: this
        rank's, if no other rank has the same. Raises InternalError when they do not come.
        """
        self.rank = rank
        self.num_ranks = num_ranks
        self._timeout = timedelta(seconds=timeout_s)
        gloo = _C10D.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        options._timeout = self._timeout
        with _typed():
            store = _C10D.FileStore(str(meeting), num_ranks)
            store.set_timeout(self._timeout)
            self._gloo = gloo(store, rank, num_ranks, options)
            self._nccl = None if gpu is None else _nccl(store, rank, num_ranks, timeout_s)

    def add_up(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over all ranks, in place, to the same bits on each."""
        with _typed():
            if self._nccl is not None:
                self._nccl.allreduce([tensor]).wait()  # the stream waits, not this thread
                return tensor
            there = tensor.cpu()  # the same tensor on the CPU
            self._gloo.allreduce([there]).wait()
        return tensor if there is tensor else tensor.copy_(there)

    def tell(self, message: bytes = b"") -> bytes:
        """Send rank 0's message to all ranks; each returns it. Other ranks' arguments are
        ignored.
        """
        size = torch.tensor([len(message)])
        self._broadcast(size)
        data = torch.empty(int(size), dtype=torch.uint8)
        if self.rank == 0 and message:
            data = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        if len(data):
            self._broadcast(data)
        return data.numpy().tobytes()

    def gather(self, message: bytes) -> list[bytes]:
        """Collect one message from every rank; returns them in the order of ranks."""
        sizes = torch.cat(self._all(torch.tensor([len(message)]))).tolist()
        padded = torch.zeros(max(*sizes, 1), dtype=torch.uint8)
        if message:
            padded[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        messages = self._all(padded)
        return [data[:size].numpy().tobytes() for data, size in zip(messages, sizes, strict=True)]

    def _broadcast(self, tensor: torch.Tensor) -> None:
        options = _C10D.BroadcastOptions()
        options.rootRank = 0
        # Gloo does not always notice that a receiver has ended.
        options.timeout = self._timeout if self.rank == 0 else _LONG
        with _typed():
            self._gloo.broadcast([tensor], options).wait()

    def _all(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        of_ranks = [torch.empty_like(tensor) for _ in range(self.num_ranks)]
        options = _C10D.AllgatherOptions()
        options.timeout = _LONG
        with _typed():
            self._gloo.allgather([of_ranks], [tensor], options).wait()
        return of_ranks


def _nccl(store: Any, rank: int, num_ranks: int, timeout_s: float) -> Any:
    """Return NCCL's process group. It begins to communicate at the first sum, on the GPU of that
    tensor.
    """
    options = _C10D.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    own = _C10D.PrefixStore("nccl", store)
    return _C10D.ProcessGroupNCCL(own, rank, num_ranks, options)


@contextmanager
def _typed() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise InternalError(
            "a process of this engine has ended or does not answer: start the engine again "
            f"({str(error).splitlines()[0]})"
        ) from error
