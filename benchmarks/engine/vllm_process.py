"""vLLM on a CPU, in an environment of its own: ``vllm_process.py MODEL MAX_SEQUENCES``.

Prints "ready". A line of stdin is {"prompts", "num_new"}, a line of stdout the tokens.
"""

from __future__ import annotations

import json
import sys

from vllm import LLM, SamplingParams


def main(model: str, max_sequences: str) -> None:
    """Answer until stdin ends."""
    llm = LLM(
        model=model,
        dtype="float32",
        block_size=32,
        max_model_len=1024,
        max_num_seqs=int(max_sequences),
        skip_tokenizer_init=True,
    )
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        params = SamplingParams(
            temperature=0, max_tokens=asked["num_new"], ignore_eos=True, detokenize=False
        )
        prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        print(json.dumps([list(output.outputs[0].token_ids) for output in outputs]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
