"""What kvplane makes of each causal type that transformers has, on tiny random models.

``python -m tests.models.census`` examines all of them, each in a process of its own because some
fail hard, and writes the table of ``docs/reference/models.md``. With names it prints their rows.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import re
import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import torch
import transformers
from transformers import PreTrainedModel

from kvplane.attention_options import AttentionOptions
from kvplane.errors import KvplaneError
from kvplane.layout import STATE, LayerGroup
from kvplane.models.model_layers import layer_groups
from kvplane.runtime.probe_planes import ProbePlanes
from kvplane.transformers import attention
from kvplane.transformers.models import adapters
from kvplane.transformers.models.packed import packed_logits
from kvplane.transformers.models.probe import probe, states_of
from kvplane.transformers.states import StateCache, States
from tests.models.tiny_models import TYPES, VOCABULARY, tiny_model

DOCUMENT: Final = Path(__file__).resolve().parents[2] / "docs" / "reference" / "models.md"
EXACT, REFUSED, NOT_RUN = "exact", "refused", "not run"
_LENGTHS: Final = (37, 21, 30)
_PASSES: Final = (
    ((0, 0, 20), (1, 0, 5), (2, 0, 1)),
    ((2, 1, 8), (1, 5, 16), (0, 20, 1)),
    ((0, 21, 16), (2, 9, 21)),
)
_TOLERANCE: Final = 1e-3
"""Of a logit, in standard deviations of the logits. Float32 leaves about 1e-5."""
_MATTERS: Final = 0.05
"""The least change of some logit, in the same unit, when attention gives zeros."""
_DIFFERS: Final = "other logits"
_TIME_LIMIT_S: Final = 120
_MEMORY_BYTES: Final = 12 << 30


_WHY: Final = {
    "blt": "several transformers, over bytes and over patches of them",
    "cpmant": "adds biases of relative positions to its scores",
    "doge": "a learned gate chooses the keys of each token",
    "gemma4_assistant": "a draft model, which attends to another model's keys",
    "gemma4_unified_assistant": "a draft model, which attends to another model's keys",
    "llama4": "a token sees its chunk alone, which no window expresses",
    "llama4_text": "a token sees its chunk alone, which no window expresses",
    "musicgen": "several codebooks have a token at each position",
    "musicgen_melody": "several codebooks have a token at each position",
    "openai-gpt": "takes no cache",
    "prophetnet": "adds biases of relative positions to its scores",
    "reformer": "attention by hashes and within chunks",
    "roformer": "applies rotary positions inside of its own attention",
    "rwkv": "no attention",
    "xlm": "sees tokens in both directions, unless its config is causal",
    "xlnet": "takes no cache",
    "xlstm": "no attention",
}
"""Why a type cannot be served, where the error's text, which follows, does not tell it."""


@dataclass(frozen=True, slots=True)
class Row:
    """A type's line in the table. ``note``: what it needs, or why it is refused."""

    model_type: str
    verdict: str
    note: str

    def __str__(self) -> str:
        return f"| {self.model_type} | {self.verdict} | {self.note} |"


@dataclass
class Observer:
    """Passes attention on to ``planes``, or gives zeros, and remembers what it was asked for."""

    planes: ProbePlanes
    is_zero: bool = False
    needs: dict[str, None] = field(default_factory=dict)

    @property
    def latent_layers(self) -> frozenset[int]:
        return self.planes.latent_layers

    def layer(
        self,
        index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None,
        *,
        options: AttentionOptions,
    ) -> torch.Tensor:
        for name, is_needed in {
            "sliding window": options.sliding_window_tokens,
            "soft cap": options.logit_soft_cap,
            "sinks": options.sinks,
            "ALiBi": options.alibi_slopes,
            "latents": value is None,
            "V narrower than K": value is not None and value.shape[-1] < key.shape[-1],
        }.items():
            if is_needed:
                self.needs[name] = None
        out = self.planes.layer(index, query, key, value, options=options)
        return torch.zeros_like(out) if self.is_zero else out


def examine(model_type: str) -> Row:
    """Build, probe and check a type. Raises AssertionError where the probe and the check of this
    file disagree, and where attention does not matter.
    """
    try:
        model = tiny_model(model_type)
    except Exception as error:
        reason = str(error).splitlines()[0]
        return Row(model_type, NOT_RUN, f"transformers cannot build it: {reason}")
    try:
        adapters.adapt(model)
        groups = probe(model)
    except KvplaneError as error:
        where = f"{error.field} " if error.message.startswith("must") else ""
        reason = _plain(f"{where}{error.message}")
        why = _WHY.get(model_type)
        return Row(model_type, REFUSED, f"{why} ({reason})" if why else reason)
    needs = check_exact(model, groups)
    groups = tuple(group for group in groups if group.cache_kind != STATE)
    if "latents" in needs:  # their keys and values can be kept instead
        check_exact(model, probe(model, latent=False))
    if len(groups) > 1:
        needs.append("several layer groups")
    if groups != layer_groups(model.config):
        needs.append("other shapes than its config says")
    if adapters.is_adapted(model):
        needs.append("an adapter of ours")
    return Row(model_type, EXACT, ", ".join(needs))


