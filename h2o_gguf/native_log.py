"""What llama.cpp logs, kept for the reason in an error."""

from __future__ import annotations

__all__ = ["GGML_CONTINUED", "NativeLog"]

GGML_WARN, GGML_ERROR, GGML_CONTINUED = 3, 4, 5  # of ggml_log_level


class NativeLog:
    """Warnings and errors of llama.cpp, in order.

    is_interrupted : Ctrl-C was pressed meanwhile.
    """

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.warnings: list[str] = []
        self.is_interrupted = False

    def add(self, level: int, line: str) -> None:
        """Keep a line if it may be a reason.  level : ggml_log_level."""
        if level == GGML_ERROR:
            self.errors.append(line)
        elif level == GGML_WARN:
            self.warnings.append(line)

    def reason(self, otherwise: str) -> str:
        """The first error that was logged, without the name of the C++ function."""
        for line in self.errors or self.warnings:
            head, colon, tail = line.partition(": ")
            text = tail if colon and head.replace("_", "").replace("::", "").isalnum() else line
            text = text.removeprefix("error loading model: ")
            if text:
                return text
        return otherwise
