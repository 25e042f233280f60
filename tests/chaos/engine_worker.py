"""An engine that answers the prompts of ``QUESTIONS``, one set for each line that it reads.

    python -m tests.chaos.engine_worker MODEL CONTROL_PLANE POOL remote|embedded

A line holds the number of a set; the answer is one line of JSON with the tokens.
"""

from __future__ import annotations

import json
import sys

from engine import LLM, SamplingParams

_LONG = "a prompt of a few blocks, so that there is something to hold; "
# Prompts, and how each is answered. Some share a beginning, some fork, some need many blocks.
QUESTIONS = (
    (
        (_LONG * 3, SamplingParams(max_tokens=60, ignore_eos=True)),
        (_LONG * 2 + "another end", SamplingParams(max_tokens=40, ignore_eos=True)),
    ),
    (
        ("short", SamplingParams(max_tokens=30, ignore_eos=True)),
        (_LONG, SamplingParams(max_tokens=40, ignore_eos=True, n=3, temperature=1.0, seed=5)),
    ),
    ((_LONG * 5, SamplingParams(max_tokens=100, ignore_eos=True)),),
)
RECOVERY_TIMEOUT_S = 90.0


def say(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def main(model: str, control_plane: str, pool_id: str, where: str) -> None:
    blocks = {"num_device_blocks": 48, "num_host_blocks": 16} if where == "embedded" else {}
    with LLM(
        model,
        control_plane=control_plane,
        data_plane=where,
        pool_id=pool_id,
        timeout_s=2.0,
        recovery_timeout_s=RECOVERY_TIMEOUT_S,
        num_threads=1,
        **blocks,
    ) as llm:
        say("ready")
        for line in sys.stdin:
            prompts, params = zip(*QUESTIONS[int(line)], strict=True)
            outputs = llm.generate(prompts, params)
            tokens = [[list(o.token_ids) for o in output.outputs] for output in outputs]
            errors = [str(output.error) for output in outputs if output.error is not None]
            say({"tokens": tokens, "errors": errors})


if __name__ == "__main__":
    main(*sys.argv[1:])
