"""Ctrl-C and SIGTERM end a command line with one line, not with a traceback."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType


class Interrupted(KeyboardInterrupt):
    """The process was asked to end.

    Args:
        signum (int): The signal that asked.
    """

    message = 'interrupted'  # whoever knows more may replace it on its way up

    def __init__(self, signum: int) -> None:
        super().__init__()
        self.signum = signum


def interruption_behind(error: BaseException | None) -> Interrupted | None:
    """The interruption that led to `error`: mmengine raises others of its own in its place."""
    while error is not None and not isinstance(error, Interrupted):
        error = error.__context__
    return error


@contextmanager
def interruptible() -> Iterator[None]:
    """End the program on the first SIGINT or SIGTERM, with a message and exit code 130 or 143.

    The signal raises :class:`Interrupted` wherever the main thread is, so that nothing is saved
    any more. A second signal ends the process at once. For the main thread alone.
    """
    owner = os.getpid()
    # torchrun passes on what the terminal has sent to all processes already, and ends by SIGKILL
    # what does not end by itself
    second = signal.SIG_IGN if 'TORCHELASTIC_RUN_ID' in os.environ else signal.SIG_DFL

    def interrupt(signum: int, _: FrameType | None) -> None:
        if os.getpid() != owner:  # a loader's worker, forked with this handler
            if signum == signal.SIGTERM:
                os._exit(128 + signum)
            return  # the owner ends it
        signal.signal(signal.SIGINT, second)
        signal.signal(signal.SIGTERM, second)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # PyTorch's raises for workers that end now
        # again where it gets lost, as in callbacks of a fork or of the garbage collector
        sys.unraisablehook = lambda _: None
        signal.signal(signal.SIGALRM, lambda *_: interrupt(signum, None))
        signal.setitimer(signal.ITIMER_REAL, 1)
        raise Interrupted(signum)

    earlier = {
        signum: signal.signal(signum, interrupt) for signum in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except BaseException as error:
        interruption = interruption_behind(error)
        if interruption is None:
            raise
        if os.environ.get('RANK', '0') == '0':
            print(f'{Path(sys.argv[0]).name}: {interruption.message}', file=sys.stderr, flush=True)
        raise SystemExit(128 + interruption.signum) from None
    finally:
        if signal.getsignal(signal.SIGTERM) is interrupt:  # otherwise the process is ending
            for signum, handler in earlier.items():
                signal.signal(signum, handler)
