"""Why something was forgotten: what each layer and head still holds, and what an answer would have needed."""

from h2o_gguf.explain.document import explain
from h2o_gguf.explain.explanation import Explanation, explain_reply
from h2o_gguf.explain.history import HELD, History
from h2o_gguf.explain.recording import Recording
from h2o_gguf.summarize import QUESTION

__all__ = ["HELD", "QUESTION", "Explanation", "History", "Recording", "explain", "explain_reply"]
