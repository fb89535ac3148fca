"""Worker processes that call a user's function for chunks of elements.

`pool` is the parent's side, `work` the worker's; `start` is the program of the worker, and
`messages` and `memory` are their communication: a message is a few bytes on a socket, and arrays
are in shared memory.
"""
