"""200 conversations with tools, and the calls that they ask for: written for this project, none copied from a published set.

Rows of values fill the sentences, so that the cases stay few lines, and the cases of a kind share their tools: a server that keeps
prefixes reads these once.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

KINDS = ("simple", "multiple", "parallel", "irrelevance", "long")
Call = tuple[
    str, Mapping[str, Any]
]  # a function, and its arguments; of a tuple of values any one is right, None stands for absence


@dataclass(frozen=True)
class ToolCase:
    """A question, the tools beside it, and the calls that answer it, in any order."""

    kind: str
    question: str
    tools: tuple[dict[str, Any], ...]
    calls: tuple[Call, ...]


def _tool(name: str, about: str, optional: str = "", /, **fields: Any) -> dict[str, Any]:
    """A function in OpenAI's spelling. fields: what each argument is, as `integer: the width`, or the texts that it may be."""
    properties: dict[str, Any] = {}
    for key, value in fields.items():
        if isinstance(value, list):
            properties[key] = {"type": "string", "enum": value}
        else:
            kind, _, text = value.partition(": ")
            properties[key] = {"type": kind, "description": text}
    required = [key for key in fields if key not in optional.split()]
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}


_TEXT = "string: "
_TOOLS = {
    tool["function"]["name"]: tool
    for tool in (
        _tool("get_weather", "Today's weather in a city.", "unit", city=f"{_TEXT}the city", unit=["celsius", "fahrenheit"]),
        _tool(
            "convert_currency",
            "Convert an amount of money.",
            amount="number: the amount",
            source=f"{_TEXT}the currency's code, as EUR",
            target=f"{_TEXT}the other currency's code",
        ),
        _tool("set_timer", "Start a timer.", "label", minutes="integer: how long it runs", label=f"{_TEXT}what it is for"),
        _tool(
            "search_flights",
            "Search flights.",
            origin=f"{_TEXT}the city of departure",
            destination=f"{_TEXT}the city of arrival",
            date=f"{_TEXT}the day, as 2027-01-31",
        ),
        _tool("translate_text", "Translate a text.", text=f"{_TEXT}the text", language=f"{_TEXT}the language to translate into"),
        _tool(
            "resize_image",
            "Change the size of an image file.",
            path=f"{_TEXT}the file",
            width="integer: in pixels",
            height="integer: in pixels",
        ),
        _tool("play_song", "Play a song.", "artist", title=f"{_TEXT}the song's title", artist=f"{_TEXT}who plays it"),
        _tool("run_command", "Run a command in a shell.", command=f"{_TEXT}the command line"),
        _tool("send_email", "Send an email.", to=f"{_TEXT}the address", subject=f"{_TEXT}the subject", body=f"{_TEXT}the text"),
        _tool(
            "create_event",
            "Put an event into the calendar.",
            title=f"{_TEXT}the event's title",
            date=f"{_TEXT}the day, as 2027-01-31",
            hour="integer: the hour when it begins, 0 to 23",
        ),
        _tool("list_events", "The events of a day.", date=f"{_TEXT}the day, as 2027-01-31"),
        _tool("find_contact", "The address and phone number of a person.", name=f"{_TEXT}the person's name"),
        _tool("create_note", "Keep a note.", text=f"{_TEXT}the note's text"),
        _tool("read_file", "Read a file.", path=f"{_TEXT}the file"),
        _tool("write_file", "Write a file, and replace what was there.", path=f"{_TEXT}the file", content=f"{_TEXT}the whole text"),
        _tool("list_directory", "The names in a directory.", path=f"{_TEXT}the directory"),
        _tool("move_file", "Move or rename a file.", source=f"{_TEXT}the file", target=f"{_TEXT}its new path"),
        _tool("delete_file", "Delete a file.", path=f"{_TEXT}the file"),
        _tool("search_text", "Find lines in the files of a directory.", text=f"{_TEXT}what to find", path=f"{_TEXT}the directory"),
        _tool(
            "edit_file",
            "Replace a text in a file by another one.",
            path=f"{_TEXT}the file",
            old_text=f"{_TEXT}the text to replace",
            new_text=f"{_TEXT}the text that takes its place",
        ),
        _tool("apply_patch", "Apply a patch to the working directory.", patch=f"{_TEXT}the patch, a unified diff"),
        _tool(
            "set_light",
            "Set a room's light.",
            room=f"{_TEXT}the room",
            brightness="integer: 0 for off to 100",
        ),
        _tool("set_temperature", "Set the heating of a room.", room=f"{_TEXT}the room", degrees="number: in degrees Celsius"),
        _tool("lock_door", "Lock or unlock a door.", door=f"{_TEXT}which door", locked="boolean: whether it shall be locked"),
        _tool("start_vacuum", "Let the robot vacuum rooms.", rooms="array: the names of the rooms"),
    )
}
_TOOLS["start_vacuum"]["function"]["parameters"]["properties"]["rooms"]["items"] = {"type": "string"}


