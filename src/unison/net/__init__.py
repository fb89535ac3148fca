"""All listeners and connections of Unison: accepting, authentication, encryption, JSON lines.

- `listening.listen` creates listening sockets, and `acceptor.Acceptor` accepts from them. No
  connection gets a thread, or more than a few hundred bytes of memory, before its handshake is
  complete.
- `handshake` has the handshake of both ends: TLS between machines, then the proof of the job's
  secret (`proof`) in both directions.
- `connecting.connect` is the client's side.
- `lines.Line` sends and receives JSON lines without blocking.

`docs/security.md` has the threat model.
"""
