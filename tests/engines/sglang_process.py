"""SGLang on a CPU, in an environment of its own: answers the questions that come on stdin.

``sglang_process.py OPTIONS``: a JSON object of its engine's options. A line of stdin is {"seed"}, a
line of stdout {"answers", "num_cached", "num_tokens", "taken_s"}: lists, an item for each prompt.
``num_cached`` are tokens that came from the storage backend.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from typing import Any

import tests.engines.sglang_stubs  # noqa: F401
from tests.engines.questions import prompts_of

OPTIONS = {
    "model_path": "models/recall",
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "page_size": 32,
    "context_length": 1024,
    "max_total_tokens": 8192,
    "skip_tokenizer_init": True,
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "sleep_on_idle": True,
    "log_level": "info",
}
GREEDY = {"temperature": 0, "max_new_tokens": 4}


def num_from_storage(info: dict[str, Any]) -> int:
    return (info["cached_tokens_details"] or {}).get("storage", 0)


def main() -> None:
    import sglang

    multiprocessing.set_start_method("fork")  # two thirds of a start would be the same imports
    multiprocessing.set_start_method = lambda *_, **__: None
    engine = sglang.Engine(**OPTIONS | json.loads(sys.argv[1]))
    for line in sys.stdin:
        prompts = prompts_of(json.loads(line)["seed"])
        outputs = engine.generate(input_ids=prompts, sampling_params=GREEDY)
        infos = [output["meta_info"] for output in outputs]
        answer = {
            "answers": [output["output_ids"] for output in outputs],
            "num_cached": [num_from_storage(info) for info in infos],
            "num_tokens": [*map(len, prompts)],
            "taken_s": [info["e2e_latency"] for info in infos],
        }
        print(json.dumps(answer), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
