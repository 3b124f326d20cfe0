"""Where the numbers of a GGUF file's header are: a reader of our own, for honest files only."""

import struct

SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


def structural_fields(content: bytes) -> list[tuple[str, int, int]]:
    """(name, position, bytes) of every count, length, type, dimension and offset, and of the end of the header."""
    fields = [("version", 4, 4), ("tensor count", 8, 8), ("metadata count", 16, 8)]
    num_tensors, num_entries = struct.unpack_from("<QQ", content, 8)
    position = 24

    def number(name: str, size: int) -> int:
        nonlocal position
        fields.append((name, position, size))
        position += size
        return int.from_bytes(content[position - size : position], "little")

    def string(name: str) -> str:
        nonlocal position
        length = number(f"length of {name}", 8)
        position += length
        return content[position - length : position].decode()

    for _ in range(num_entries):
        key = string("a key")
        kind = number(f"type of {key}", 4)
        if kind == 9:
            item = number(f"item type of {key}", 4)
            count = number(f"count of {key}", 8)
            if item == 8:
                for _ in range(count):
                    string(f"a string of {key}")
            else:
                position += count * SCALAR_BYTES[item]
        elif kind == 8:
            string(key)
        else:
            position += SCALAR_BYTES[kind]
    for _ in range(num_tensors):
        name = string("a tensor name")
        for d in range(number(f"dimensions of {name}", 4)):
            number(f"dimension {d} of {name}", 8)
        number(f"type of {name}", 4)
        number(f"offset of {name}", 8)
    fields.append(("end of the header", position, 0))
    return fields
