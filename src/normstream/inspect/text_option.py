"""The options ``--text`` and ``--text-file`` of the commands that run a model on a text."""

from pathlib import Path


def given_text(text: str | None, text_file: Path | None) -> str | None:
    """The text that was given, or None for random tokens.

    Raises:
        ValueError: if both are given; for a file that cannot be read as UTF-8; for an empty text.

    >>> given_text("a word", None), given_text(None, None)
    ('a word', None)
    """
    if text is not None and text_file is not None:
        raise ValueError("text and text_file are both given; give one of them")
    if text_file is not None:
        try:
            text = text_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"cannot read {text_file} as a UTF-8 text: {error}") from error
    if text is not None and not text.strip():
        raise ValueError("the text is empty; give at least one word, or leave it out for random tokens")
    return text
