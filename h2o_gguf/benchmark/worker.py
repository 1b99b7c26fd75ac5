"""One engine of a benchmark, in a process of its own: two builds of llama.cpp cannot share one.

Started as a script.  The first line of stdin is the job, a JSON object; every other one a command, a JSON
list of a method of Worker and its arguments.  Each is answered with an object on stdout, {"error": ...} if it
cannot be done.  Every engine runs the same loop over llama.cpp's own API, ours with a KVCache attached.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import resource
import sys
import time
from typing import Any

from h2o_gguf.native_log import NativeLog

N_TOKENS = 4096  # the text, which repeats
N_COPIED, SPARE = 1024, 1  # most tokens that a cache is filled with copies of, the sequence they come by
PAUSE_S = 0.02  # until the threads of the process whose turn it was have stopped spinning


class Worker:
    """A model, a context and what was read so far.

    job : model, n_cells, n_ubatch, n_threads, type_k and type_v (numbers);
        library : folder of another build of llama.cpp, None for this package's; python_path : of llama_cpp;
        cache : what to attach (budget None and is_scored, or budget, policy, block and n_pos_max), None for
        llama.cpp alone.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        self.log = NativeLog()
        self.low = low = _llama_cpp(job)
        self._on_line = low.llama_log_callback(self._keep_line)
        low.llama_log_set(self._on_line, ctypes.c_void_p(0))
        low.llama_backend_init()
        model_params = low.llama_model_default_params()
        model_params.n_gpu_layers = 0
        self.model = low.llama_model_load_from_file(os.fsencode(job["model"]), model_params)
        if not self.model:
            raise RuntimeError(f"cannot load the model: {self.log.reason('llama.cpp gives no reason')}")
        params = low.llama_context_default_params()
        params.n_ctx = job["n_cells"]
        params.n_batch = params.n_ubatch = job["n_ubatch"]
        params.n_threads = params.n_threads_batch = job["n_threads"]
        params.type_k, params.type_v = job["type_k"], job["type_v"]
        params.flash_attn_type = low.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.swa_full = False
        self.ctx = low.llama_init_from_model(self.model, params)
        if not self.ctx:
            raise RuntimeError(f"cannot make a context: {self.log.reason('llama.cpp gives no reason')}")
        self.memory = low.llama_get_memory(self.ctx)
        self.n_ubatch = job["n_ubatch"]
        self.batch = low.llama_batch_init(self.n_ubatch, 0, 1)
        n_vocab = low.llama_vocab_n_tokens(low.llama_model_get_vocab(self.model))
        self.tokens = random.Random(0).choices(range(n_vocab), k=N_TOKENS)
        self.n_past = 0
        self.budget: int | None = None
        self.evictor: Any = None
        self.options: dict[str, Any] = job["cache"] or {}
        self.cache = self._attach(self.options) if self.options else None

    def _keep_line(self, level: int, text: bytes, _: Any) -> None:
        self.log.add(level, text.decode("utf-8", "replace").rstrip("\n"))

    def _attach(self, options: dict[str, Any]) -> Any:
        from h2o_gguf import policies
        from h2o_gguf.bindings import KVCache
        from h2o_gguf.context import Context
        from h2o_gguf.eviction import Evictor

        address = Context.address_of(self.ctx)
        self.budget = options["budget"]
        if self.budget is None:
            return KVCache(address, budget=0, is_scored=options["is_scored"])
        policy = policies.make(options["policy"], self.budget)
        cache = KVCache(
            address, budget=self.budget, block=options["block"], decay=policy.decay,
            n_pos_max=options["n_pos_max"], is_scored=policy.needs_scores,
            n_observed=policy.n_observed,
        )  # fmt: skip
        self.evictor = Evictor(policy)
        self.evictor.attach(cache)
        return cache

    def read(self, n: int) -> dict[str, Any]:
        """Decode the next n tokens in batches."""
        seconds = 0.0
        while n > 0:
            seconds += self._decode(min(n, self.n_ubatch))
            n -= self.n_ubatch
        return {"seconds": seconds}

    def fill(self, n: int) -> dict[str, Any]:
        """Have the entries of n tokens in the cache, copies of those of the first ones; or as many as stay.

        What is in them makes no difference to the time of a token.
        """
        started, low, memory = time.perf_counter(), self.low, self.memory
        if self.budget is not None:
            self.read(min(n, self.budget + self.n_ubatch))
            return {"seconds": time.perf_counter() - started}
        if self.cache is not None:  # ours does not shift
            self.cache.close()
        n_parts = -(-n // N_COPIED)
        n_copied = (n - 1) // n_parts
        self.read(n_copied)
        data = (ctypes.c_uint8 * low.llama_state_seq_get_size(self.ctx, 0))()
        low.llama_state_seq_get_data(self.ctx, data, len(data), 0)
        for _ in range(1, n_parts):
            # By way of another sequence: restoring one empties it first.
            if not low.llama_state_seq_set_data(self.ctx, data, len(data), SPARE):
                raise RuntimeError(f"cannot copy entries to position {self.n_past}: {self._reason()}")
            low.llama_memory_seq_add(memory, SPARE, 0, -1, self.n_past)
            low.llama_memory_seq_cp(memory, SPARE, 0, -1, -1)
            low.llama_memory_seq_rm(memory, SPARE, -1, -1)
            self.n_past += n_copied
        self.read(n - self.n_past)  # one token at least, which has the keys of the copies turned
        if self.cache is not None:
            self.cache = self._attach(self.options)
        return {"seconds": time.perf_counter() - started}

    def write(self, n: int) -> dict[str, Any]:
        """Decode n tokens one by one and forget them again, where the memory can; tell the time of each."""
        time.sleep(PAUSE_S)
        start, entries = self.n_past, self._entries()
        seconds = [self._decode(1) for _ in range(n)]
        if self.low.llama_memory_seq_rm(self.memory, 0, start, -1):  # recurrent states cannot go back
            self._forget_from(start)
        return {"seconds": seconds, "entries": entries}

    def settle(self) -> dict[str, Any]:
        """Evict down to the budget, as the engine does at rest."""
        started = time.perf_counter()
        if self.cache is not None and self.budget is not None:
            self.cache.make_room(self.budget)
        return {"seconds": time.perf_counter() - started}

    def reset(self) -> dict[str, Any]:
        """Forget everything."""
        self.low.llama_memory_clear(self.memory, False)
        self._forget_from(0)
        return {}

    def _forget_from(self, n_past: int) -> None:
        self.n_past = n_past
        if self.evictor is not None:
            self.evictor.drop_from(n_past)

    def facts(self) -> dict[str, Any]:
        """What this process is and takes.  version : of ggml."""
        version = self.low._lib.ggml_version
        version.restype = ctypes.c_char_p
        return {
            "version": version().decode(),
            "system": self.low.llama_print_system_info().decode(),
            "rss": _peak_rss(),
        }

    def _entries(self) -> int:
        return int(self.cache.used()) if self.cache is not None else self.n_past

    def _decode(self, n: int) -> float:
        batch = self.batch
        for i in range(n):
            batch.token[i] = self.tokens[(self.n_past + i) % N_TOKENS]
            batch.pos[i] = self.n_past + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = i == n - 1
        batch.n_tokens = n
        started = time.perf_counter()
        code = self.low.llama_decode(self.ctx, batch)
        self.low.llama_synchronize(self.ctx)
        seconds = time.perf_counter() - started
        if code != 0:
            raise RuntimeError(f"llama_decode returned {code} at position {self.n_past}: {self._reason()}")
        self.n_past += n
        return seconds

    def _reason(self) -> str:
        otherwise = "llama.cpp gives no reason"
        if self.cache is not None:
            from h2o_gguf.bindings.library import last_error

            otherwise = str(self.cache.raised() or last_error() or otherwise)
        return self.log.reason(otherwise)


def _llama_cpp(job: dict[str, Any]) -> Any:
    """llama-cpp-python's C functions, on the engine's own library."""
    if job["library"] is None:
        from h2o_gguf.native import C

        return C
    os.environ["LLAMA_CPP_LIB_PATH"] = job["library"]
    sys.path.insert(0, job["python_path"])
    import llama_cpp.llama_cpp as low

    if hasattr(low._lib, "h2og_version"):
        raise RuntimeError(f"{job['library']} holds this package's own runtime, not an unmodified llama.cpp")
    return low


def _peak_rss() -> int:
    """Bytes.  On Linux ru_maxrss starts with what the parent had when this process was made."""
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS: bytes


def main() -> None:
    """Serve until stdin ends."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what native code prints is no answer
    worker: Worker | None = None
    for line in sys.stdin:
        try:
            if worker is None:
                worker = Worker(json.loads(line))
                answer = worker.facts()
            else:
                verb, *arguments = json.loads(line)
                answer = getattr(worker, verb)(*arguments)
        except Exception as error:
            answer = {"error": str(error) or type(error).__name__}
        print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()
