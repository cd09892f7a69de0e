"""Headers and arguments of a request for a journal. A header or argument that changes the meaning of the
request is honoured or refused. `gazette.net.http_requests` has the parts common to all requests."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final

from starlette.requests import Request

from gazette.errors import Corrupt, Invalid
from gazette.net.http_requests import Refusal, check_headers, content_encoding
from gazette.protocol.codecs.codec import new_decompressor
from gazette.protocol.content import CHUNK_BYTES
from gazette.protocol.fragment import Codec
from gazette.runtime.tasks import Pool

METHODS: Final = "GET, HEAD, PUT"
DECODED_BYTES_MAX: Final = 256 << 20
"""Upper bound of a decoded body in bytes. A few MiB of gzip may become many GiB."""

_SMALL_BYTES: Final = 1 << 12
"""Upper bound of bytes that are decoded on the event loop: they become at most one chunk at a time."""
_ENCODINGS: Final = {"gzip": "gzip", "x-gzip": "gzip"}
_DIGESTS: Final = ("content-digest", "content-md5", "digest", "repr-digest")
_NOT_FOR_APPENDS: Final = (
    "content-range",
    "if-none-match",
    "if-range",
    "if-unmodified-since",
    "range",
    *_DIGESTS,
)


def check_append(request: Request) -> bool:
    """Return True if the body is compressed by gzip.

    Raise ``Invalid`` or ``Refusal`` for headers and arguments that an append cannot honour.
    """
    check_headers(request)
    if request.url.query:
        raise Invalid(f"an append takes no query ({request.url.query})")
    for name in _NOT_FOR_APPENDS:
        if name in request.headers:
            raise Invalid(f"an append takes no header {name}")
    if len(request.headers.getlist("if-match")) > 1:
        raise Invalid("the header if-match is given twice")
    return content_encoding(request, _ENCODINGS) == "gzip"


def listed(request: Request, name: str) -> str | None:
    """Return a header that is a list, joined from all its lines in the request; None if it is absent."""
    lines = request.headers.getlist(name)
    return ", ".join(lines) if lines else None


async def gunzipped(
    parts: AsyncGenerator[bytes, None], pool: Pool, limit: int = DECODED_BYTES_MAX
) -> AsyncGenerator[bytes, None]:
    """Yield the content of a body that is compressed by gzip, in chunks.

    Only small parts are decoded on the event loop. Raise ``Invalid`` for a body that is damaged or ends
    early. Raise ``Refusal`` if it has more than ``limit`` bytes of content.
    """
    decompressor = new_decompressor(Codec.GZIP)
    remaining = limit
    try:
        async with aclosing(parts):
            async for part in parts:
                data, is_small = bytes(part), len(part) <= _SMALL_BYTES
                while data or not decompressor.needs_input:
                    if is_small and data:
                        chunk = decompressor.decompress(data, CHUNK_BYTES)
                    else:
                        chunk = await pool.run(decompressor.decompress, data, CHUNK_BYTES)
                    # From now on, the decompressor has all bytes of the part.
                    data, remaining = b"", remaining - len(chunk)
                    if remaining < 0:
                        raise Refusal(
                            413, f"the decoded body has more than {limit} bytes: send several"
                        )
                    if chunk:
                        yield chunk
        decompressor.finish()
    except Corrupt as error:
        raise Invalid(f"the body is not what Content-Encoding says: {error}") from error
