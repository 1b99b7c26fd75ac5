"""A chat of 200 turns in a fixed budget: memory must not grow after the first fill, every reply must arrive.

python scripts/chat.py [MODEL] [--turns 200] [--budget 1024] [--out docs/figures/chat]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import psutil
from report import environment, model_file, save, table
from rich.progress import track

from h2o_gguf import H2OLlama
from h2o_gguf.chat import ChatSession
from h2o_gguf.evaluation.texts import prose
from h2o_gguf.sampling import SamplingOptions

SYSTEM = "You are a helpful assistant. Answer briefly."
QUESTIONS = [
    "What is this part about?",
    "Name one thing it says that a beginner should remember.",
    "Put it in one sentence.",
    "Which word in it matters most, and why?",
]
MIB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", help="a GGUF file; the default model if left out")
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--predict", type=int, default=80, help="most tokens of a reply")
    parser.add_argument("--threads", type=int, help="default: the physical cores")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    model = model_file(args.model)
    # Every turn quotes another passage of 400 characters and asks about it.
    text = prose()
    step = len(text) // args.turns
    passages = [" ".join(text[i * step : i * step + 400].split()) for i in range(args.turns)]
    process = psutil.Process()
    samples: list[tuple[int, int, int, int, int]] = []  # turn, n_past, used, evicted, rss
    n_replies, started = 0, time.monotonic()
    with H2OLlama(model, kv_budget=args.budget, seed=1, n_threads=args.threads) as llm:
        session = ChatSession(
            llm, system=SYSTEM, sampling=SamplingOptions(temperature=0.7), seed=1, max_tokens=args.predict
        )
        for turn in track(range(args.turns), description="turns", transient=True):
            question = f"{passages[turn]}\n\n{QUESTIONS[turn % len(QUESTIONS)]}"
            reply = "".join(session.ask(question))
            n_replies += bool(reply.strip())
            kv = llm.engine.report()
            samples.append((turn + 1, kv.n_past, kv.used, kv.evicted, process.memory_info().rss))
            assert kv.used <= args.budget, "the cache at rest is within the budget"
        pos = llm.engine.cache.pos
        n_system = llm.engine.pins[0][1]
        held = [set(row.tolist()) for row in pos.reshape(-1, pos.shape[-1])]
        is_system_held = all(set(range(n_system)) <= row for row in held)
        kv = llm.engine.report()
    rss = np.array([s[4] for s in samples])
    filled = next(i for i, s in enumerate(samples) if s[3] > 0) + 1  # the first turn after the first eviction
    seconds = time.monotonic() - started
    facts = {
        "turns": args.turns,
        "replies that arrived": n_replies,
        "tokens of history": kv.n_past,
        "renumberings past the trained context": kv.n_rebases,
        "entries per head: budget / now / evicted": f"{kv.budget} / {kv.used} / {kv.evicted}",
        "system message held in every layer and head": "yes" if is_system_held else "NO",
        "KV cache as allocated": f"{kv.bytes / MIB:.1f} MiB",
        f"RSS after turn {filled + 1} (first fill)": f"{rss[filled] / MIB:.1f} MiB",
        "RSS in the middle / at the end": f"{rss[len(rss) // 2] / MIB:.1f} / {rss[-1] / MIB:.1f} MiB",
        "time": f"{seconds:.0f} s",
    }
    body = table(["", ""], list(facts.items()))
    save(
        args.out,
        body,
        {"environment": environment(model, seconds=seconds), "facts": facts, "samples": samples},
    )


if __name__ == "__main__":
    main()