def _set(*names: str) -> tuple[dict[str, Any], ...]:
    return tuple(_TOOLS[name] for name in names)


_OFFICE = _set("send_email", "create_event", "list_events", "find_contact", "create_note", "translate_text")
_FILES = _set("read_file", "write_file", "list_directory", "move_file", "delete_file", "search_text", "run_command")
_HOME = _set("set_light", "set_temperature", "lock_door", "start_vacuum", "play_song", "get_weather", "set_timer")
_EDITOR = _set("read_file", "write_file", "edit_file", "apply_patch", "run_command")

# A sentence, the function that it asks for, and rows of values: each fills the sentence and is the call's arguments.
_SIMPLE: tuple[tuple[str, str, list[dict[str, Any]]], ...] = (
    (
        "What is the weather in {city} in degrees {unit}?",
        "get_weather",
        [
            {"city": city, "unit": unit}
            for city, unit in (
                ("Lisbon", "celsius"),
                ("Chicago", "fahrenheit"),
                ("Osaka", "celsius"),
                ("Denver", "fahrenheit"),
                ("Tromsø", "celsius"),
            )
        ],
    ),
    (
        "How much are {amount} {source} in {target}?",
        "convert_currency",
        [
            {"amount": amount, "source": source, "target": target}
            for amount, source, target in (
                (250, "EUR", "JPY"),
                (19.99, "USD", "GBP"),
                (1200, "CHF", "EUR"),
                (0.5, "GBP", "SEK"),
                (7340, "JPY", "USD"),
            )
        ],
    ),
    (
        "Set a timer for {minutes} minutes and label it {label}.",
        "set_timer",
        [
            {"minutes": minutes, "label": label}
            for minutes, label in ((12, "pasta"), (90, "laundry"), (3, "tea"), (45, "nap"), (25, "focus"))
        ],
    ),
    (
        "Find me flights from {origin} to {destination} on {date}.",
        "search_flights",
        [
            {"origin": origin, "destination": destination, "date": date}
            for origin, destination, date in (
                ("Vienna", "Oslo", "2027-02-14"),
                ("Boston", "Dublin", "2027-05-03"),
                ("Seoul", "Sydney", "2027-11-30"),
                ("Nairobi", "Cairo", "2028-01-09"),
                ("Lima", "Madrid", "2027-08-21"),
            )
        ],
    ),
    (
        'Translate "{text}" into {language}.',
        "translate_text",
        [
            {"text": text, "language": language}
            for text, language in (
                ("Where is the station?", "French"),
                ("Two coffees, please", "Italian"),
                ("It's raining", "German"),
                ('He said "hello" and left', "Spanish"),
                ("100% of it", "Polish"),
            )
        ],
    ),
    (
        "Resize {path} to {width} by {height} pixels.",
        "resize_image",
        [
            {"path": path, "width": width, "height": height}
            for path, width, height in (
                ("photos/cat.png", 640, 480),
                ("banner.jpg", 1920, 300),
                ("img/logo.webp", 64, 64),
                ("/data/scan_01.tiff", 2480, 3508),
                ("a b.png", 100, 50),
            )
        ],
    ),
    (
        'Play "{title}" by {artist}.',
        "play_song",
        [
            {"title": title, "artist": artist}
            for title, artist in (
                ("Blue Rooms", "The Lanterns"),
                ("Harbour", "Ida Voss"),
                ("99 Doors", "Kestrel"),
                ("Don't Wait", "Milo & June"),
                ("Étude", "Noor Haddad"),
            )
        ],
    ),
    (
        "Run this command: {command}",
        "run_command",
        [
            {"command": command}
            for command in (
                "ls -la /tmp",
                "python3 -m pytest -q tests",
                "grep -rn 'TODO' src | wc -l",
                'echo "a  b" > out.txt',
                "find . -name '*.py' -exec wc -l {} +",
            )
        ],
    ),
    (
        'Send an email to {to} with the subject "{subject}" and the text "{body}".',
        "send_email",
        [
            {"to": to, "subject": subject, "body": body}
            for to, subject, body in (
                ("mara@example.com", "Lunch", "Are you free at noon?"),
                ("team@example.org", "Release 2.1", "It is out."),
                ("jo@example.net", "Keys", "They're on the table."),
                ("ops@example.com", "Disk at 91%", "Please clean /var/log."),
                ("ines@example.org", "Danke", "Bis bald, grüß alle."),
            )
        ],
    ),
    (
        'Put "{title}" into my calendar on {date}, beginning at {hour} o\'clock (24-hour clock).',
        "create_event",
        [
            {"title": title, "date": date, "hour": hour}
            for title, date, hour in (
                ("Dentist", "2027-03-02", 9),
                ("Board meeting", "2027-06-17", 14),
                ("Concert", "2027-10-08", 20),
                ("Flight home", "2027-12-23", 6),
                ("Call with Ana", "2027-04-30", 11),
            )
        ],
    ),
)
# Calls as `function: argument=value; ...` would hide their types, so they are written as they are.
_MULTIPLE: tuple[tuple[tuple[dict[str, Any], ...], tuple[tuple[str, str, dict[str, Any]], ...]], ...] = (
    (
        _OFFICE,
        (
            ("What do I have to do on 2027-03-15?", "list_events", {"date": "2027-03-15"}),
            ("Which phone number does Petra Lind have?", "find_contact", {"name": "Petra Lind"}),
            ("Remember that the spare key is under the pot.", "create_note", {"text": ("the spare key is under the pot",)}),
            ("How do you say 'good night' in Portuguese?", "translate_text", {"text": "good night", "language": "Portuguese"}),
            (
                'Enter "Yoga" on 2027-01-18 at 18 o\'clock.',
                "create_event",
                {"title": "Yoga", "date": "2027-01-18", "hour": 18},
            ),
            ("Is anything in my calendar on 2027-07-01?", "list_events", {"date": "2027-07-01"}),
            ("Look up the address of Omar Said.", "find_contact", {"name": "Omar Said"}),
            (
                'Mail lee@example.com, subject "Invoice 77", text "It is attached."',
                "send_email",
                {"to": "lee@example.com", "subject": "Invoice 77", "body": "It is attached."},
            ),
            ('Note down: "buy 3 lemons"', "create_note", {"text": "buy 3 lemons"}),
            ('Translate "open the window" into Dutch', "translate_text", {"text": "open the window", "language": "Dutch"}),
            (
                'Schedule "Review" for 2027-09-09 at 10.',
                "create_event",
                {"title": "Review", "date": "2027-09-09", "hour": 10},
            ),
            (
                'Write to kim@example.org that "the train is late", with the subject "Delay".',
                "send_email",
                {"to": "kim@example.org", "subject": "Delay", "body": "the train is late"},
            ),
            ("I need the contact details of Yuki Mori.", "find_contact", {"name": "Yuki Mori"}),
            ("Show my appointments of 2028-02-29.", "list_events", {"date": "2028-02-29"}),
            ('Keep this as a note: "gate code 4471"', "create_note", {"text": "gate code 4471"}),
            ('What is "thank you very much" in Swedish?', "translate_text", {"text": "thank you very much", "language": "Swedish"}),
        ),
    ),
    (
        _FILES,
        (
            ("What is in the file config/app.toml?", "read_file", {"path": "config/app.toml"}),
            ("Which files are in src/utils?", "list_directory", {"path": ("src/utils", "src/utils/")}),
            ("Rename notes.txt to notes-old.txt.", "move_file", {"source": "notes.txt", "target": "notes-old.txt"}),
            ("Delete build/output.log.", "delete_file", {"path": "build/output.log"}),
            ('Find the lines with "def main" in the directory src.', "search_text", {"text": "def main", "path": ("src", "src/")}),
            ("Run `git status --short`.", "run_command", {"command": "git status --short"}),
            ('Write "ok" to the file state.txt.', "write_file", {"path": "state.txt", "content": "ok"}),
            ("Show me README.md.", "read_file", {"path": "README.md"}),
            ("List what is in /etc/nginx.", "list_directory", {"path": ("/etc/nginx", "/etc/nginx/")}),
            ("Move a/b.csv to archive/b.csv.", "move_file", {"source": "a/b.csv", "target": "archive/b.csv"}),
            ("Remove the file tmp/cache.db.", "delete_file", {"path": "tmp/cache.db"}),
            ('Where in lib is "TODO(ana)" written?', "search_text", {"text": "TODO(ana)", "path": ("lib", "lib/")}),
            ("Execute `make test` for me.", "run_command", {"command": "make test"}),
            ('Save the text "port=8080" in server.env.', "write_file", {"path": "server.env", "content": "port=8080"}),
            ("Read the file 'my notes/day 1.md'.", "read_file", {"path": "my notes/day 1.md"}),
            ("Start the command `npm run build`.", "run_command", {"command": "npm run build"}),
            ('Search the directory docs for "install".', "search_text", {"text": "install", "path": ("docs", "docs/")}),
        ),
    ),
    (
        _HOME,
        (
            ("Set the light in the kitchen to 40 percent.", "set_light", {"room": "kitchen", "brightness": 40}),
            ("Make the bedroom 18.5 degrees warm.", "set_temperature", {"room": "bedroom", "degrees": 18.5}),
            ("Lock the front door.", "lock_door", {"door": ("front", "front door"), "locked": True}),
            ("Unlock the garage door.", "lock_door", {"door": ("garage", "garage door"), "locked": False}),
            ("Vacuum the hall and the office.", "start_vacuum", {"rooms": ["hall", "office"]}),
            ('Play the song "Slow River".', "play_song", {"title": "Slow River", "artist": (None, "")}),
            ("How is the weather in Porto?", "get_weather", {"city": "Porto", "unit": (None, "celsius", "fahrenheit")}),
            ("Start a timer of 8 minutes.", "set_timer", {"minutes": 8, "label": (None, "")}),
            ("Turn off the light in the bathroom.", "set_light", {"room": "bathroom", "brightness": 0}),
            ("Heat the living room to 21 degrees.", "set_temperature", {"room": "living room", "degrees": 21}),
            ("Please lock the cellar door.", "lock_door", {"door": ("cellar", "cellar door"), "locked": True}),
            ("Let the robot clean the kitchen.", "start_vacuum", {"rooms": ["kitchen"]}),
            ('I want to hear "Paper Moonlight" by Ada Finch.', "play_song", {"title": "Paper Moonlight", "artist": "Ada Finch"}),
            ("Is it warm in Athens, in celsius?", "get_weather", {"city": "Athens", "unit": "celsius"}),
            ("Set the office light to full brightness, 100.", "set_light", {"room": "office", "brightness": 100}),
            ("Wake me in 30 minutes with a timer called nap.", "set_timer", {"minutes": 30, "label": "nap"}),
            ("The nursery should have 22 degrees.", "set_temperature", {"room": "nursery", "degrees": 22}),
        ),
    ),
)
_IRRELEVANT = (
    (
        _OFFICE,
        "Why is the sky blue?|What is 17 times 3?|Name three rivers of Africa.|Who wrote Don Quixote?|Explain what a prime number "
        "is.|Tell me a short joke.|What is the capital of Canada?|Give me a synonym for 'quick'.|How many legs does a spider have?|"
        "What does HTTP stand for?",
    ),
    (
        _HOME,
        "What is the boiling point of water?|Write a haiku about winter.|Which planet is the largest?|What is the square root of "
        "144?|Who painted the Mona Lisa?|Spell 'necessary'.|What is a verb?|How do bees make honey?|Is 91 a prime number?|"
        "Recommend a book about the sea.",
    ),
    (
        _FILES,
        "What is recursion?|What is the difference between a list and a tuple in Python?|Who invented the telephone?|What does CPU "
        "stand for?|Thanks, that was all.|Explain what a hash table is in a sentence.|What is 2 to the power of 10?|Hello, how are "
        "you?|Which language is spoken in Brazil?|What is the plural of 'index'?",
    ),
)


