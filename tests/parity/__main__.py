"""`python -m parity record --tf-python PATH` and `python -m parity document`."""

import argparse

from parity.documentation import write_page
from parity.recorded_answers import record


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m parity")
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="write what TensorFlow answers")
    recording.add_argument("--tf-python", required=True, help="a Python that has TensorFlow")
    recording.add_argument("topics", nargs="*", help="all, if none is named")
    commands.add_parser("document", help="write docs/parity.md")
    said = parser.parse_args()
    if said.command == "record":
        print(record(said.tf_python, *said.topics), "facts")
    write_page()


if __name__ == "__main__":
    main()
