"""Files that appear whole, on this machine and behind fsspec: what everything that saves stands on.

- `file_systems`: which paths are fsspec's, and the names of the errors of file systems;
  `patience`: how often a file system that does not answer is asked again.
- `files`: reading, listing and removing files, wherever they are.
- `atomic`: files and folders that are written aside and take their place at once; `writers`:
  whether the process that left such a file behind still runs.
- `temporary_folders`: folders of which nothing stays when their process is killed.
- `checksummed`: the container of a checksum, a JSON header and bytes; `decoding`: bounded decoding
  of what any file holds, which ends in one error; `names`: names that were read from files.
- `locks`: locks on files, by which processes take turns.
"""
