"""Train the model that ships in ``models/recall``: a byte-level Llama that copies from far back.

    python models/train_recall.py --out models/recall --minutes 8

Two CPU cores are enough. The loss counts only letters that the context determines (see
``models/recall_task.py``). Training starts from a rough sketch of the circuit that copies, which
already gives most letters of short contexts; gradient descent makes it sharp and lets contexts
grow.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path

import torch
from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from models.recall_task import FACT_BYTES, Facts

BYTE_OFFSET = 3  # ByT5's ids: pad, eos, unk, then the 256 bytes
IGNORE = -100
CODE = 16  # features of a token's code in the sketched circuit
NUM_QUERIES = 8  # questions that follow a context
SMOOTHING = 0.1  # keeps logits small, so that rounding in float32 stays well below 1e-4
EASY_LOSS = 0.35  # recent loss below which the contexts grow longer
MAX_FACTS = 60

CONFIG = LlamaConfig(
    vocab_size=259,
    hidden_size=128,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    rope_theta=1e6,
    max_position_embeddings=2048,
    tie_word_embeddings=False,
    pad_token_id=0,
    eos_token_id=1,
    bos_token_id=None,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--minutes", type=float, default=8.0, help="time to train for, minutes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--facts", type=int, default=20, help="most facts of the first contexts")
    parser.add_argument("--batch-tokens", type=int, default=4800, help="tokens of a batch")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    model = LlamaForCausalLM(CONFIG)
    sketch_induction(model)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    num_steps = train(model, random.Random(args.seed), args)
    for num_facts in (25, 50):
        letters, answers = score(model, random.Random(num_facts), num_facts)
        print(f"{num_facts} facts: letters {letters:.4f} answers {answers:.3f}", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    model.half().save_pretrained(args.out)
    ByT5Tokenizer(extra_ids=0).save_pretrained(args.out)
    settings = {k: v for k, v in vars(args).items() if k != "out"} | {"num_steps": num_steps}
    (args.out / "training.json").write_text(json.dumps(settings) + "\n")


def train(model: LlamaForCausalLM, rng: random.Random, args: argparse.Namespace) -> int:
    """Train for ``args.minutes``; contexts grow while they are easy. Return the number of steps."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=0, betas=(0.9, 0.98), weight_decay=0.01)
    start, step, reach, recent = time.monotonic(), 0, args.facts, 6.0
    while (share := (time.monotonic() - start) / (60 * args.minutes)) < 1:
        num_facts = rng.randint(3, reach)
        rows = max(6, args.batch_tokens // (num_facts * FACT_BYTES + 90))
        ids, labels = batch(rng, rows, num_facts)
        for group in optimiser.param_groups:
            group["lr"] = args.rate * min(1.0, (step + 1) / 200) * min(1.0, 2.5 * (1 - share))
        logits, wanted = model(ids).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        loss = torch.nn.functional.cross_entropy(logits.detach(), wanted)
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(logits, wanted, label_smoothing=SMOOTHING).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        recent = 0.9 * recent + 0.1 * loss.item()
        if recent < EASY_LOSS and reach < MAX_FACTS:
            reach, recent = reach + max(1, reach // 6), 1.5 * EASY_LOSS
        if step % 100 == 0:
            letters, answers = score(model, rng, reach)
            print(
                f"step {step} {share:5.1%} facts {reach} loss {loss.item():.4f} "
                f"letters {letters:.4f} answers {answers:.3f}",
                flush=True,
            )
        step += 1
    return step


def example(rng: random.Random, num_facts: int) -> tuple[list[int], list[int]]:
    """Return a row's token ids and labels, IGNORE where the context does not determine a byte."""
    facts = Facts.random(rng, num_facts)
    text = facts.text
    known = [False] * len(text)
    for _ in range(NUM_QUERIES):
        index = rng.randrange(num_facts)
        question = facts.question(index)
        answer = facts.recitation(index)
        stop = min(len(answer), 8 * rng.randint(0, 3) + 4)
        text += question + answer[:stop]
        known += [False] * len(question) + [True] * stop
    ids = [b + BYTE_OFFSET for b in text.encode()]
    return ids, [i if k else IGNORE for i, k in zip(ids, known, strict=True)]


def batch(rng: random.Random, rows: int, num_facts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``rows`` examples padded on the right: ids and labels, both int64 [rows, T]."""
    pairs = [example(rng, num_facts) for _ in range(rows)]
    width = max(len(ids) for ids, _ in pairs)
    ids = torch.tensor([i + [0] * (width - len(i)) for i, _ in pairs])
    labels = torch.tensor([lab + [IGNORE] * (width - len(lab)) for _, lab in pairs])
    return ids, labels


@torch.no_grad()
def sketch_induction(model: LlamaForCausalLM) -> None:
    """Start from a rough induction circuit (Olsson et al. 2022), which is slow to find from noise.

    Residual features: the token's code [0, 16), the codes of the 1, 2, 3, 4 tokens before it
    [16, 80), a constant (80), and the code of the answer [96, 112). Layer 0: head h looks h + 1
    tokens back, by a constant query and key turned by RoPE's own frequencies, and copies the code
    it finds. Layer 1: the last four tokens are compared with the four before each earlier position,
    in those features of a head that RoPE turns slowly, and the code there is copied to the answer.
    """
    size, heads, groups = model.config.head_dim, model.config.num_attention_heads, 2
    half, own, constant, answer = size // 2, slice(0, CODE), 80, slice(96, 96 + CODE)
    first, second = (layer.self_attn for layer in model.model.layers[:2])
    codes = torch.nn.functional.normalize(torch.randn(model.config.vocab_size, CODE), dim=1)
    embedding = model.model.embed_tokens.weight
    embedding[:, own] = codes
    embedding[:, constant] = 1.0
    model.lm_head.weight[:, answer] = codes
    frequencies = model.model.rotary_emb.inv_freq
    copy = torch.eye(CODE) / 8
    for group in range(groups):
        base = group * size
        first.k_proj.weight[base : base + half, constant] = 1.1
        for attention in (first, second):
            attention.v_proj.weight[base : base + CODE, own] = copy * (
                1 if attention is first else 2
            )
    for head in range(heads):
        base, back = head * size, head + 1
        first.q_proj.weight[base : base + half, constant] = 1.1 * (back * frequencies).cos()
        first.q_proj.weight[base + half : base + size, constant] = -1.1 * (back * frequencies).sin()
        first.o_proj.weight[CODE * back : CODE * (back + 1), base : base + CODE] = torch.eye(CODE)
        second.o_proj.weight[answer, base : base + CODE] = torch.eye(CODE)
    slow = torch.cat((torch.arange(half // 2, half), torch.arange(half + half // 2, size)))
    for back in range(heads):
        rows = slow[back::heads]
        project = 2 * torch.nn.functional.normalize(torch.randn(len(rows), CODE), dim=1)
        for head in range(heads):
            second.q_proj.weight[head * size + rows, CODE * back : CODE * (back + 1)] = project
        for group in range(groups):
            before = slice(CODE * (back + 1), CODE * (back + 2))
            second.k_proj.weight[group * size + rows, before] = project


@torch.no_grad()
def score(model: LlamaForCausalLM, rng: random.Random, num_facts: int) -> tuple[float, float]:
    """Return the share of right letters, given the right ones before each, and of right values."""
    model.eval()
    ids, labels = batch(rng, 24, num_facts)
    guess = model(ids).logits[:, :-1].argmax(-1)
    want = labels[:, 1:]
    mask = want != IGNORE
    hit = (guess == want) | ~mask
    starts = mask & ~torch.nn.functional.pad(mask, (1, 0))[:, :-1]
    whole = [
        bool(hit[r, c : c + 4].all())
        for r, c in zip(*torch.nonzero(starts, as_tuple=True), strict=True)
    ]
    model.train()
    return float((hit & mask).sum() / mask.sum()), sum(whole) / len(whole)


if __name__ == "__main__":
    main()
