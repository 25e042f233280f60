"""Train the model that ships in ``models/recall``: a byte-level Llama that answers from far-back context.

    python models/train_recall.py --out models/recall --minutes 12

Two CPU cores are enough. The loss counts only letters that the context determines (see ``engine/recall.py``); the number of
facts grows while it trains, because the copying circuit forms sooner in short contexts.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from pathlib import Path

import torch
from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine.recall import Facts

BYTE_OFFSET = 3  # ByT5's ids: pad, eos, unk, then the 256 bytes
IGNORE = -100
EASY_LOSS = 0.25  # recent loss below which the contexts grow longer
MAX_FACTS = 60


def example(rng: random.Random, num_facts: int, num_queries: int) -> tuple[list[int], list[int]]:
    """One training row: token ids and labels, IGNORE where the context does not determine the next byte."""
    facts = Facts.random(rng, num_facts)
    text = facts.text
    known = [False] * len(text)
    for _ in range(num_queries):
        index = rng.randrange(num_facts)
        question = facts.question(index)
        answer = facts.recitation(index)
        stop = min(len(answer), 8 * rng.randint(0, 3) + 4)
        text += question + answer[:stop]
        known += [False] * len(question) + [True] * stop
    ids = [b + BYTE_OFFSET for b in text.encode()]
    return ids, [i if k else IGNORE for i, k in zip(ids, known, strict=True)]


def batch(rng: random.Random, rows: int, num_facts: int, num_queries: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``rows`` examples padded on the right: ids and labels, both int64 [rows, T]."""
    pairs = [example(rng, num_facts, num_queries) for _ in range(rows)]
    width = max(len(ids) for ids, _ in pairs)
    ids = torch.tensor([i + [0] * (width - len(i)) for i, _ in pairs])
    labels = torch.tensor([lab + [IGNORE] * (width - len(lab)) for _, lab in pairs])
    return ids, labels


@torch.no_grad()
def score(model: LlamaForCausalLM, rng: random.Random, num_facts: int) -> tuple[float, float]:
    """Teacher-forced accuracy over letters, and the share of first values that are right in all letters."""
    model.eval()
    ids, labels = batch(rng, 24, num_facts, 6)
    guess = model(ids).logits[:, :-1].argmax(-1)
    want = labels[:, 1:]
    mask = want != IGNORE
    hit = (guess == want) | ~mask
    starts = mask & ~torch.nn.functional.pad(mask, (1, 0))[:, :-1]
    whole = [
        bool(hit[r, c : c + 4].all()) for r, c in zip(*torch.nonzero(starts, as_tuple=True), strict=True)
    ]
    model.train()
    return float((hit & mask).sum() / mask.sum()), sum(whole) / len(whole)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--minutes", type=float, default=12.0, help="time to train for, minutes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=3)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    config = LlamaConfig(
        vocab_size=259, hidden_size=128, intermediate_size=192, num_hidden_layers=args.layers,
        num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=2048,
        tie_word_embeddings=False, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=0.01)
    peak, start, step, reach, recent = 2e-3, time.monotonic(), 0, 4, 6.0
    while (share := (time.monotonic() - start) / (60 * args.minutes)) < 1:
        num_facts = rng.randint(max(3, reach // 2), reach)
        rows = max(6, 4800 // (num_facts * 8 + 120))
        ids, labels = batch(rng, rows, num_facts, 8)
        rate = peak * min(1.0, (step + 1) / 100) * (0.5 * (1 + math.cos(math.pi * share)))
        for group in optimiser.param_groups:
            group["lr"] = rate
        loss = model(ids, labels=labels).loss
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        recent = 0.9 * recent + 0.1 * loss.item()
        if recent < EASY_LOSS and reach < MAX_FACTS:
            reach, recent = reach + max(1, reach // 8), 2 * EASY_LOSS
        if step % 100 == 0:
            letters, answers = score(model, rng, reach)
            print(
                f"step {step} {share:5.1%} facts {reach} loss {loss.item():.4f} "
                f"letters {letters:.4f} answers {answers:.3f}", flush=True,
            )  # fmt: skip
        step += 1
    print("final", score(model, random.Random(1), 50), score(model, random.Random(2), 25), flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    model.half().save_pretrained(args.out)
    ByT5Tokenizer(extra_ids=0).save_pretrained(args.out)
    (args.out / "training.json").write_text(
        json.dumps({"seed": args.seed, "minutes": args.minutes, "steps": step, "layers": args.layers}) + "\n"
    )


if __name__ == "__main__":
    main()
