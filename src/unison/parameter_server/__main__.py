"""Serves the task of `TF_CONFIG`: what `unison run --ps` starts as workers and servers."""

from unison.parameter_server.serving import main

if __name__ == "__main__":
    main()
