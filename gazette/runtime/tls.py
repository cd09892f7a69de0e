"""TLS with the same checks on every version of Python."""

from __future__ import annotations

import ssl


def tls_context(
    purpose: ssl.Purpose = ssl.Purpose.SERVER_AUTH, ca_file: str | None = None
) -> ssl.SSLContext:
    """Return a context that accepts the certificates that Go and earlier versions of Python accept.

    From 3.13 on, Python refuses a certificate whose form breaks RFC 5280, such as a CA without a key usage.
    Many private CAs have such a form. A cluster would then be reachable from one version of Python only.
    Signatures, times, names and chains are checked as before. Without ``ca_file``, a client trusts the roots
    of this machine. Raise ``OSError`` for a file that cannot be used.
    """
    context = ssl.create_default_context(purpose, cafile=ca_file)
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    # As Go and Python 3.13 do, trust an intermediate certificate in the file even without its root.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context
