"""The messages of one collective call, and a transfer under way: what `Group` hands out."""

from collections import deque

from minidist.backend import Array


class Channel:
    """The messages of one collective call, which its algorithm sends and receives."""

    def __init__(self, group, name: str, payload: bool = True):
        group._collectives += 1
        self.group, self.name, self.payload = group, name, payload
        self.rank, self.size = group.rank, group.size
        self.key = group._key("collective", group._collectives)

    def send(self, array: Array, to: int) -> None:
        self.group._post(self.name, array, to, self.key, self.payload)

    def recv(self, source: int) -> Array:
        return self.group._take(self.name, source, self.key)


class Request:
    """A transfer under way, in a queue with the earlier ones of the same source and tag."""

    def __init__(self, queue: deque, complete):
        self._queue, self._complete, self._done, self._result = queue, complete, False, None
        queue.append(self)

    def wait(self) -> Array | None:
        """Return the array that was received (None for a send); the same one if called again."""
        while not self._done:
            oldest = self._queue[0]
            oldest._result, oldest._done = oldest._complete(), True
            self._queue.popleft()
        return self._result
