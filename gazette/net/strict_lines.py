"""Lines of HTTP/1.1 that end with CR and LF, and in no other way.

A parser may take LF alone as the end of a line (RFC 9112, 2.2), and h11 does. A proxy before this server may
see one line where h11 sees two lines. Then a caller could hide a header, or a whole request, from the proxy.
"""

from __future__ import annotations

import h11

# h11 has no option for this, and no public way to replace its buffer.
from h11._receivebuffer import ReceiveBuffer


class StrictLines(ReceiveBuffer):
    """A buffer of h11 that refuses a head, or trailers, with a line that ends with LF alone."""

    def maybe_extract_lines(self) -> list[bytearray] | None:
        """Return the lines up to the first blank line; None if no blank line has arrived.

        Raise ``RemoteProtocolError`` for a line that does not end with CR and LF.
        """
        before = len(self)
        lines = super().maybe_extract_lines()
        # h11 has dropped the ends of lines. The length shows whether each had two bytes.
        if lines is not None and sum(map(len, lines)) + 2 * len(lines) + 2 != before - len(self):
            raise h11.RemoteProtocolError("a line ends with LF alone", error_status_hint=400)
        return lines


def refuse_bare_lf(connection: h11.Connection) -> None:
    """Let a connection that has received nothing refuse lines that end with LF alone."""
    connection._receive_buffer = StrictLines()
