"""vLLM on a CPU, in an environment of its own: answers the questions that come on stdin.

``vllm_process.py OPTIONS``: a JSON object with "transfer", vLLM's ``KVTransferConfig`` or null;
"weights", their version; and "num_whole_stores", after which a store ends the process, or null.
A line of stdin is {"prompts", "salt", "lora", "weights"}, a line of stdout {"answers",
"num_cached", "taken_s"}, in which answers and cached tokens are lists, one item for each prompt.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.lora.request import LoRARequest

from kvplane.integrations import chunks

GREEDY = SamplingParams(temperature=0, max_tokens=4, detokenize=False)


def end_in_a_store(num_whole: int) -> None:
    """Let so many stores be written. Of the next one write half the pages, and kill the process
    once steps have taken along whatever receipts there are.
    """
    from kvplane import Execution

    write, counter = Execution.write_pages, itertools.count()

    async def write_half(
        self: Execution, plan: Any, ids: Any, pages: Any, entries: Any, *, keys: Any
    ) -> None:
        half = len(pages) // 2 if next(counter) == num_whole else len(pages)
        await write(self, plan, ids[:half], pages[:half], entries[:half], keys=keys[:half])
        if half < len(pages):
            await asyncio.sleep(2)
            os.kill(os.getpid(), signal.SIGKILL)

    Execution.write_pages = write_half  # type: ignore[assignment]


class Engine:
    """vLLM. In version N of the weights, a token has the embedding of the one N - 1 before it."""

    def __init__(self, transfer: dict[str, Any] | None) -> None:
        self.llm = LLM(
            model="models/recall",
            dtype="float32",
            enforce_eager=True,
            max_model_len=1024,
            block_size=32,
            skip_tokenizer_init=True,
            max_num_seqs=8,
            num_gpu_blocks_override=512,
            enable_lora=True,
            max_lora_rank=8,
            kv_transfer_config=KVTransferConfig(**transfer) if transfer else None,
        )
        self.weights = 1
        self.adapters: dict[str, LoRARequest] = {}

    def set_weights(self, version: int) -> None:
        """Change the weights as training does, which leaves the caches as they are."""
        moved, self.weights = version - self.weights, version

        def change(model: Any) -> None:
            (embeddings,) = (p for name, p in model.named_parameters() if "embed_tokens" in name)
            embeddings.data.copy_(embeddings.data.roll(moved, dims=0))

        self.llm.apply_model(change)

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Answer the prompts of a question."""
        if asked["weights"] != self.weights:
            self.set_weights(asked["weights"])
            assert self.llm.reset_prefix_cache(reset_connector=True)
        salt = asked["salt"]
        given = [{"prompt_token_ids": each, "cache_salt": salt} for each in asked["prompts"]]
        began_s = time.monotonic()
        lora = self.adapter(asked["lora"])
        outputs = self.llm.generate(given, GREEDY, lora_request=lora, use_tqdm=False)
        taken_s = time.monotonic() - began_s
        for _ in range(3):  # stores are handed over by later steps
            self.llm.generate({"prompt_token_ids": [7] * 5}, GREEDY, use_tqdm=False)
            time.sleep(0.3)
        return {
            "answers": [list(output.outputs[0].token_ids) for output in outputs],
            "num_cached": [output.num_cached_tokens for output in outputs],
            "taken_s": taken_s,
        }

    def adapter(self, path: str | None) -> LoRARequest | None:
        """Return the request for an adapter's folder, which has its name."""
        if path is None:
            return None
        new = LoRARequest(Path(path).name, len(self.adapters) + 1, path)
        return self.adapters.setdefault(path, new)


def main() -> None:
    plug_in = Path(chunks.__file__)
    assert plug_in.is_relative_to(Path.cwd()), f"{plug_in} is of another tree: install this one"
    options = json.loads(sys.argv[1])
    if options["num_whole_stores"] is not None:
        end_in_a_store(options["num_whole_stores"])
    engine = Engine(options["transfer"])
    if options["weights"] != engine.weights:
        engine.set_weights(options["weights"])
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(engine.answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
