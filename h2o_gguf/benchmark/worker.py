"""One engine of a benchmark, in a process of its own: two builds of llama.cpp cannot share one.

Started as a script.  Reads one JSON object a line from stdin and answers each with one on stdout; both
engines run the same loop over llama.cpp's own API, ours with a KVCache attached.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import sys
import time
from typing import Any


class Worker:
    """A model, a context and the tokens read so far."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.C = C = _llama_cpp(job)
        self.tokens: list[int] = job["tokens"]
        self.n_past = 0
        C.llama_backend_init()
        model_params = C.llama_model_default_params()
        model_params.n_gpu_layers = job["n_gpu_layers"]
        self.model = C.llama_model_load_from_file(job["model"].encode(), model_params)
        params = C.llama_context_default_params()
        params.n_ctx = job["n_cells"]
        params.n_batch = params.n_ubatch = job["n_ubatch"]
        params.n_threads = params.n_threads_batch = job["n_threads"]
        params.type_k, params.type_v = job["type_k"], job["type_v"]
        params.flash_attn_type = C.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self.ctx = C.llama_init_from_model(self.model, params)
        if not self.ctx:
            raise SystemExit("llama.cpp cannot make a context")
        self.batch = C.llama_batch_init(job["n_ubatch"], 0, 1)
        self.cache = _attach(self.ctx, job) if job["is_ours"] else None

    def decode(self, n: int) -> float:
        """Decode the next n tokens as one batch; return the seconds."""
        for i in range(n):
            self.batch.token[i] = self.tokens[(self.n_past + i) % len(self.tokens)]
            self.batch.pos[i] = self.n_past + i
            self.batch.n_seq_id[i] = 1
            self.batch.seq_id[i][0] = 0
            self.batch.logits[i] = i == n - 1
        self.batch.n_tokens = n
        started = time.perf_counter()
        code = self.C.llama_decode(self.ctx, self.batch)
        self.C.llama_synchronize(self.ctx)
        seconds = time.perf_counter() - started
        if code != 0:
            raise SystemExit(f"llama_decode returned {code} at position {self.n_past}")
        self.n_past += n
        return seconds

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        """Do what the benchmark asks for."""
        if "read" in command:
            return {"seconds": self.decode(command["read"])}
        if "write" in command:  # and forget again, so that the history stays as long as it was
            start = self.n_past
            seconds = [self.decode(1) for _ in range(command["write"])]
            if not self.C.llama_memory_seq_rm(self.C.llama_get_memory(self.ctx), 0, start, -1):
                raise SystemExit(f"cannot roll back to position {start}")
            self.n_past = start
            return {"seconds": seconds}
        if "reset" in command:
            self.C.llama_memory_clear(self.C.llama_get_memory(self.ctx), False)
            self.n_past = 0
        scale = 1 if sys.platform == "darwin" else 1024
        used = self.cache.used() if self.cache is not None else self.n_past
        return {"rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale, "used": used}


def _llama_cpp(job: dict[str, Any]) -> Any:
    """llama-cpp-python's C functions, on the engine's own library."""
    if job["is_ours"]:
        from h2o_gguf.native import C

        return C
    os.environ["LLAMA_CPP_LIB_PATH"] = job["library"]
    sys.path[:0] = job["python_path"]
    import llama_cpp.llama_cpp as low

    low.llama_log_set(QUIET, ctypes.c_void_p(0))
    return low


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def QUIET(level: int, text: bytes, data: Any) -> None:
    """Drop a line of llama.cpp's log."""


def _attach(ctx: Any, job: dict[str, Any]) -> Any:
    from h2o_gguf import policies
    from h2o_gguf.bindings import KVCache
    from h2o_gguf.context import Context
    from h2o_gguf.eviction import Evictor

    if job["budget"] is None:
        return KVCache(Context.address_of(ctx), budget=0, attention=job["attention"])
    policy = policies.make(job["policy"], job["budget"])
    cache = KVCache(
        Context.address_of(ctx), budget=policy.budget, block=job["block"], decay=policy.decay,
        attention=job["attention"],
    )  # fmt: skip
    cache.set_policy(Evictor(policy))
    return cache


def main() -> None:
    """Serve until stdin ends."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what native code prints is no answer
    worker: Worker | None = None
    for line in sys.stdin:
        command = json.loads(line)
        if worker is None:
            worker = Worker(command)
            command = {}
        print(json.dumps(worker.answer(command)), file=out, flush=True)


if __name__ == "__main__":
    main()
