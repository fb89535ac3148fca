"""Atomic writes of files, on this machine and through fsspec: the basis of everything that saves.

- `file_systems`: the paths that are fsspec's, and the names of the errors of file systems;
  `patience`: retries and timeouts of file systems.
- `files`: reading, listing and removing files, wherever they are.
- `atomic`: files and folders that are written under a temporary name and then renamed; `writers`:
  whether the process that left such a temporary file is still running.
- `temporary_folders`: folders that are removed even if their process is killed.
- `checksummed`: the container of a checksum, a JSON header and bytes; `decoding`: bounded decoding
  of the content of files, with one kind of error; `names`: names that were read from files.
- `locks`: locks on files, for mutual exclusion of processes.
"""
