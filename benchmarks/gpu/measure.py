"""Measures the CUDA kernels on this machine's GPU, its bandwidth, and the installed peers.

    python -m benchmarks.gpu.measure [--tiny | --few] [--seconds S] [--json FILE]

GB/s count each byte that has to be moved once: the keys and values of the contexts for decode,
reads and writes of a copy, what crosses the link for a swap. Each figure is the median of runs with
an emptied L2 cache, of replayed graphs except for swaps and links; ``us`` excludes the plan, whose
time is ``plan_us``: a step makes it once for all layers. Each result is checked before it is timed.
FILE gets a line of JSON for each row as it comes. A line is printed for each batch, and one
for each target that a case misses; the targets come last, also when the program is interrupted.
``--few`` measures the shapes that say most; ``--tiny`` runs each operation once on a few tokens.
The exit code is 1 when a result was wrong.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.gpu.case import (
    BF16,
    DEVICE,
    E4M3,
    MAX_ERRORS,
    Case,
    Log,
    Settings,
    copy_blocks,
    move_pages,
    random_bytes,
)
from benchmarks.gpu.peers import peers_of
from benchmarks.gpu.timing import bandwidths, cold_seconds

SPLIT: Final = 512  # the data plane's
OF_COPY, OF_READ, OF_LINK = 0.90, 0.93, 0.90
OVER_PEER, OVER_BF16, OVER_ALONE = 1.05, 1.7, 3.0
# Those of decode apply to batches of 16 or more sequences of 4096 or more tokens.
TARGETS: Final = {
    "copy": f"decode at {OF_COPY:.0%} of copy bandwidth",
    "peer": f"decode {OVER_PEER} times as fast as the best peer, or at {OF_READ:.0%} of reads",
    "fp8": f"fp8 decode {OVER_BF16} times as fast as bf16",
    "shared": f"decode over a shared prefix {OVER_ALONE} times as fast as without sharing",
    "copies": f"copies at {OF_COPY:.0%} of copy bandwidth",
    "swaps": f"swaps at {OF_LINK:.0%} of the link",
}
MEMORY_SHARE: Final = 0.3  # of free memory, for one case's pages; peers need twice that again
BLOCK_BYTES: Final = (2 << 20, 128 << 10, 64 << 10, 8 << 10)
PAGE_BYTES: Final = 64 << 10  # of one layer of an 8B model, 16 tokens
COPIED_BYTES: Final = 512 << 20


@dataclass(frozen=True)
class Shape:
    """A batch: ``new`` query tokens of each of ``batch`` sequences of ``context`` tokens, these
    included. The first ``shared`` ones are in blocks that all sequences have.
    """

    batch: int
    context: int
    heads: int = 32
    kv_heads: int = 8
    head: int = 128
    block: int = 16
    kv_dtype: str = "bfloat16"
    new: int = 1
    shared: int = 0

    @property
    def kind(self) -> str:
        return "shared" if self.shared else "decode" if self.new == 1 else "append"

    @property
    def is_held(self) -> bool:
        """Return whether decode of this batch has a target."""
        return self.kind == "decode" and self.batch >= 16 and self.context >= 4096

    def __str__(self) -> str:
        words = f"{self.kind} {self.batch} × {self.context}, {self.kv_dtype}, "
        words += f"heads {self.heads}/{self.kv_heads} of {self.head}, blocks of {self.block}"
        words += f", {self.new} new" if self.new > 1 else ""
        return words + (f", {self.shared} tokens shared" if self.shared else "")

    def case(self) -> Case:
        return Case(
            [(self.new, self.context)] * self.batch,
            heads=(self.heads, self.kv_heads),
            dim=self.head,
            block=self.block,
            dtype=BF16,
            kv_dtype=BF16 if self.kv_dtype == "bfloat16" else E4M3,
            shared=self.shared,
            poisons=False,
        )


def decodes() -> Iterator[Shape]:
    for batch in (16, 64, 256):
        for context in (4096, 8192, 32768):
            yield Shape(batch, context)
    for batch, context in ((16, 8192), (64, 4096)):
        for heads, kv_heads in ((64, 8), (28, 4), (32, 32)):
            yield Shape(batch, context, heads, kv_heads)
        for head in (64, 256):
            yield Shape(batch, context, head=head)
        yield Shape(batch, context, block=64)
    yield Shape(16, 32768, 64, 8, head=64, block=64)
    yield Shape(64, 4096, 28, 4, head=256, block=64)
    for batch in (16, 64):
        yield Shape(batch, 131072)
    for batch in (1, 4):
        for context in (512, 2048, 8192, 32768, 131072):
            yield Shape(batch, context)
    for batch in (16, 64, 256):
        for context in (512, 2048):
            yield Shape(batch, context)
    for batch in (1, 16, 64, 256):  # of one of eight GPUs that share a model
        for context in (4096, 32768):
            yield Shape(batch, context, 8, 1)


def appends() -> Iterator[Shape]:
    for batch in (1, 4):
        yield Shape(batch, 64 + 100_000, new=64)
    for batch, context in ((1, 32768), (16, 4096), (64, 4096)):
        for new in (4, 8):
            yield Shape(batch, new + context, new=new)
    yield Shape(1, 4096, new=4096)
    yield Shape(8, 1024, new=1024)
    yield Shape(8, 256 + 8192, new=256)
    yield Shape(4, 512 + 32768, new=512)
    yield Shape(64, 16 + 4096, new=16)
    for head in (64, 256):
        yield Shape(4, 2048, head=head, new=2048)


# A long document with many questions about it, and a system prompt. Both in whole splits.
SHARED: Final = (Shape(128, 32768 + 256, shared=32768), Shape(16, 8192 + 1024, shared=8192))
FEW: Final = (
    *((batch, context, 1) for batch in (1, 16, 64) for context in (1024, 8192)),
    *((1, 131072, 1), (16, 4096, 1), (64, 4096, 1), (256, 1024, 1), (256, 4096, 1)),
    *((1, 4096, 4096), (8, 1024, 1024), (1, 32768, 32768), (1, 100_000, 64), (16, 4096, 4)),
)
"""Sequences, tokens of each, and how many of these are new."""
TINY: Final = (
    Shape(3, 150, 4, 2, 64),
    Shape(2, 40, 4, 4, 32, 8),
    Shape(2, 90, 4, 2, 32, new=70),
    Shape(3, 130, 2, 1, 32, shared=128),
)


def with_fp8(shapes: Iterator[Shape]) -> Iterator[Shape]:
    """Yield each shape in bf16 and, right after it, in fp8."""
    for shape in shapes:
        for name in ("bfloat16", "float8_e4m3fn"):
            yield replace(shape, kv_dtype=name)


class Measurement:
    """The rows of a run; nothing is started later than ``seconds`` after its start."""

    def __init__(self, log: Log, seconds: float) -> None:
        self.log = log
        self.mets: dict[str, list[bool]] = defaultdict(list)
        """For each target whether the measured cases meet it, in their order."""
        self._end_s = time.monotonic() + seconds
        self._rates: dict[str, float] = {}  # bytes a second
        self._bf16: tuple[Shape | None, float] = None, math.inf  # the last one, and its seconds

    def attempt(self, about: dict[str, Any], work: Callable[[], None], *, is_ours: bool) -> None:
        """Run ``work``. If it raises, or no time is left, note why the case is left out; errors of
        our kernels are wrong results unless memory is short.
        """
        try:
            if time.monotonic() > self._end_s:
                raise TimeoutError("no time left")
            work()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"[:300]
            if is_ours and not isinstance(error, torch.OutOfMemoryError | TimeoutError):
                self.log.check(ok=False, name=about.pop("case"), **about, raised=reason)
            else:
                self.log.add(**about, left_out=reason)
        torch.cuda.empty_cache()

    def attention(self, shape: Shape) -> None:
        """Add a row for a shape, and one for each peer."""
        about = {"case": shape.kind, **asdict(shape)}
        self.attempt(about, partial(self._attention, shape), is_ours=True)

    def _attention(self, shape: Shape) -> None:
        one = 2 * 2 * shape.kv_heads * shape.head * shape.batch * shape.context
        if one > MEMORY_SHARE * torch.cuda.mem_get_info()[0]:
            raise torch.OutOfMemoryError(f"its pages take {one >> 30} GiB")
        case, kind, took = shape.case(), shape.kind, dict[str, float]()
        for name in (kind, *(["shared/alone"] if shape.shared else [])):
            case.prepare(share=name == "shared")
            plan = case.plan()
            case.out.fill_(math.nan)
            case.attend(plan, lse=True)
            torch.cuda.synchronize()
            error, whole = case.errors()[0], bool(case.out.isfinite().all())
            ok = error < MAX_ERRORS[BF16] and whole and int(case.faults.item()) == 0
            about = {**asdict(shape), "error": error}
            if not ok:
                self.log.check(name, ok, **about)
                continue
            about["plan_us"] = 1e6 * cold_seconds(case.plan)
            took[name] = self._time(name, case, partial(case.attend, plan), about)
        peers: dict[str, float] = {}
        for name, make in peers_of(case).items():
            about = {"case": f"{kind}/{name}", **asdict(shape)}
            work = partial(self._peer, about, case, make, peers)
            self.attempt(about, work, is_ours=False)
        if kind in took:
            self._judge(shape, case, took, peers)
        elif shape.is_held or shape.shared:  # a wrong result meets no target
            is_bf16 = shape.kv_dtype == "bfloat16"
            for target in (
                ("shared",) if shape.shared else ("copy", "peer") if is_bf16 else ("fp8",)
            ):
                self.mets[target].append(False)

    def _peer(
        self, about: dict[str, Any], case: Case, make: Callable[[], Any], peers: dict[str, float]
    ) -> None:
        call = make()
        error = case.errors(call())[0]
        if not error <= MAX_ERRORS[BF16]:
            raise ValueError(f"its result has a relative error of {error:.3g}")
        more = {name: value for name, value in about.items() if name != "case"}
        peers[about["case"]] = self._time(about["case"], case, call, more | {"error": error})

    def _time(
        self, name: str, case: Case, call: Callable[[], object], about: dict[str, Any]
    ) -> float:
        took = cold_seconds(call)
        rates = {"gb_s": case.kv_bytes / took / 1e9, "tflops": case.flops / took / 1e12}
        self.log.add(case=name, **about, us=took * 1e6, **rates)
        return took

    def _judge(
        self, shape: Shape, case: Case, took: dict[str, float], peers: dict[str, float]
    ) -> None:
        """Print a batch's line, and compare it with its targets."""
        ours = took[shape.kind]
        of_copy, of_read = (case.kv_bytes / ours / self._rates[n] for n in ("copy", "read"))
        said = f"{shape}: {ours * 1e6:.1f} us, {of_copy:.0%} of copy, {of_read:.0%} of read"
        said += f", {case.flops / ours / 1e12:.0f} TFLOP/s"
        over_peer = 0.0
        if peers:
            best = min(peers, key=lambda name: peers[name])
            over_peer = peers[best] / ours
            said += f", {over_peer:.2f} x {best}"
        print(said, flush=True)
        if shape.shared and "shared/alone" in took:
            self._compare("shared", shape, took["shared/alone"] / ours, OVER_ALONE)
        if shape.kv_dtype == "bfloat16":
            self._bf16 = shape, ours
        if not shape.is_held:
            return
        if shape.kv_dtype != "bfloat16":
            twin, bf16_s = self._bf16
            if twin == replace(shape, kv_dtype="bfloat16"):
                self._compare("fp8", shape, bf16_s / ours, OVER_BF16)
            return
        self._compare("copy", shape, of_copy, OF_COPY)
        # In shares of what each would have to be: either is enough.
        self._compare("peer", shape, max(over_peer / OVER_PEER, of_read / OF_READ), 1.0)

    def _compare(self, target: str, case: object, reached: float, least: float) -> None:
        self.mets[target].append(reached >= least)
        if reached < least:
            print(f"MISSED {TARGETS[target]}: {case}: {reached:.2f} of {least}", flush=True)

    def copies(self, block_bytes: int) -> None:
        """Add rows for copies of blocks in the pool, to the canonical order and back, and swaps."""
        num = 5 if Settings.tiny else max(64, COPIED_BYTES // 2 // block_bytes)
        about = {"block_bytes": block_bytes, "num_blocks": num}
        self.attempt(
            {"case": "copies", **about}, partial(self._inside, block_bytes, num), is_ours=True
        )
        with torch.cuda.stream(torch.cuda.Stream()):  # as in the data plane
            self.attempt(
                {"case": "swaps", **about}, partial(self._swaps, block_bytes, num), is_ours=True
            )

    def _inside(self, block_bytes: int, num: int) -> None:
        page_bytes = min(block_bytes, PAGE_BYTES)
        pool = random_bytes(2 * num + 1, block_bytes)
        ids = torch.randperm(2 * num)
        first, second = ids[:num].contiguous(), ids[num:].contiguous()
        there = first.to(DEVICE), second.to(DEVICE)
        pages = pool.view(len(pool), -1, page_bytes)
        canonical = torch.empty_like(pages[:num].transpose(0, 1).contiguous())
        pairs = torch.stack((first, second), dim=1)
        for name, call in (
            ("copy_blocks", partial(copy_blocks, pool, pool, pairs)),
            ("gather_blocks", partial(move_pages, pages, first, canonical, back=False)),
            ("scatter_blocks", partial(move_pages, pages, second, canonical, back=True)),
        ):
            if name != "gather_blocks":
                pool[there[1]] = 0
            call()
            right = pages[there[0]]
            made = canonical.transpose(0, 1) if name == "gather_blocks" else pages[there[1]]
            self._moved(name, call, torch.equal(made, right), block_bytes, 2 * num * block_bytes)

    def _swaps(self, block_bytes: int, num: int) -> None:
        pool = random_bytes(2 * num, block_bytes)
        host = random_bytes(num, block_bytes, on_host=True)
        for order, ids in (
            ("scattered", torch.randperm(2 * num)[:num]),
            ("runs", torch.arange(num)),
        ):
            out = torch.stack((ids, torch.arange(num)), dim=1).contiguous()
            before, there = pool[ids.to(DEVICE)].cpu(), ids.to(DEVICE)
            call = partial(copy_blocks, pool, host, out, swap=True)
            call()
            torch.cuda.synchronize()
            size = num * block_bytes
            self._moved("swap_out", call, torch.equal(host, before), block_bytes, size, order)
            pool[there] = 0
            back = partial(copy_blocks, host, pool, out.flip(1).contiguous(), swap=True)
            back()
            torch.cuda.synchronize()
            right = torch.equal(pool[there].cpu(), before)
            self._moved("swap_in", back, right, block_bytes, size, order)

    def _moved(
        self,
        name: str,
        call: Callable[[], object],
        ok: bool,
        block_bytes: int,
        num_bytes: int,
        order: str = "scattered",
    ) -> None:
        about = {"block_bytes": block_bytes, "order": order}
        is_swap = name.startswith("swap")
        target = "swaps" if is_swap else "copies"
        if not ok:
            self.log.check(name, ok, **about)
            self.mets[target].append(False)
            return
        took = cold_seconds(call, in_graph=not is_swap)  # which may wait
        self.log.add(case=name, **about, us=took * 1e6, gb_s=num_bytes / took / 1e9)
        whole = {"swap_out": "link_out", "swap_in": "link_in"}.get(name, "copy")
        case = f"{name}, {order} blocks of {block_bytes >> 10} KiB"
        share = num_bytes / took / self._rates[whole]
        self._compare(target, case, share, OF_LINK if is_swap else OF_COPY)

    def bandwidths(self) -> None:
        """Add the bandwidths of this device and of its link, the base of all comparisons."""
        copy, read = bandwidths()
        there = random_bytes(1, 1 << 20 if Settings.tiny else 1 << 30)
        host = random_bytes(1, there.nbytes, on_host=True)
        out = cold_seconds(lambda: host.copy_(there, non_blocking=True), in_graph=False)
        into = cold_seconds(lambda: there.copy_(host, non_blocking=True), in_graph=False)
        rates = {"copy": copy, "read": read, "link_out": there.nbytes / out}
        rates["link_in"] = there.nbytes / into
        for name, rate in rates.items():
            self._rates[name] = rate
            self.log.add(case=f"{name} bandwidth", gb_s=rate / 1e9)
        print(f"copy {copy / 1e9:.0f} GB/s (read and written), read {read / 1e9:.0f} GB/s")

    def said(self) -> Iterator[str]:
        """Yield a line for each target."""
        for target, text in TARGETS.items():
            mets = self.mets[target]
            word = "not measured" if not mets else "met" if all(mets) else "missed"
            yield f"{word}: {text} ({sum(mets)} of {len(mets)} cases)"


def measure(m: Measurement, shapes: Sequence[Shape]) -> None:
    """Measure everything, the most important first, in case the time runs out."""
    m.bandwidths()
    for block_bytes in (4 << 10, 64 << 10) if Settings.tiny else BLOCK_BYTES:
        m.copies(block_bytes)
    for shape in shapes:
        m.attention(shape)


def main(words: Sequence[str] | None = None) -> int:
    """Measure, save, and print which targets are met."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.measure")
    parser.add_argument("--tiny", action="store_true", help="once, on a few tokens")
    parser.add_argument("--few", action="store_true", help="the shapes that say most")
    parser.add_argument("--seconds", type=float, default=280.0, help="start nothing after this")
    parser.add_argument("--json", type=Path, help="file to add the rows to")
    given = parser.parse_args(words)
    Settings.tiny, Settings.split = given.tiny, 64 if given.tiny else SPLIT
    log = Log(given.json)
    log.machine()
    every = list(with_fp8(decodes()))
    held = [shape for shape in every if shape.is_held]
    others = [shape for shape in every if not shape.is_held]
    few = with_fp8(Shape(batch, context, new=new) for batch, context, new in FEW)
    shapes = chain(held, SHARED, with_fp8(appends()), others)
    m = Measurement(log, given.seconds)
    try:
        measure(m, list(TINY if given.tiny else few if given.few else shapes))
    except KeyboardInterrupt:
        print("interrupted")
    if not given.tiny:
        print(*m.said(), sep="\n")
    print(f"wrong results: {len(log.wrong)}; rows: {len(log.rows)}")
    return 1 if log.wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
