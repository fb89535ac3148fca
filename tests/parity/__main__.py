"""`python -m parity record --tf-python PATH`, `record-programs` and `document`."""

import argparse

from parity import recorded_programs
from parity.documentation import write_pages
from parity.recorded_answers import record


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m parity")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, what in (("record", "facts"), ("record-programs", "whole programs")):
        recording = commands.add_parser(name, help=f"write what TensorFlow answers: {what}")
        recording.add_argument("--tf-python", required=True, help="a Python that has TensorFlow")
        recording.add_argument("names", nargs="*", help="topics or programs; all, if none is named")
    commands.add_parser("document", help="write docs/parity.md and docs/whole-programs.md")
    said = parser.parse_args()
    if said.command == "record":
        print(record(said.tf_python, *said.names), "facts")
    elif said.command == "record-programs":
        print(recorded_programs.record(said.tf_python, *said.names), "programs")
    write_pages()


if __name__ == "__main__":
    main()
