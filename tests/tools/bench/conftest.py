"""The frontend's fakes, which the client drives."""

from tests.frontend.conftest import backend, tokenizer, tokenizer_dir

__all__ = ["backend", "tokenizer", "tokenizer_dir"]
