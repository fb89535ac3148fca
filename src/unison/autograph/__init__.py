"""Python's control flow over arrays, in compiled programs: `if`, `while`, `for`, `and`, `assert`.

Functions are traced as they are. Where Python needs the value of an array, the trace is made again
with the functions converted: their source is rewritten (`source`), so that statements and calls
become calls of operators (`operators`, `calls`). An operator that meets a value runs as Python
does; where the value is known only when the program runs, it puts a branch or a loop into the
program (`unison.branches`).

The rewriting is that of TensorFlow's AutoGraph, in the package `diastatic-malt`.
"""