def _parallel() -> Iterator[ToolCase]:
    for one, other in (("Rome", "Paris"), ("Bergen", "Malmö"), ("Quito", "La Paz"), ("Delhi", "Mumbai"), ("Perth", "Darwin")):
        calls = tuple(("get_weather", {"city": city, "unit": (None, "celsius", "fahrenheit")}) for city in (one, other))
        yield ToolCase("parallel", f"How is the weather in {one} and in {other}?", _HOME, calls)
    for rooms in (
        ("kitchen", "hall"),
        ("bedroom", "bathroom"),
        ("office", "attic", "cellar"),
        ("lounge", "nursery"),
        ("porch", "den"),
    ):
        named = ", the ".join(rooms[:-1]) + f" and the {rooms[-1]}"
        lights: tuple[Call, ...] = tuple(("set_light", {"room": room, "brightness": 30}) for room in rooms)
        yield ToolCase("parallel", f"Set the lights of the {named} to 30.", _HOME, lights)
    for number, (path, name) in enumerate(
        (("a.txt", "src"), ("setup.py", "tests"), ("LICENSE", "docs"), ("go.mod", "cmd"), ("x.c", "inc"))
    ):
        both: tuple[Call, ...] = (("read_file", {"path": path}), ("list_directory", {"path": (name, f"{name}/")}))
        yield ToolCase("parallel", f"Read {path}, and list the directory {name}.", _FILES, both)
        gone = (f"old{number}.log", f"tmp{number}.bak")
        deleted: tuple[Call, ...] = tuple(("delete_file", {"path": one}) for one in gone)
        yield ToolCase("parallel", f"Delete the files {gone[0]} and {gone[1]}.", _FILES, deleted)
    for person, day in (
        ("Ana", "2027-02-01"),
        ("Ben", "2027-03-03"),
        ("Cleo", "2027-04-05"),
        ("Dai", "2027-05-07"),
        ("Eva", "2027-06-09"),
    ):
        both = (("find_contact", {"name": person}), ("list_events", {"date": day}))
        yield ToolCase("parallel", f"Look up the contact {person}, and tell me the events of {day}.", _OFFICE, both)
        texts: tuple[Call, ...] = tuple(
            ("translate_text", {"text": f"good day, {person}", "language": one}) for one in ("French", "Greek")
        )
        yield ToolCase("parallel", f'Translate "good day, {person}" into French, and into Greek.', _OFFICE, texts)