def check_exact(model: PreTrainedModel, groups: Sequence[LayerGroup]) -> list[str]:
    """Three sequences in three passes, against eager attention of each alone; returns what was
    needed of attention.
    """
    generator = torch.Generator().manual_seed(7)
    tokens = [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in _LENGTHS]
    wanted = _eager(model, tokens)
    groups = [group for group in groups if group.cache_kind != STATE]
    observer = Observer(ProbePlanes(groups, "float32", _LENGTHS))
    off = float((_through(model, tokens, observer) - wanted).abs().max() / wanted.std())
    assert off <= _TOLERANCE, f"{model.config.model_type}: logits are {off:.2g} deviations off"
    zero = Observer(ProbePlanes(groups, "float32", _LENGTHS), is_zero=True)
    moved = float((_through(model, tokens, zero) - wanted).abs().max() / wanted.std())
    assert moved >= _MATTERS, f"{model.config.model_type}: attention moves logits by {moved:.2g}"
    return list(observer.needs)


def _eager(model: PreTrainedModel, tokens: Sequence[list[int]]) -> torch.Tensor:
    adapters.set_attention(model, "eager")
    with torch.inference_mode():
        logits = [model(torch.tensor([ids]), use_cache=False).logits[0] for ids in tokens]
    return torch.cat(
        [logits[i][first : first + n] for spans in _PASSES for i, first, n in spans]
    ).float()


def _through(
    model: PreTrainedModel, tokens: Sequence[list[int]], observer: Observer
) -> torch.Tensor:
    states = states_of(model)
    adapters.set_attention(model, attention.NAME)
    if states is not None:
        observer.needs["running states"] = None
        return _through_states(model, tokens, observer, states)
    rows = []
    for spans in _PASSES:
        observer.planes.begin(spans)
        ids = [token for i, first, n in spans for token in tokens[i][first : first + n]]
        positions = [p for _, first, n in spans for p in range(first, first + n)]
        rows.append(packed_logits(model, ids, positions, range(len(ids)), observer))
    return torch.cat(rows)


@torch.inference_mode()
def _through_states(
    model: PreTrainedModel, tokens: Sequence[list[int]], observer: Observer, states: States
) -> torch.Tensor:
    """Each span in a row of its own, which continues from the pages of the one before."""
    logits, pages = [], dict[int, torch.Tensor]()
    for i, first, n in (span for spans in _PASSES for span in spans):
        cache = StateCache(model, states)
        if first:
            cache.restore(pages[i])
        observer.planes.begin([(i, first, n)])
        ids = torch.tensor([tokens[i][first : first + n]])
        positions = torch.arange(first, first + n)[None]
        with attention.running(observer, model):
            output = model(ids, position_ids=positions, cache=cache, use_cache=True)
        logits.append(output.logits[0].float())
        pages[i] = cache.pages()
    return torch.cat(logits)


def _plain(reason: str) -> str:
    """Without the type's name, that of a layer's type, and figures, which differ by machine."""
    reason = re.sub("^a model of type '[^']*':? ", "", reason)
    reason = re.sub(r"^layer \d+ is of type '[^']*'", "a layer is of another type", reason)
    reason = re.sub(r" \([^()]* off, [^()]* allowed\)", "", reason).strip().replace("\n", " ")
    return reason.replace("gives other logits through kvplane than through transformers", _DIFFERS)


def examine_apart(model_type: str) -> Row:
    """In a process of its own: some types fail hard, or take very long. It is not forked from this
    one, whose threads of OpenMP a fork would wait for.
    """
    apart = multiprocessing.get_context("forkserver")
    apart.set_forkserver_preload([_send_row.__module__])
    ours, theirs = apart.Pipe(duplex=False)
    child = apart.Process(target=_send_row, args=(model_type, theirs))
    child.start()
    theirs.close()
    row = Row(model_type, NOT_RUN, f"takes more than {_TIME_LIMIT_S} s or too much memory")
    if ours.poll(_TIME_LIMIT_S):
        with contextlib.suppress(EOFError):
            row = ours.recv()
    child.kill()
    child.join()
    return row


def _send_row(model_type: str, pipe: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    torch.set_num_threads(1)
    attention.register()
    try:
        row = examine(model_type)
    except Exception as error:
        row = Row(model_type, "FAILS", f"{type(error).__name__}: {error}".replace("\n", " "))
    pipe.send(row)


def document(rows: Sequence[Row]) -> str:
    """The text of ``docs/reference/models.md``."""
    counts = {v: sum(row.verdict == v for row in rows) for v in (EXACT, REFUSED, NOT_RUN)}
    of: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        of.setdefault((row.verdict, row.note), []).append(row.model_type)
    return (
        "# Models of transformers\n\n"
        f"Of the {len(rows)} causal types of transformers {transformers.__version__}: "
        f"{counts[EXACT]} exact, {counts[REFUSED]} refused, {counts[NOT_RUN]} not run.\n"
        "`python -m tests.models.census` writes this table, and `tests/models/` holds it "
        "true.\n\n| result | with what, or why not | types |\n|---|---|---|\n"
        + "".join(
            f"| {verdict} | {note} | {', '.join(of[verdict, note])} |\n"
            for verdict, note in sorted(of)
        )
    )


def documented() -> dict[str, Row]:
    """The rows of ``docs/reference/models.md``, by type."""
    table = DOCUMENT.read_text(encoding="utf-8").partition("|---|---|---|\n")[2]
    rows = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in table.splitlines()]
    return {
        name: Row(name, verdict, note)
        for verdict, note, names in rows
        for name in names.split(", ")
    }


def main(model_types: Sequence[str]) -> None:
    """Print the rows of some types, or of all and write the document."""
    rows = []
    for model_type in model_types or TYPES:
        rows.append(examine_apart(model_type))
        sys.stdout.write(f"{rows[-1]}\n")
    if not model_types:
        DOCUMENT.write_text(document(rows), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
