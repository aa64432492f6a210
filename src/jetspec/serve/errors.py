"""What goes wrong, as OpenAI's clients expect to be told: a status and {"error": {message, type, param,
code}}.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jetspec.errors import UserError, is_out_of_memory

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
SOON = {"Retry-After": "1"}  # seconds


class ApiError(Exception):
    """An answer other than 200.

    param: the field of the request that is at fault; code: a word for programs, where there is one.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object of the answer; its message is one line."""
        kind = "server_error" if self.status >= 500 else _TYPES.get(self.status, "invalid_request_error")
        message = " ".join(str(self).split())
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that cannot be answered as it stands."""
    return ApiError(400, message, param=param, code=code)


def shutting_down() -> ApiError:
    """For requests that come, or still run, when the server ends."""
    return ApiError(
        503,
        "the server is shutting down; ask again later",
        code="shutting_down",
        headers={"Retry-After": "10"},
    )


def out_of_memory() -> ApiError:
    """For a request that had to go, so that the others find memory."""
    return ApiError(
        503,
        "no memory is left for this request; ask again when fewer run, or with a shorter prompt",
        code="out_of_memory",
        headers={"Retry-After": "10"},
    )


def failure(error: BaseException) -> ApiError:
    """What a client is told of an exception from the engine; the details of bugs stay in the log."""
    if isinstance(error, ApiError):
        return error
    if is_out_of_memory(error):
        return out_of_memory()
    if isinstance(error, UserError):
        return ApiError(500, str(error), code="decoding_failed")
    return ApiError(500, "the server failed at this request; its log says why", code="internal_error")
