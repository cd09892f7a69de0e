"""The context of an error about a field."""

from __future__ import annotations

import pytest

from gazette.errors import Invalid, InvalidValue, TooLarge
from gazette.net.http_requests import Refusal
from gazette.protocol.text.validation import within


@pytest.mark.parametrize(
    "error",
    [
        Invalid("bad", path="Inner", hint="mend it", size=3),
        TooLarge("bad", path="Inner", size=3),
        InvalidValue("bad", path="Inner", size=3),
        Refusal(417, "bad", {"allow": "GET"}, path="Inner", size=3),
    ],
)
def test_an_error_keeps_its_type_and_facts(error: Invalid) -> None:
    """Callers decide by the type: a value of the application may be skipped, another error may not."""
    with pytest.raises(Invalid) as caught, within("Outer"):
        raise error
    assert type(caught.value) is type(error)
    assert str(caught.value) == "Outer.Inner: bad (size=3)"
    assert str(error) == "Inner: bad (size=3)"
    assert vars(caught.value) == vars(error) | {"path": "Outer.Inner"}
    assert caught.value.args == error.args
