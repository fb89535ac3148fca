"""The folder from which the process of a standby runs `sitecustomize`: see `standby`."""
