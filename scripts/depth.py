"""Speed of writing after a long history, ours in a budget beside a full cache that nobody has to read.

    python scripts/depth.py [MODEL] [-n 24000] [--share 0.1] [--stock DIR] [--out docs/figures/depth]

The full caches are filled with copies of the entries of at most 1,024 tokens: what is in them makes no
difference to the time of a token. The floor is the time to read the model's weights, which every token does.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from statistics import median

from report import arguments, environment, model_file, progress, save, table

from h2o_gguf.benchmark.comparison import Samples, measure
from h2o_gguf.benchmark.machine import ReadBandwidth
from h2o_gguf.benchmark.process import WorkerProcess
from h2o_gguf.benchmark.results import Spread
from h2o_gguf.benchmark.variants import Settings, fitting_histories, make_plan, variants
from h2o_gguf.models import read_header, read_shape


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", help="a GGUF file; the default model if left out")
    parser.add_argument("-n", type=int, default=24_000, help="tokens of history")
    parser.add_argument("--share", type=float, nargs="+", default=[0.1], help="budgets as shares of -n")
    parser.add_argument("--stock", type=Path, help="folder of an unmodified llama.cpp library")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=0, help="default: the physical cores")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    model = model_file(args.model)
    shape = read_shape(model)
    stock = args.stock.resolve() if args.stock is not None else None
    settings = Settings((args.n,), tuple(args.share), args.repeats, args.threads, stock=stock)
    fitting_histories(settings, shape)
    plans = [make_plan(variant, args.n, model, shape, settings) for variant in variants(settings)]
    n_threads = plans[0].job["n_threads"]
    done: list[int] = []

    def step(n: int) -> None:
        done.append(n)
        move(sum(done), 0)

    with (
        ExitStack() as stack,
        closing(ReadBandwidth(n_threads)) as bandwidth,
        progress("filling and writing", args.n * len(plans)) as move,
    ):
        workers = {p.variant.name: stack.enter_context(WorkerProcess(p.variant.name, p.job)) for p in plans}
        every, rates = measure(args.n, plans, workers, args.repeats, bandwidth, step, is_filled=True)
    n_bytes, speed = weight_bytes(model), median(rates)
    floor_s = n_bytes / speed
    seconds = {samples.plan.variant.name: samples.decode_s() for samples in every}
    lines = [
        [samples.plan.variant.name, f"{samples.n_entries:,}", *figures(every[0], samples, floor_s)]
        for samples in every
    ]
    head = ["cache", "entries", "decode tok/s", "ratio", "ms a token", "times the floor"]
    floor = (
        f"The floor: {n_bytes / 1e6:.1f} MB of weights a token, at {speed / 1e9:.1f} GB/s read by "
        f"{n_threads} threads, are {1e3 * floor_s:.1f} ms, {1 / floor_s:.1f} tok/s."
    )
    data = {"environment": environment(model), "arguments": arguments(args), "decode_s": seconds}
    data |= {"weight_bytes": n_bytes, "bandwidth": asdict(Spread.of(rates)), "floor_s": floor_s}
    save(args.out, f"{table(head, lines)}\n\n{floor}", data)


def figures(first: Samples, samples: Samples, floor_s: float) -> list[str]:
    """A row's rate with quartiles, ratio with range, time, and that over the floor."""
    seconds = samples.decode_s()
    rate = Spread.of(1 / s for s in seconds)
    ratio = Spread.of(a / b for a, b in zip(first.decode_s(), seconds, strict=True))
    return [
        f"{rate.median:.1f} ({rate.q1:.1f} .. {rate.q3:.1f})",
        f"{ratio.median:.2f} ({ratio.min:.2f} .. {ratio.max:.2f})",
        f"{1e3 * median(seconds):.1f}",
        f"{median(seconds) / floor_s:.2f}",
    ]


def weight_bytes(model: str) -> int:
    """Bytes of a dense model's weights that each token reads: all but an embedding that is only looked up."""
    tensors = read_header(model).tensors
    skipped = "token_embd.weight" if "output.weight" in tensors else ""
    return sum(tensor.n_bytes for name, tensor in tensors.items() if name != skipped)


if __name__ == "__main__":
    main()
