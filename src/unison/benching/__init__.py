"""`unison bench`: how training gets faster as it gets more devices, larger batches and more data.

`points` says what is measured, `sweep` starts it, and `measured` is what its workers run: the
user's program, or one of `models`, under a `Recorder`. `results` is the file that comes of it,
`scaling` what it says, `show` and `drawing` put that into words and pictures, and `comparing` holds
two results against each other.
"""
