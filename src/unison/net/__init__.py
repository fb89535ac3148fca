"""Every listener and every connection of Unison: accepting, proving, encrypting, lines of JSON.

- `listening.listen` makes the sockets, and `acceptor.Acceptor` accepts from them. No connection
  gets a thread, or memory to speak of, before it has completed a handshake.
- `handshake` is the handshake of both ends: TLS where the other end is on another machine, then
  the proof of the job's secret (`proof`) in both directions.
- `connecting.connect` is the client's side of it.
- `lines.Line` sends and receives lines of JSON without ever waiting.

`docs/security.md` has the threat model.
"""
