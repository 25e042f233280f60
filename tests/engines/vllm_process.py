"""vLLM on a CPU, in an environment of its own: answers the questions that come on stdin.

``vllm_process.py OPTIONS``: a JSON object for the tier, or null for vLLM alone. A line of stdin is
{"seed", "salt"}, a line of stdout {"answers", "num_cached", "num_tokens", "taken_s", "counters"}.
"""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

NUM_PROMPTS = 6
GREEDY = SamplingParams(temperature=0, max_tokens=4, detokenize=False)


def prompts_of(seed: int) -> list[list[int]]:
    """Questions about one of many pairs, as models/recall answers them; no two begin alike."""
    rng, prompts = random.Random(seed), []
    for i in range(NUM_PROMPTS):
        words = [["".join(rng.choices("abcdefgh", k=3)) for _ in "kv"] for _ in range(45 + 4 * i)]
        text = "".join(f"{key}={value};" for key, value in words)
        prompts.append([ord(letter) + 3 for letter in f"{text}?{rng.choice(words)[0]}="])
    return prompts


def transfer(tier: dict[str, Any] | None) -> KVTransferConfig | None:
    if tier is None:
        return None
    extra = {
        "spec_name": "CpuTieringSpec",
        "spec_module_path": "tests.engines.cpu_spec",
        "cpu_bytes_to_use": 64 << 20,
        "secondary_tiers": [{"type": "kvplane", **tier}],
    }
    return KVTransferConfig(
        kv_connector="KvplaneConnector", kv_role="kv_both", kv_connector_extra_config=extra
    )


def main() -> None:
    llm = LLM(
        model="models/recall",
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        block_size=32,
        skip_tokenizer_init=True,
        max_num_seqs=8,
        num_gpu_blocks_override=512,
        kv_transfer_config=transfer(json.loads(sys.argv[1])),
    )
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        prompts = prompts_of(asked["seed"])
        given = [{"prompt_token_ids": each, "cache_salt": asked["salt"]} for each in prompts]
        began_s = time.monotonic()
        outputs = llm.generate(given, GREEDY, use_tqdm=False)
        taken_s = time.monotonic() - began_s
        for _ in range(3):  # stores are handed over by later steps
            llm.generate({"prompt_token_ids": [7] * 5}, GREEDY, use_tqdm=False)
            time.sleep(0.3)
        answer = {
            "answers": [list(output.outputs[0].token_ids) for output in outputs],
            "num_cached": sum(output.num_cached_tokens for output in outputs),
            "num_tokens": sum(map(len, prompts)),
            "taken_s": taken_s,
        }
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
