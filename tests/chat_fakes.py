"""A model without weights: the books of the engine, a byte vocabulary, and replies written in advance."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from h2o_gguf.cancel import CancelToken
from h2o_gguf.errors import Cancelled, ContextOverflowError
from h2o_gguf.lock import CallLock
from h2o_gguf.report import KVReport

CONTROL = ("<s>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
BOS, END = 256, 257

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TRIMMING = TEMPLATE.replace("{{ m.content }}", "{{ m.content | trim }}")
# Reasoning models' templates drop the thoughts of earlier replies.
FORGETFUL = TEMPLATE.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}{% endfor %}" + TEMPLATE
)


class FakeVocab:
    """Token i < 256 is byte i; the control tokens follow."""

    bos, eos, adds_bos = BOS, END, True

    def piece(self, token: int, special: bool = False) -> bytes:
        if token < 256:
            return bytes([token])
        return CONTROL[token - 256].encode() if special else b""

    def is_end(self, token: int) -> bool:
        return token == END


class FakeEngine:
    """Keeps the books as the real engine does; `replies` says what is generated, a token list each time.

    n_decoded : tokens evaluated so far.  n_exact : how far back a rollback is exact.
    cancel_at : raise Cancelled in the prefill that passes this position.
    """

    def __init__(self, replies: Sequence[Sequence[int]], *, n_exact: int = 10**9, n_ctx: int = 10**9) -> None:
        self.context = SimpleNamespace(vocab=FakeVocab(), n_ctx_train=10**6)
        self.tokens: list[int] = []
        self.pins: list[tuple[int, int]] = []
        self.policy: Any = None
        self.attic: Any = None
        self.cancelled = False
        self.is_closed = False
        self.n_decoded = 0
        self.n_exact = n_exact
        self.n_ctx = n_ctx
        self.cancel_at: int | None = None
        self.recalls: list[tuple[int, int, bool]] = []  # of each prefill: where it began, tokens, recall
        self._replies = iter(replies)

    @property
    def n_past(self) -> int:
        return len(self.tokens)

    def reset(self) -> None:
        self.tokens.clear()

    def rollback(self, n_past: int) -> bool:
        if self.n_past - n_past > self.n_exact:
            return False
        del self.tokens[n_past:]
        return True

    def settle(self) -> None: ...

    def bookmarks(self) -> None: ...

    def go_back_to(self, bookmarks: None) -> None: ...

    def holds_all(self, n_tokens: int) -> bool:
        return n_tokens <= self.n_exact

    def sync(
        self, tokens: Sequence[int], *, pins: Any = None, progress: Any = None, cancel: Any = None
    ) -> int:
        pairs = enumerate(zip(self.tokens, tokens, strict=False))
        kept = next((i for i, (a, b) in pairs if a != b), min(self.n_past, len(tokens)))
        if len(tokens) >= self.n_ctx:
            raise ContextOverflowError(len(tokens), self.n_ctx)
        if not self.rollback(kept):
            self.reset()
            kept = 0
        self.pins = list(pins or [])
        self.prefill(tokens[kept:], recall=True, progress=progress, cancel=cancel)
        return kept

    def prefill(
        self, tokens: Sequence[int], *, recall: bool = False, progress: Any = None, cancel: Any = None
    ) -> None:
        self.recalls.append((self.n_past, len(tokens), recall))
        if self.n_past + len(tokens) > self.n_ctx:
            raise ContextOverflowError(self.n_past + len(tokens), self.n_ctx)
        for i, token in enumerate(tokens):
            if self.cancel_at is not None and self.n_past >= self.cancel_at:
                self.cancel_at = None
                raise Cancelled(f"cancelled after {i} of {len(tokens)} prompt tokens")
            self.tokens.append(token)
            self.n_decoded += 1
        if progress is not None:
            progress(len(tokens), len(tokens))

    def generate(self, sampler: Any, *, max_tokens: int | None = None, cancel: Any = None) -> Iterator[int]:
        self.cancelled = False
        for n, token in enumerate(next(self._replies)):
            if cancel is not None and cancel.cancelled:
                self.cancelled = True
                return
            yield token
            if n + 1 == max_tokens:
                return
            self.tokens.append(token)
            self.n_decoded += 1

    def report(self) -> KVReport:
        return KVReport("h2o+", 64, min(64, self.n_past), max(0, self.n_past - 64), self.n_past, 1 << 20)


class FakeSampler:
    """Draws nothing: the fake engine knows its replies."""

    def __init__(self, vocab: Any, options: Any) -> None:
        self.options = options

    def __enter__(self) -> FakeSampler:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class FakeLlama:
    """What a session needs of H2OLlama."""

    def __init__(self, *replies: str, template: str = TEMPLATE, ends: bool = True, **engine: Any) -> None:
        """replies : in order.  ends : whether the model closes each with its end token."""
        self._lock = CallLock("this FakeLlama")
        tail = [END] if ends else []
        self.engine = FakeEngine([[*reply.encode(), *tail] for reply in replies], **engine)
        self.metadata = {"tokenizer.ggml.model": "gpt2"} | (
            {"tokenizer.chat_template": template} if template else {}
        )

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        tokens = [BOS] if add_bos else []
        at = 0
        while at < len(text):
            name = next((c for c in CONTROL if special and text.startswith(c.encode(), at)), None)
            tokens.append(256 + CONTROL.index(name) if name else text[at])
            at += len(name) if name else 1
        return tokens

    @contextmanager
    def turn(self, cancel: CancelToken | None = None) -> Iterator[tuple[Any, CancelToken]]:
        turn = self._lock.enter()
        try:
            yield turn, cancel or CancelToken()
        finally:
            turn.end()

    @property
    def says(self) -> str:
        """The text of the sequence, control tokens included."""
        vocab = self.engine.context.vocab
        return b"".join(vocab.piece(token, special=True) for token in self.engine.tokens).decode()


def use_fake_sampler(patch: Callable[[str, Any], None], module: str) -> None:
    """Make `module` draw with FakeSampler.  patch : monkeypatch.setattr."""
    patch(f"{module}.ChainSampler", FakeSampler)
