"""One call at a time on one object."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from h2o_gguf.errors import BusyError, ClosedError

__all__ = ["CallLock", "Gone", "Turn"]

PATIENCE_S = 30.0


class Gone:
    """Stands for what a closed object had; every use of it raises ClosedError."""

    def __init__(self, owner: str) -> None:
        self._owner = owner

    def __getattr__(self, name: str) -> NoReturn:
        raise ClosedError(self._owner)


class Turn:
    """The right to use the object; ends once, from whatever thread."""

    def __init__(self, lock: CallLock) -> None:
        self._lock = lock
        self.thread = threading.get_ident()
        self.is_running = True  # False while a stream waits for its reader
        self.since_s = time.monotonic()

    def resume(self) -> None:
        """The reader of a stream asks for more, perhaps from another thread."""
        self._mark(True)

    def pause(self) -> None:
        """A stream hands out a piece and waits for its reader."""
        self._mark(False)

    def end(self) -> None:
        """Let the next call in."""
        self._lock._leave(self)

    def _mark(self, is_running: bool) -> None:
        self.thread = threading.get_ident()
        self.is_running = is_running
        self.since_s = time.monotonic()


class CallLock:
    """Calls from several threads wait for each other.

    A stream keeps its turn until it is exhausted or closed. It belongs to no thread: thread pools read each
    piece in whatever thread is free. Whoever would wait for what cannot go on gets BusyError instead: a call
    from inside a call, and a call while the only thread has a stream open, at once; others, when nobody has
    read the stream for patience_s seconds.
    """

    def __init__(self, what: str, patience_s: float = PATIENCE_S) -> None:
        self.what = what
        self.patience_s = patience_s
        self._mutex = threading.Lock()  # itself in the with-blocks, whose entry Ctrl-C cannot cut in two
        self._free = threading.Condition(self._mutex)
        self._last: Callable[[], Turn | None] = _nobody

    def enter(self) -> Turn:
        """Wait for the turn and return it.  Raises BusyError."""
        with self._mutex:
            while (turn := self._turn) is not None:
                if turn.is_running and turn.thread == threading.get_ident():
                    raise _busy(f"cannot call {self.what} from inside one of its own calls: let it end first")
                if not turn.is_running and threading.active_count() == 1:
                    raise _busy(f"{self.what} has an open stream: read it to its end or close it")
                idle_s = 0.0 if turn.is_running else time.monotonic() - turn.since_s
                if idle_s > self.patience_s:
                    raise _busy(
                        f"{self.what} has an open stream nobody has read for {idle_s:.0f} s: "
                        "read it to its end or close it"
                    )
                wait_s = 0.5 if turn.is_running else min(0.5, self.patience_s - idle_s + 0.001)
                del turn  # or nobody could lose it meanwhile
                self._free.wait(wait_s)
            turn = Turn(self)
            self._last = weakref.ref(turn)
            return turn

    @property
    def _turn(self) -> Turn | None:
        """Whose turn it is.

        Only who has it keeps it: Ctrl-C may come before a caller has what `enter` returns, or instead of its
        end, and must not leave the object locked.
        """
        return self._last()

    @contextmanager
    def call(self) -> Iterator[Turn]:
        """The turn for the length of a with-block.  Raises BusyError."""
        turn = self.enter()
        try:
            yield turn
        finally:
            turn.end()

    def refuse_inside(self, what: str) -> None:
        """Raise BusyError if this thread is inside a call already (in a callback, say)."""
        turn = self._turn
        if turn is not None and turn.is_running and turn.thread == threading.get_ident():
            raise _busy(
                f"cannot {what} {self.what} from inside one of its own calls: let that call end first"
            )

    @contextmanager
    def last_call(self) -> Iterator[None]:
        """Wait until no call is computing, then shut the object; open streams do not hold this up."""
        with self._mutex:
            while (turn := self._turn) is not None and turn.is_running:
                if turn.thread == threading.get_ident():
                    break
                del turn
                self._free.wait(0.05)
            yield

    def _leave(self, turn: Turn) -> None:
        with self._mutex:
            if self._turn is turn:
                self._last = _nobody
                self._free.notify()


def _nobody() -> None: ...


def _busy(text: str) -> BusyError:
    error = BusyError()
    error.args = (text,)
    return error
