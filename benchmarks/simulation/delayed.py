"""A transport whose messages arrive later, as over a slow network."""

import time
from concurrent.futures import Future

from petra.distributed import ProcessTransport


class DelayedTransport(ProcessTransport):
    """A `ProcessTransport` on which every message of the pipeline takes `extra` seconds longer."""

    extra = 0.0

    def _io_thread(self, direction, other):
        thread = super()._io_thread(direction, other)
        return _DelayedThread(thread, self.extra) if direction == "from" and self.extra else thread


class _DelayedThread:
    """Lets whoever waits for a task wait until some time after its end; the thread itself goes on."""

    def __init__(self, thread, extra):
        self._thread, self._extra = thread, extra

    def submit(self, task):
        return _DelayedResult(self._thread.submit(lambda: (task(), time.perf_counter())), self._extra)


class _DelayedResult:
    def __init__(self, future: Future, extra: float) -> None:
        self._future, self._extra = future, extra

    def result(self):
        value, arrived = self._future.result()
        time.sleep(max(0.0, arrived + self._extra - time.perf_counter()))
        return value