_WORDS = ("alpha", "beta", "gamma", "delta", "omega", "sigma", "kappa", "lambda", "theta", "zeta")


def _file(number: int) -> tuple[str, str]:
    """A path and a text of ten to thirty lines with what JSON must escape: quotes, backslashes, tabs, other alphabets."""
    word, other = _WORDS[number % 10], _WORDS[(number + 3) % 10]
    match number % 5:
        case 0:
            body = "\n\n".join(
                f'def {name}(value: int) -> str:\n    """Say {name} with a number."""\n    if value < {number}:\n'
                f"        raise ValueError(f\"too small: {{value!r}}\")\n    return '{name}:\\t' + str(value)"
                for name in (word, other)
            )
            return f"src/{word}.py", f'import sys\n\n\n{body}\n\n\nif __name__ == "__main__":\n    print({word}(int(sys.argv[1])))'
        case 1:
            rows = ",\n".join(f'    {{"id": {one}, "name": "{word} \\"{one}\\"", "ok": true, "rate": {one}.5}}' for one in range(6))
            return f"data/{word}.json", f'{{\n  "version": {number},\n  "items": [\n{rows}\n  ]\n}}'
        case 2:
            steps = "\n".join(f'echo "step {one}: {word}"\ncp -- "$SRC/{one}.txt" "$DST/" || exit {one}' for one in range(1, 6))
            return f"bin/{word}.sh", f"#!/bin/sh\nset -eu\nSRC=${{1:-.}}\nDST=$HOME/{other}-{number}\n{steps}\nprintf '%s\\n' done"
        case 3:
            items = "\n".join(f"    <li class=\"{word}\" data-n='{one}'>{other} &amp; {one} – naïve</li>" for one in range(8))
            return (
                f"web/{word}.html",
                f"<!doctype html>\n<html>\n<body>\n  <h1>{word} {number}</h1>\n  <ul>\n{items}\n  </ul>\n</body>\n</html>",
            )
        case _:
            parts = "\n".join(f"  {other}_{one}:\n    path: C:\\\\{word}\\\\{one}\n    tags: [a, 'b c', \"d\"]" for one in range(5))
            return f"conf/{word}.yaml", f"# {word} {number}\nname: {word}\nservices:\n{parts}"


