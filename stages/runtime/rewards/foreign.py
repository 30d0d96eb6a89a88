"""Code of the user's in this process: what it changes of the process does not outlast it.

The current folder is where relative paths of the config lead, so that a reward which changes it
would have the next checkpoint written elsewhere; without gradients no step can be taken; another
number of threads changes the rounding, and another handler lets no signal stop the run.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from stages.runtime.signals import may_handle


@contextmanager
def as_found() -> Iterator[None]:
    """Folder, signal handlers and settings of torch are again what they were."""
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    with ExitStack() as after:
        after.callback(torch.set_default_dtype, dtype)
        after.callback(_set_threads, threads)
        after.enter_context(torch.set_grad_enabled(torch.is_grad_enabled()))
        if may_handle():
            for signum in (signal.SIGINT, signal.SIGTERM):
                after.callback(signal.signal, signum, signal.getsignal(signum))
        after.callback(os.chdir, os.getcwd())
        after.callback(_end_unless, os.getpid())
        yield


def _set_threads(number: int) -> None:
    if torch.get_num_threads() != number:
        torch.set_num_threads(number)


def _end_unless(pid: int) -> None:
    """A process that the code forked off and let return would do all that follows a second time."""
    if os.getpid() != pid:
        os._exit(0)
