"""What has come into this process since a moment: threads and descriptors.

What an earlier test has left may end meanwhile, so that counts would be smaller.
"""

import os
import threading


class Since:
    """What there is of them that was not there when this was made."""

    def __init__(self):
        self._threads = set(threading.enumerate())
        self._descriptors = set(os.listdir("/proc/self/fd"))

    def threads(self):
        return [each for each in threading.enumerate() if each not in self._threads]

    def descriptors(self):
        return sorted(set(os.listdir("/proc/self/fd")) - self._descriptors)
