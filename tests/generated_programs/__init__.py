"""Random training programs as data, and what runs, compares and shrinks them.

`choices` says what a program is, `drawing` draws one, `models`, `parts`, `steps` and `loops` build
it, `running` runs it, `comparing` compares two runs, and `shrinking` makes a failing one small.
"""
