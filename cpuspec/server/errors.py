"""Errors of requests: a mistake of the client, or something that the server cannot do now. Each has a status and a kind."""

from collections.abc import Callable
from typing import TypeVar

from cpuspec.errors import BackendError, CpuspecError, in_one_line

_T = TypeVar("_T")
_LONGEST_ERROR = 300


class RequestError(CpuspecError):
    """A request that ends without an answer.

    kind: the `type` of OpenAI's error object, which Anthropic's protocol translates. param: the field that is wrong.
    """

    status = 400
    kind = "invalid_request_error"
    retry_after_s: int | None = None

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextExceededError(RequestError):
    """A prompt that is too long, in the words by which agents know that they must shorten it.

    num_tokens, most: those of the prompt, and those that are taken; context_length: of the model, which holds an answer, too.
    detail: what is known besides.
    """

    def __init__(self, num_tokens: int, most: int, context_length: int, detail: str = "") -> None:
        shown = context_length if num_tokens >= context_length else most
        super().__init__(
            f"this model's maximum context length is {shown} tokens, and the prompt has {num_tokens} tokens{detail}; shorten it",
            "prompt",
            "context_length_exceeded",
        )
        # Claude Code reads the numbers from it, to know how much must go.
        self.for_anthropic = f"prompt is too long: {num_tokens} tokens > {most} maximum{detail}"


class UnauthorizedError(RequestError):
    """No key, or a wrong one."""

    status = 401
    kind = "authentication_error"


class ForbiddenError(RequestError):
    """A request that the server's settings do not allow, or whose Host header does not name this server."""

    status = 403
    kind = "permission_error"


class NotFoundError(RequestError):
    """A model, an adapter or a response that this server does not have."""

    status = 404
    kind = "not_found_error"

    def __init__(self, message: str, param: str = "model", code: str = "model_not_found") -> None:
        super().__init__(message, param, code)


class BodyTooLargeError(RequestError):
    """A body beyond the limit."""

    status = 413
    kind = "request_too_large"


class ClientGoneError(RequestError):
    """The client has left, so that nobody reads this error."""

    status = 499  # nginx's


class BusyError(RequestError):
    """The queue is full."""

    status = 429
    kind = "rate_limit_error"
    retry_after_s = 1


class UnavailableError(RequestError):
    """The model is being loaded, or the server is about to end."""

    status = 503
    kind = "overloaded_error"
    retry_after_s = 5


class TimeUpError(RequestError):
    """The request's time was up."""

    status = 504
    kind = "timeout_error"


class NotSupportedError(RequestError):
    """A feature that no model of this server has."""

    status = 501
    kind = "not_supported_error"


FAILED = "the server failed; its log says why"


class EngineFailedError(RequestError):
    """The engine failed while it computed this answer, perhaps because of another one."""

    status = 500
    kind = "server_error"


def as_request_error(error: CpuspecError) -> RequestError:
    """The error of a request that some part of the package raised: the client's fault unless a backend failed."""
    if isinstance(error, RequestError):
        return error
    return EngineFailedError(str(error)) if isinstance(error, BackendError) else RequestError(str(error))


def contained(function: Callable[[], _T]) -> _T:
    """Call the function. Raises EngineFailedError for a BaseException that is no Exception, such as a panic of a Rust library.

    No handler of errors would catch such an exception, and it might end the thread or the event loop.
    """
    try:
        return function()
    except Exception:
        raise
    except BaseException as error:
        raise EngineFailedError(f"a library failed: {type(error).__name__}: {in_one_line(str(error))[:_LONGEST_ERROR]}") from error
