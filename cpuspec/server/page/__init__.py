"""The web page at `/`: a chat over `/v1/chat/completions`. Its files are beside this one, as they are served; nothing builds them.

The page may load nothing but these files and talk to nobody but this server, and its scripts cannot make markup of text: the
browser holds that (Content-Security-Policy with Trusted Types), whatever a model writes.
"""

from functools import cache
from importlib.resources import files

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

router = APIRouter(include_in_schema=False)

FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
    "/favicon.ico": ("icon.svg", "image/svg+xml"),  # browsers ask for it before they have read the page
}
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # a newer version of the server has a newer page
}


@cache
def _content(name: str) -> bytes:
    return files(__package__).joinpath(name).read_bytes()


async def file(request: Request) -> Response:
    """One of the page's files. Where Ollama's clients look for a server, they ask for no HTML and read this sentence."""
    if request.scope["path"] == "/" and "text/html" not in request.headers.get("accept", ""):
        return PlainTextResponse("Ollama is running", headers={"vary": "accept"})
    name, media_type = FILES[request.scope["path"]]
    return Response(_content(name), headers=HEADERS, media_type=media_type)


for _path in FILES:
    router.add_api_route(_path, file)
router.add_api_route("/", file, methods=["HEAD"])  # agents look this way whether there is a server
