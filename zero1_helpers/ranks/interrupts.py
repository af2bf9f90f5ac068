"""The stop button, kept until somebody asks for it."""

import contextlib
import signal
import threading


class Interrupts(list):
    """A signal handler that remembers what came."""

    def __call__(self, signum, frame) -> None:
        self.append(signum)


@contextlib.contextmanager
def deferred_interrupt():
    """Collect SIGINTs in a list, so that none raises KeyboardInterrupt while a lock is held.

    What is still in the list at the end is raised then, by the outermost of several.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread():
        yield []  # signals arrive in the main thread only
    elif isinstance(before, Interrupts):
        yield before
    else:
        interrupts = Interrupts()
        signal.signal(signal.SIGINT, interrupts)
        try:
            yield interrupts
        finally:
            signal.signal(signal.SIGINT, before)
        if interrupts:
            raise KeyboardInterrupt
