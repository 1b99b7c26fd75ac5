"""Explaining the answer to a question about a document."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from pydantic import InstanceOf

from h2o_gguf.cancel import CancelToken
from h2o_gguf.checked import checked
from h2o_gguf.documents import Document
from h2o_gguf.explain import recording
from h2o_gguf.explain.explanation import Explanation, explain_reply
from h2o_gguf.explain.recording import Recording
from h2o_gguf.kinds import Callback, Integer, Spans, Text
from h2o_gguf.sampling import SamplingOptions
from h2o_gguf.summarize import INSTRUCTION, QUESTION, SAMPLING, ReadingProgress, summarize

__all__ = ["explain"]


@checked
def explain(
    llm: Any,
    document: InstanceOf[Document],
    *,
    instruction: Text = INSTRUCTION,
    question: Text = QUESTION,
    system: Text | None = None,
    sampling: InstanceOf[SamplingOptions] = SAMPLING,
    seed: Integer | None = None,
    max_tokens: Integer | None = 512,
    pin: Spans = (),
    progress: Callback | None = None,
    on_text: Callback | None = None,
    on_replay: Callback | None = None,
    cancel: InstanceOf[CancelToken] | None = None,
) -> Explanation:
    """Return what is left of a document after it was read, and what the answer to `question` looked at.

    llm : H2OLlama; its sequence is replaced. progress, on_text and the other options : those of summarize.
    on_replay : called with (tokens replayed, tokens in all) afterwards.

    Raises: what summarize and explain_reply raise; OptionError, llm never evicts, or the
        text is too long to be recorded.
    """

    def report(reading: ReadingProgress) -> None:
        n_total = reading.n_total or 0  # an estimate, but not twice what comes
        is_hopeless = n_total > 2 * recording.MAX_TOKENS
        recording.check_length(n_total if is_hopeless else reading.n_read, "take a part of the text")
        if progress is not None:
            progress(reading)

    with closing(Recording(llm.engine)) as recorded:
        summary = summarize(
            llm, document, instruction=instruction, question=question, system=system, sampling=sampling,
            seed=seed, max_tokens=max_tokens, pin=pin, progress=report, on_text=on_text, cancel=cancel,
        )  # fmt: skip
        return explain_reply(llm, recorded, summary.n_read, summary.tokens, progress=on_replay, cancel=cancel)
