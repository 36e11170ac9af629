"""Random grammars, most of which no person would write: nested, ambiguous, recursive, empty and huge."""

import json
import random
from typing import Any

from tandem.wire.generation import Grammar

_LETTERS = ("-", "a", "ab", "--", "é")
_COUNTS = (0, 1, 2, 9, 99, 999, 100_000)


def random_grammar(rng: random.Random) -> Grammar:
    """Return a regular expression, an EBNF grammar or a JSON schema."""
    match rng.choice(("regex", "ebnf", "json_schema")):
        case "regex":
            return Grammar(kind="regex", text=_regex(rng, rng.randint(1, 5)))
        case "ebnf":
            names = ["root", "a", "b", "c"][: rng.randint(1, 4)]
            rules = [f"{name} ::= {_rule(rng, names, rng.randint(1, 3))}" for name in names]
            return Grammar(kind="ebnf", text="\n".join(rules))
        case _:
            return Grammar(kind="json_schema", text=json.dumps(_schema(rng, rng.randint(0, 3))))


def _repeated(rng: random.Random, text: str) -> str:
    low, high = sorted(rng.choices(_COUNTS, k=2))
    return text + rng.choice(("", "*", "+", "?", f"{{{low},{high}}}", f"{{{low}}}", f"{{{low},}}"))


def _regex(rng: random.Random, depth: int) -> str:
    if not depth:
        return _repeated(rng, rng.choice(("-", "a", ".", "[^a]", "[a-z-]", r"\w", r"\s")))
    parts = [_regex(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    return _repeated(rng, f"({rng.choice(('', '|')).join(parts)})")


def _rule(rng: random.Random, names: list[str], depth: int) -> str:
    if not depth:
        part = rng.choice((rng.choice(names), f'"{rng.choice(_LETTERS)}"', "[a-z-]", '""', "[^a]"))
        return part if part == '""' else _repeated(rng, part)
    parts = [_rule(rng, names, depth - 1) for _ in range(rng.randint(1, 3))]
    return _repeated(rng, f"({rng.choice((' ', ' | ')).join(parts)})")


def _schema(rng: random.Random, depth: int) -> dict[str, Any]:
    low, high = sorted(rng.choices(_COUNTS, k=2))
    kinds = ["string", "pattern", "integer", "enum", "reference"]
    match rng.choice(kinds + ["object", "array", "any of"] * bool(depth)):
        case "string":
            return {"type": "string", "minLength": low, "maxLength": high}
        case "pattern":
            return {"type": "string", "pattern": _regex(rng, 2)}
        case "integer":
            return {"type": "integer", "minimum": -low, "maximum": high}
        case "enum":
            return {"enum": [rng.choice(_LETTERS) * rng.randint(1, 9) for _ in range(low % 90 + 1)]}
        case "reference":
            return {"$ref": "#"}
        case "object":
            names = [rng.choice(_LETTERS) * number for number in range(1, rng.randint(2, 9))]
            properties = {name: _schema(rng, depth - 1) for name in names}
            required = rng.sample(names, rng.randint(0, len(names)))
            return {"type": "object", "properties": properties, "required": required}
        case "array":
            items = _schema(rng, depth - 1)
            return {"type": "array", "items": items, "minItems": low, "maxItems": high}
        case _:
            return {"anyOf": [_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}
