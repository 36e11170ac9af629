"""State that is copied and compared often: what the explorers need of every part of the model."""

from dataclasses import fields


class Record:
    """Base of the model's dataclasses: plain values, and lists, sets and dicts of them or of records."""

    def copy(self):
        new = object.__new__(type(self))
        for name in self.names():
            setattr(new, name, _copied(getattr(self, name)))
        return new

    def key(self):
        """Return what makes two of these the same, times left out: exploring, any delay is possible."""
        return tuple(_key(getattr(self, name)) for name in self.names() if not name.endswith("_s"))

    @classmethod
    def names(cls):
        if "_names" not in cls.__dict__:
            cls._names = tuple(field.name for field in fields(cls))
        return cls._names


def _copied(value):
    if isinstance(value, dict):
        return {k: v.copy() if isinstance(v, Record) else v for k, v in value.items()}
    return value.copy() if isinstance(value, Record | list | set) else value


def _key(value):
    if isinstance(value, Record):
        return value.key()
    if isinstance(value, dict):
        return tuple(sorted((k, v.key() if isinstance(v, Record) else v) for k, v in value.items()))
    if isinstance(value, set):
        return tuple(sorted(value))
    return tuple(value) if isinstance(value, list) else value