def _long() -> Iterator[ToolCase]:
    for number in range(20):
        path, text = _file(number)
        question = f"Write this text to the file {path}, exactly as it stands here:\n\n```\n{text}\n```"
        yield ToolCase("long", question, _EDITOR, (("write_file", {"path": path, "content": text}),))
    for number in range(10):
        path, text = _file(5 * number)
        name = _WORDS[5 * number % 10]
        body = text.splitlines()
        old = "\n".join(body[body.index(f"def {name}(value: int) -> str:") + 2 :][:3])
        new = f'    checked = max(value, {number})\n    return "{name}" + "\\n" * checked'
        question = f"In {path}, replace\n\n```\n{old}\n```\n\nby\n\n```\n{new}\n```\n\nwith edit_file."
        yield ToolCase("long", question, _EDITOR, (("edit_file", {"path": path, "old_text": old, "new_text": new}),))
    for number in range(10):
        path, text = _file(number)
        lines = text.splitlines()
        context, removed = lines[0], lines[1] or lines[2]
        kept = [] if lines[1] else [" "]
        hunk = [f" {context}", *kept, f"-{removed}", f'+{removed}  # {_WORDS[number]} "{number}"', f" {lines[3]}"]
        patch = "\n".join([f"--- a/{path}", f"+++ b/{path}", f"@@ -1,{3 + len(kept)} +1,{3 + len(kept)} @@", *hunk])
        yield ToolCase(
            "long", f"Apply this patch with apply_patch:\n\n```diff\n{patch}\n```", _EDITOR, (("apply_patch", {"patch": patch}),)
        )


def tool_cases() -> list[ToolCase]:
    """All cases, kind by kind."""
    found = [
        ToolCase("simple", sentence.format(**row), _set(name), ((name, row),)) for sentence, name, rows in _SIMPLE for row in rows
    ]
    found += [ToolCase("multiple", said, tools, ((name, row),)) for tools, rows in _MULTIPLE for said, name, row in rows]
    found += _parallel()
    found += [ToolCase("irrelevance", said, tools, ()) for tools, questions in _IRRELEVANT for said in questions.split("|")]
    return [*found, *_long()]
