"""Answers of `cpuspec serve` that keep to JSON schemas: how many are valid, and what drafts and forced tokens are worth.

    python benchmarks/structured.py smollm2-135m-instruct --requests 200 --clients 1,4 --rounds 3

Requests ask for made-up data of SCHEMAS in turn: nested objects, enumerations, arrays, numbers with bounds, patterns. The same
requests are answered without drafts and forced tokens (`none`), with the tokens that a grammar forces (`forced`), and with these
and drafts (`auto`); the first two by one server, whose prefix cache is off. Answers are greedy and must not depend on the arm. What
ended by itself is checked by jsonschema-rs, which knows nothing of how it was made; answers that max_tokens cut off are counted.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated, Any

import jsonschema_rs
import typer
from record import PeerError, Rounds, print_figures, record, save, say, spread
from serving import Arm, own_arm, serving

from cpuspec.checkpoints.download import resolve_model
from cpuspec.cli.options import read_numbers
from cpuspec.errors import CpuspecError
from cpuspec.loadtest.client import Client
from cpuspec.metrics import now_s

THROUGHPUT, OVER = "output tokens/s", "output tokens/s over none"
ARMS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {  # by the server's --draft, with what each request has besides
    "none": {"none": {"speculation": {"draft": "none"}}, "forced": {}},
    "auto": {"auto": {}},
}
WARM_UPS = 2


def text(most: int) -> dict[str, Any]:
    """The schema of a text of 1 to `most` characters."""
    return {"type": "string", "minLength": 1, "maxLength": most}


def whole(low: int, high: int) -> dict[str, Any]:
    """The schema of an integer within bounds."""
    return {"type": "integer", "minimum": low, "maximum": high}


def record_of(**properties: Any) -> dict[str, Any]:
    """The schema of an object that has these properties and no others."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def list_of(item: Any, low: int, high: int) -> dict[str, Any]:
    """The schema of a list with n items."""
    return {"type": "array", "items": item, "minItems": low, "maxItems": high}


SCHEMAS: Mapping[str, dict[str, Any]] = {
    "the customer record of a person who lives in {}": record_of(
        name=text(30),
        age=whole(18, 99),
        status={"enum": ["active", "inactive", "pending"]},
        address=record_of(street=text(30), city=text(20), postal_code={"type": "string", "pattern": "^[0-9]{5}$"}),
        newsletter={"type": "boolean"},
    ),
    "an invoice of a shop in {}": record_of(
        invoice_number={"type": "string", "pattern": "^INV-[0-9]{4}$"},
        currency={"enum": ["EUR", "USD", "JPY"]},
        items=list_of(record_of(product=text(24), quantity=whole(1, 20), unit_price={"type": "number", "minimum": 0.5}), 1, 3),
        paid={"type": "boolean"},
    ),
    "the weather report of a week in {}": record_of(
        location=text(24),
        unit={"const": "celsius"},
        days=list_of(record_of(day={"enum": ["Mon", "Tue", "Wed", "Thu", "Fri"]}, low=whole(-30, 20), high=whole(-10, 45)), 2, 4),
    ),
    "a restaurant in {} with its reviews": record_of(
        restaurant_name=text(30),
        cuisine={"enum": ["italian", "indian", "french", "mexican", "japanese"]},
        average_rating={"type": "number", "minimum": 0, "maximum": 5},
        reviews=list_of(record_of(reviewer=text(20), stars=whole(1, 5), comment=text(60)), 1, 2),
    ),
    "a travel plan for a visit to {}": record_of(
        traveler_count=whole(1, 9),
        transport={"anyOf": [{"const": "train"}, {"const": "plane"}, {"const": "bus"}]},
        departure_date={"type": "string", "format": "date"},
        hotel=record_of(hotel_name=text(30), stars=whole(1, 5), breakfast_included={"type": "boolean"}),
        activities=list_of(text(30), 1, 3),
    ),
}
CITIES = (
    *("Paris", "London", "Rome", "Madrid", "Berlin", "Vienna", "Prague", "Athens", "Lisbon", "Dublin"),
    *("Oslo", "Helsinki", "Warsaw", "Budapest", "Cairo", "Nairobi", "Lagos", "Tokyo", "Osaka", "Seoul"),
    *("Beijing", "Shanghai", "Delhi", "Mumbai", "Bangkok", "Sydney", "Melbourne", "Toronto", "Montreal", "Chicago"),
    *("Boston", "Denver", "Seattle", "Miami", "Lima", "Bogota", "Santiago", "Havana", "Quito", "Geneva"),
)


