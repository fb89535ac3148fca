"""One command that checks a machine's GPUs: `make gpu`, or `python -m benchmarks.gpu`.

`plan` lists the checks, `running` runs each in a process of its own within a time, `record` keeps
what they find in a JSON file, and `page` shows it. `numbers` compares programs of `tests` on the
devices with the same on a CPU, in processes of `answers`; `speed`, `determinism` and `grouping`
measure; `jobs` has checks of whole jobs, which run the program `training`.
"""
