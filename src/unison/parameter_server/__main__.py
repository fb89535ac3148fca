"""Serves the task of `TF_CONFIG`: the program of the workers and servers of `unison run --ps`."""

from unison.parameter_server.serving import main

if __name__ == "__main__":
    main()