def main(
    model: Annotated[str, typer.Argument(help="Recipe name, or GGUF file.")],
    requests: Annotated[int, typer.Option(help="Requests to each arm.", min=1)] = 200,
    clients: Annotated[str, typer.Option(help="Numbers of clients, separated by commas.")] = "1,4",
    max_tokens: Annotated[int, typer.Option(help="Tokens of an answer at most.", min=1)] = 384,
    threads: Annotated[int, typer.Option(help="Threads.", min=1)] = 2,
    rounds: Annotated[int, typer.Option(help="Rounds; medians are quoted.", min=1)] = 3,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here as well.")] = None,
) -> None:
    """Print how many answers are valid, and the speed of each arm."""
    try:
        counts = read_numbers(clients, "--clients")
        path = resolve_model(model)
        bodies = [body for _, body in make_requests(requests, max_tokens)]
        schemas = [schema for schema, _ in make_requests(requests, max_tokens)]
        passed = Rounds(rounds, threads)
        speeds: dict[str, dict[str, list[float]]] = {}
        told: dict[str, int] = {"answers": 0, "valid": 0, "cut off": 0, "invalid": 0, "differing": 0}
        for number in passed:
            answers: dict[tuple[int, str], list[dict[str, Any]]] = {}
            for draft in list(ARMS)[:: -1 if number % 2 else 1]:
                with serving(make_arm(path, draft, max(counts), threads)) as client:
                    asyncio.run(ask_all(client, bodies[:WARM_UPS], 1))
                    for count in counts:
                        for name, extra in list(ARMS[draft].items())[:: -1 if number % 2 else 1]:
                            found, seconds = asyncio.run(ask_all(client, [body | dict(extra) for body in bodies], count))
                            num_tokens = sum(one["usage"]["completion_tokens"] for one in found)
                            speeds.setdefault(f"{count} clients", {}).setdefault(name, []).append(num_tokens / seconds)
                            answers[count, name] = found
                            say(f"{name}, {count} clients: {num_tokens / seconds:.1f} tokens/s, {num_tokens} tokens")
            for (count, _), found in answers.items():
                for schema, one, other in zip(schemas, found, answers[count, "none"], strict=True):
                    told["answers"] += 1
                    told[judge(schema, one)] += 1
                    told["differing"] += one["choices"][0]["message"]["content"] != other["choices"][0]["message"]["content"]
    except (CpuspecError, PeerError) as error:
        say(f"error: {error}")
        raise typer.Exit(1) from None
    figures = {f"{load}, {THROUGHPUT}": {name: spread(values) for name, values in of.items()} for load, of in speeds.items()}
    for load, of in speeds.items():
        over = {name: [one / none for one, none in zip(values, of["none"], strict=True)] for name, values in of.items()}
        figures[f"{load}, {OVER}"] = {name: spread(values) for name, values in over.items() if name != "none"}
    print_figures(figures)
    print("; ".join(f"{number} {name}" for name, number in told.items()))
    save(record("structured", path.name, passed) | {"max_tokens": max_tokens, "figures": figures, "counts": told}, json_file)
    if told["invalid"] or told["differing"]:
        raise typer.Exit(1)


def make_requests(count: int, max_tokens: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Schemas, and the bodies that ask for data of them; every city with every schema, then all over again."""
    asked = [(topic.format(city), schema) for city in CITIES for topic, schema in SCHEMAS.items()]
    return [
        (
            schema,
            {
                "messages": [{"role": "user", "content": f"Make up {topic}. Answer with JSON."}],
                "response_format": {"type": "json_schema", "json_schema": {"name": "data", "schema": schema, "strict": True}},
                "temperature": 0,
                "max_tokens": max_tokens,
            },
        )
        for topic, schema in islice(cycle(asked), count)
    ]


def make_arm(path: Path, draft: str, slots: int, threads: int) -> Arm:
    """The server of some arms."""
    return own_arm(path, draft, threads, slots, 2048, "--prefix-cache-gb", "0", "--drain-s", "0")


async def ask_all(client: Client, bodies: Sequence[dict[str, Any]], count: int) -> tuple[list[dict[str, Any]], float]:
    """The answers, at most `count` requests at once, and the seconds they took. Raises ServerError."""
    places, begin_s = asyncio.Semaphore(count), now_s()

    async def ask(body: dict[str, Any]) -> Any:
        async with places:
            return await client.post_json("/v1/chat/completions", body)

    return await asyncio.gather(*map(ask, bodies)), now_s() - begin_s


def judge(schema: dict[str, Any], answer: Mapping[str, Any]) -> str:
    """Whether an answer is "valid", "invalid" or "cut off"."""
    choice = answer["choices"][0]
    if choice["finish_reason"] != "stop":
        return "cut off"
    try:
        data = json.loads(choice["message"]["content"])
    except ValueError:
        return "invalid"
    return "valid" if jsonschema_rs.validator_for(schema, validate_formats=True).is_valid(data) else "invalid"


if __name__ == "__main__":
    typer.run(main)
