"""Which text a model is trained on, and how the text is cut into samples."""

from dataclasses import dataclass
from typing import Annotated

from tyro.conf import arg

from normstream.checks import check_types


@dataclass(frozen=True)
class DataConfig:
    """The corpus, its tokenizer and the way it is packed; ``load_data`` makes a ``Data`` of it.

    Raises ValueError for a number out of range.

    >>> DataConfig(seq_len=256).tokenizer
    'bytes'
    """

    source: Annotated[str, arg(aliases=("--data",))] = "stdlib"
    """stdlib (the sources of the running Python's standard library), books (extra [text]: three Bible versions and
    Shakespeare's plays), hf:NAME or hf:NAME:CONFIG (extra [hf]), or the path of a text file, .jsonl, .parquet (extra
    [parquet]), token shard (.npy, .bin), or folder of them."""
    tokenizer: str = "bytes"
    """bytes (256 bytes and end-of-text), bpe:N (byte-level BPE with N tokens, trained on the training split), or the
    path of a tokenizer.json."""
    text_column: str = "text"
    """The column that holds the text, in JSONL, Parquet and hf: sources."""
    seq_len: int = 128
    """Tokens in one sample."""
    validation_fraction: float = 0.05
    """The part of the documents that is held out; of a single document, its tail."""
    cross_document_attention: bool = False
    """Let a token attend to, and be predicted from, the documents packed before it in its sample."""
    positions_per_document: bool = False
    """Count positions from the start of each document in a sample, not from the start of the sample."""
    max_bytes: int = 32_000_000
    """Stream documents of an hf: source up to this many bytes of text, which no byte-level tokenizer turns into more
    tokens; so the corpus does not depend on the tokenizer."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.seq_len < 1:
            raise ValueError(f"seq_len must be at least 1, got {self.seq_len}")
        if not 0.0 < self.validation_fraction < 1.0:
            raise ValueError(f"validation_fraction must lie between 0 and 1, got {self.validation_fraction}")
        if self.max_bytes < 1:
            raise ValueError(f"max_bytes must be at least 1, got {self.max_bytes}")
