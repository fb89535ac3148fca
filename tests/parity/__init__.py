"""The same short programs under TensorFlow and under `unison.tf`.

A fact is a program of a few lines that takes the module it is written against. `programs/` holds
them, one file a topic; `recorded/` holds TensorFlow's answers as plain JSON, so that replaying them
needs no TensorFlow. With `tests` on the path:

    python -m parity record --tf-python PATH            write what TensorFlow answers
    python -m parity record-programs --tf-python PATH   write its numbers of whole programs
    python -m parity document                           write the pages about both
"""
