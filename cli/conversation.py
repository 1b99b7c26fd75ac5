"""A chat session and the terminal it is shown in."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING

from h2o_gguf import policies
from h2o_gguf.cancel import CancelToken
from h2o_gguf.cli.cuts import why_full
from h2o_gguf.cli.interrupt import cancel_on_interrupt, no_echo
from h2o_gguf.cli.render import complain, notice, speed
from h2o_gguf.cli.streaming import Printer
from h2o_gguf.errors import NATIVE, Cancelled, H2OError

if TYPE_CHECKING:
    from h2o_gguf.chat import ChatSession

__all__ = ["Conversation"]

Answer = Callable[[Callable[[int, int], None], CancelToken], Generator[str, None, None]]


class Conversation:
    """Shows the turns of a session; what fails is said, and the conversation goes on.

    sets_off : put a blank line after each answer.
    """

    def __init__(self, session: ChatSession, *, sets_off: bool, verbose: bool = False) -> None:
        self.session = session
        self._sets_off = sets_off
        self._verbose = verbose
        self._has_told_eviction = False

    def say(self, message: str) -> None:
        """Send a message and show the reply."""
        self._show(lambda progress, cancel: self.session.ask(message, progress=progress, cancel=cancel))

    def again(self) -> None:
        """Show another reply to the last message."""
        self._show(lambda progress, cancel: self.session.regenerate(progress=progress, cancel=cancel))

    def _show(self, answer: Answer) -> None:
        printer = Printer()
        try:
            with cancel_on_interrupt() as cancel, no_echo():
                printer.show(lambda progress: answer(progress, cancel))
        except Cancelled:
            notice("stopped while reading; the message was taken back")
            self._say_what_waits()
            return
        except H2OError as error:
            if error.exit_code == NATIVE:
                raise
            complain(str(error))
            notice("the message was taken back; the conversation goes on without it")
            self._say_what_waits()
            return
        self._say_what_happened()
        if self._sets_off:
            print(flush=True)

    def _say_what_waits(self) -> None:
        names = ", ".join(each.name for each in self.session.attachments)
        if names:
            notice(f"{names} still goes with your next message; /read alone takes it back")

    def _say_what_happened(self) -> None:
        turn, kv = self.session.last, self.session.report()
        assert turn is not None
        if turn.finish_reason == "cancelled":
            notice("stopped; what was said is kept")
        elif turn.finish_reason == "length":
            if turn.is_cut_by_context:
                notice(f"cut: {why_full(kv)}; /clear starts anew")
            else:
                notice(f"cut at {turn.n_written:,} tokens; /set predict N allows more")
        if turn.n_evicted and not self._has_told_eviction:
            self._has_told_eviction = True
            attic = "; what leaves stays within reach of later messages" if kv.attic is not None else ""
            system = ", the system message among them" if self.session.pins_system else ""
            notice(
                f"the cache is full: from now on {kv.policy} keeps {kv.budget:,} entries per KV head, "
                f"{policies.keeps(kv.policy)}{system}{attic} (/kv shows how full it is)"
            )
        if self._verbose:
            notice(f"read {speed(turn.n_read, turn.read_s)}, wrote {speed(turn.n_written, turn.write_s)}")
