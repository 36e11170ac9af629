"""The alphabet of byte-level tokenizers: one printable character for each byte.

Source: `bytes_to_unicode` of GPT-2's encoder.py (Radford et al. 2019), which every byte-level
vocabulary since has kept.
"""


def _alphabet() -> dict[str, int]:
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    stand_ins = {byte: 0x100 + position for position, byte in enumerate(others)}
    return {chr(stand_ins.get(byte, byte)): byte for byte in range(256)}


BYTE_OF_CHARACTER = _alphabet()


def token_bytes(token: str) -> bytes:
    """Return the bytes that a token of a byte-level vocabulary stands for.

    A token with any character outside the alphabet (an added one) stands for its own text.
    """
    try:
        return bytes([BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:
        return token.encode()
