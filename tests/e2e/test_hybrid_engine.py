"""An engine whose model has running states, over planes in other processes: its answers are those
of eager attention, also from checkpoints that an earlier engine, or control plane, has left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine import LLM, SamplingParams
from engine.models import loader
from kvplane.errors import DeadlineExceededError
from kvplane.layout import Layout
from kvplane.models.hf import layout_from_hf
from tests.e2e.engine_planes import POOL, Pair
from tests.helpers.waiting import wait_until
from tests.models.tiny_models import VOCABULARY, save_tiny

SIZE = 8
NUM_NEW = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("hybrid")
    save_tiny("qwen3_next", made)
    return made


@pytest.fixture(scope="module")
def layout(folder: Path) -> Layout:
    groups = loader.load(folder, "float32").groups
    return layout_from_hf(
        folder, block_size_tokens=SIZE, dtype="float32", kv_dtype="float32", groups=groups
    )


@pytest.fixture
def pair(layout: Layout, tmp_path: Path) -> Iterator[Pair]:
    with Pair(layout, tmp_path, num_device_blocks=400, num_host_blocks=0) as made:
        yield made


def engine(folder: Path, pair: Pair, every_blocks: int) -> LLM:
    return LLM(
        folder, control_plane=pair.control.address, pool_id=POOL, max_batch_tokens=24,
        num_threads=1, timeout_s=60.0, checkpoint_every_blocks=every_blocks,
    )  # fmt: skip


def eager(folder: Path, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return what follows each prompt by eager attention."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    how = {"max_new_tokens": NUM_NEW, "min_new_tokens": NUM_NEW, "do_sample": False}
    answers = (model.generate(torch.tensor([prompt]), **how)[0] for prompt in prompts)
    return [a[len(p) :].tolist() for a, p in zip(answers, prompts, strict=True)]


def prompts_of(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


PARAMS = SamplingParams(max_tokens=NUM_NEW, ignore_eos=True)


@pytest.mark.parametrize("every_blocks", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_checkpoints_outlive_an_engine_and_a_control_plane(
    folder: Path, pair: Pair, every_blocks: int
) -> None:
    # The last two are computed in one pass. The pool has 16 blocks for checkpoints, and keeps half.
    prompts = prompts_of(26, 3, 10, 10)
    wanted = eager(folder, prompts)
    longer = [p + a for p, a in zip(prompts, wanted, strict=True)]
    after = eager(folder, longer)
    with engine(folder, pair, every_blocks) as llm:
        first = llm.generate(prompts, PARAMS)
    assert [output.outputs[0].token_ids for output in first] == wanted
    for restarts in (False, True):
        if restarts:
            pair.control.kill()
            pair.control.start()
        with engine(folder, pair, every_blocks) as llm:
            again = llm.generate(prompts, PARAMS)
            assert [output.outputs[0].token_ids for output in again] == wanted
            found = [output.num_cached_tokens for output in again]
            assert found == [(len(prompt) - 1) // SIZE * SIZE for prompt in prompts]
            next_turns = llm.generate(longer, PARAMS)
        assert [output.outputs[0].token_ids for output in next_turns] == after
        if every_blocks:
            # The answer's last token was not computed: what it ends was never full.
            found = [output.num_cached_tokens for output in next_turns]
            assert found == [(len(tokens) - 1) // SIZE * SIZE for tokens in longer]


def test_what_was_used_twice_outlives_all_planes_in_files(
    folder: Path, layout: Layout, tmp_path: Path
) -> None:
    prompts = prompts_of(43, 29, 16)
    wanted = eager(folder, prompts)
    num_blocks = [(len(prompt) - 1) // SIZE for prompt in prompts]
    files = "--file-tier-dir", str(tmp_path / "files"), "--file-tier-bytes", str(2**24)
    with Pair(layout, tmp_path, num_device_blocks=400, arguments=files) as pair:
        with engine(folder, pair, 0) as llm:
            for _ in range(2):
                llm.generate(prompts, PARAMS)
            num_files = sum(num_blocks) + len(prompts)  # a checkpoint of each
            wait_until(lambda: len([*tmp_path.rglob("*.block")]) == num_files)
        for each in (pair.data, pair.control):
            each.kill()
        for each in (pair.control, pair.data):
            each.start()
        pair.wait_ready()
        with engine(folder, pair, 0) as llm:
            after = llm.generate(prompts, PARAMS)
    assert [output.outputs[0].token_ids for output in after] == wanted
    assert [output.num_cached_tokens for output in after] == [SIZE * num for num in num_blocks]


def test_an_aborted_plan_leaves_no_state_behind(
    folder: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompts_of(30, 11)
    wanted = eager(folder, prompts)
    with engine(folder, pair, 1) as llm:
        num_calls = 0
        finish = llm._backend.finish

        def fail_sometimes(*, is_last: bool) -> object:
            nonlocal num_calls
            num_calls += 1
            if num_calls % 4 == 3:
                raise DeadlineExceededError("the receipt was lost")
            return finish(is_last=is_last)

        monkeypatch.setattr(llm._backend, "finish", fail_sometimes)
        outputs = llm.generate(prompts, PARAMS)
        assert llm.stats.num_aborted_plans > 1
        again = llm.generate([p + a for p, a in zip(prompts, wanted, strict=True)], PARAMS)
    assert [output.outputs[0].token_ids for output in outputs] == wanted
    after = eager(folder, [p + a for p, a in zip(prompts, wanted, strict=True)])
    assert [output.outputs[0].token_ids for output in again] == after
