"""`h2o-gguf summarize` on a book and on a short text: time, memory, and the answers.

python scripts/summarize.py [MODEL] [--budget 1024] [--out docs/figures/summarize]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from report import environment, model_file, save, table

from h2o_gguf.evaluation.texts import book

MIB = 1 << 20
SHORT_CHARACTERS = 8800  # about 2,000 tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", help="a GGUF file; the default model if left out")
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    model = model_file(args.model)
    lines, answers, results = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for name, text in (("topics-2000.txt", book()[:SHORT_CHARACTERS]), ("topics.txt", book())):
            path = Path(folder) / name
            path.write_text(text, encoding="utf-8")
            found, seconds, peak = run(model, path, args.budget)
            kv = found["kv"]
            lines.append(
                [name, f"{found['usage']['document_tokens']:,}", f"{seconds:.0f} s", f"{peak / MIB:.0f} MiB",
                 f"{kv['bytes'] / MIB:.1f} MiB", f"{kv['evicted']:,}"]
            )  # fmt: skip
            answers.append(f"> {name}: " + " ".join(str(found["text"]).split()))
            results.append({"file": name, "seconds": seconds, "peak_rss": peak, **found})
    head = ["document", "tokens", "time", "peak RSS", "KV cache", "evicted per head"]
    body = table(head, lines) + "\n\n" + "\n>\n".join(answers)
    save(args.out, body, {"environment": environment(model), "budget": args.budget, "results": results})


def run(model: str, path: Path, budget: int) -> tuple[dict[str, object], float, int]:
    """The command's JSON, its seconds, and the largest resident size seen, in bytes."""
    command = [
        sys.executable,
        "-m",
        "h2o_gguf.cli",
        "summarize",
        str(path),
        "-m",
        model,
        "--kv-budget",
        str(budget),
    ]
    started, peak = time.monotonic(), 0
    process = subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, text=True, cwd=path.parent)
    watched = psutil.Process(process.pid)
    while process.poll() is None:
        try:
            peak = max(peak, watched.memory_info().rss)
        except psutil.Error:
            break
        time.sleep(0.05)
    output, _ = process.communicate()
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    found = json.loads(output)
    del found["model"]  # a path
    return found, time.monotonic() - started, peak


if __name__ == "__main__":
    main()
