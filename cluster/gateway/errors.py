"""Errors that a client sees, with the statuses and codes of OpenAI's API.

The texts are fixed and speak of the request only; what happened inside goes to the log.
"""

from __future__ import annotations

from core.errors import HalfmoonError


class ApiError(HalfmoonError):
    """An answer other than success. `param` names the field at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, object]:
        """Return the JSON body, the same for a status answer and for an event in a stream."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


def invalid(param: str, message: str) -> ApiError:
    """Make the error for a field that cannot be served as it is."""
    return ApiError(400, message, param=param)


def unsupported(param: str) -> ApiError:
    """Make the error for a known field that is not supported with this value."""
    return ApiError(
        400, f"`{param}` is not supported with this value.", param=param, code="unsupported_value"
    )


def model_not_found(name: str) -> ApiError:
    """Make the error for another model than the one served."""
    return ApiError(
        404, f"The model `{name}` does not exist.", param="model", code="model_not_found"
    )


def context_length_exceeded(
    param: str, limit: int, num_prompt_tokens: int, num_new_tokens: int
) -> ApiError:
    """Make the error for prompt and output together longer than the context."""
    message = (
        f"This model's maximum context length is {limit} tokens. However, you requested "
        f"{num_prompt_tokens + num_new_tokens} tokens ({num_prompt_tokens} in the prompt, "
        f"{num_new_tokens} in the completion)."
    )
    return ApiError(400, message, param=param, code="context_length_exceeded")


def text_too_long(param: str, limit: int, min_tokens: int) -> ApiError:
    """Make the error for a text that is too long before it is tokenised."""
    message = (
        f"This model's maximum context length is {limit} tokens. However, `{param}` has at least "
        f"{min_tokens} tokens."
    )
    return ApiError(400, message, param=param, code="context_length_exceeded")


def overloaded(retry_after_s: float) -> ApiError:
    """Make the error for a request that is refused because of the load."""
    return ApiError(
        429,
        "The server is overloaded. Try again later.",
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        retry_after_s=retry_after_s,
    )


def unavailable(retry_after_s: float) -> ApiError:
    """Make the error for a request that no worker could serve in time."""
    message = "The server cannot serve this request now. Try again later."
    return _service_unavailable(message, retry_after_s)


def shutting_down(retry_after_s: float) -> ApiError:
    """Make the error for a request that the end of this gateway cuts off."""
    return _service_unavailable("The server is shutting down.", retry_after_s)


def too_many_connections(retry_after_s: float) -> ApiError:
    """Make the error for a connection over the limit."""
    message = "The server has too many connections. Try again later."
    return _service_unavailable(message, retry_after_s)


def _service_unavailable(message: str, retry_after_s: float) -> ApiError:
    return ApiError(
        503,
        message,
        kind="server_error",
        code="service_unavailable",
        retry_after_s=retry_after_s,
    )


def internal(reference: str) -> ApiError:
    """Make the error for a fault of ours; `reference` finds it in the log."""
    return ApiError(
        500, f"The server failed. Reference: {reference}", kind="server_error", code="server_error"
    )
