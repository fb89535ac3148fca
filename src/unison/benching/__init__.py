"""`unison bench`: scaling of training with more devices, larger batches and more data.

`points` describes what is measured, `sweep` starts it, and `measured` is the program of its
workers: it runs the user's program, or one of `models`, under a `Recorder`. `results` is the file
of the results, `scaling` computes rates from it, `showing` and `drawing` are text and plots, and
`comparing` compares two results.
"""
