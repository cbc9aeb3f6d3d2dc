"""The errors of Halfmoon, drawn as a tree.

HalfmoonError
├── ConfigError            what the operator set cannot work; the message says the fix
├── WireError              bytes that do not follow the protocol
│   └── AuthError          a peer that does not know the cluster secret, or a forged frame
├── ConnectionLost         the peer is gone, hung or too slow; everything pending on it has failed
├── RemoteError            the peer refused a request and said why
└── InvariantError         our own bookkeeping contradicts itself; carries the story
"""

from __future__ import annotations


class HalfmoonError(Exception):
    """Root of every error raised on purpose."""


class ConfigError(HalfmoonError):
    """What the operator set cannot work. The message names the key and the fix."""


class WireError(HalfmoonError):
    """Bytes from a peer do not follow `docs/wire.md`. The connection is closed."""


class AuthError(WireError):
    """A peer failed the challenge or sent a frame with a wrong MAC."""


class ConnectionLost(HalfmoonError):  # noqa: N818 (an event as much as an error)
    """The connection ended; what was not answered may or may not have been done."""


class RemoteError(HalfmoonError):
    """The peer answered a request with an error."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail


class InvariantError(HalfmoonError):
    """State that must agree does not."""
