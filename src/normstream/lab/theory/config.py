"""What `normstream theory` measures: its configuration, checked before anything runs."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from normstream import placements
from normstream.checks import check_types
from normstream.models import DecoderConfig
from normstream.names import check_choice
from normstream.placements import InitScheme

ModelKind = Literal["xiong", "decoder"]


@dataclass(frozen=True)
class TheoryConfig:
    """Measurements at initialization, in float64: every placement at every depth, averaged over seeds.

    Raises ValueError for an unknown placement, a value out of range, a value given twice or an empty list.

    >>> TheoryConfig(depths=(6,)).ffn_dim
    128
    """

    placements: tuple[str, ...] = ("post", "pre", "deepnorm", "peri", "siamese")
    """Placements to measure: names from `normstream list`, options as in siamese(depth_scale=paper), or all."""
    model: ModelKind = "xiong"
    """xiong: the simplified model in which the lemmas are proved; decoder: a real one with its own initialization."""
    depths: tuple[int, ...] = (6, 12, 24, 48)
    """Numbers of blocks."""
    dim: int = 128
    """Width of the residual streams."""
    ffn_ratio: float | None = None
    """Hidden width of the feed-forward divided by dim; None means 1 for xiong, the usual width for decoder."""
    tokens: int = 32
    """Positions of the one random sequence of each seed."""
    seeds: tuple[int, ...] = tuple(range(8))
    """Seeds of the weights and the inputs; results are averaged over them."""
    n_heads: int = 4
    """Query heads of the decoder."""
    init: Literal["placement", InitScheme] = "placement"
    """Initialization of the decoder; placement takes what each placement's recipe says."""
    out: Path = Path("runs/theory")
    """Folder for theory.json and report.html; must not exist yet."""

    def __post_init__(self) -> None:
        check_types(self)
        check_choice("model", self.model, ModelKind)
        for name in ("placements", "depths", "seeds"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty; give at least one")
        for name, values in (("placement", self.chosen()), ("depth", self.depths), ("seed", self.seeds)):
            value, count = Counter(values).most_common(1)[0]
            if count > 1:
                raise ValueError(f"{name} {value} is given {count} times; give it once")
        if min(self.depths) < 1:
            raise ValueError(f"depths must be at least 1, got {min(self.depths)}")
        if min(self.seeds) < 0:
            raise ValueError(f"seeds must not be negative, got {min(self.seeds)}")
        if self.dim < 8:
            raise ValueError(f"dim must be at least 8, got {self.dim}: the statements are about wide models")
        if self.tokens < 1:
            raise ValueError(f"tokens must be at least 1, got {self.tokens}")
        if self.ffn_ratio is not None and not 1 / self.dim <= self.ffn_ratio <= 64:
            raise ValueError(f"ffn_ratio must lie between 1/dim and 64, got {self.ffn_ratio}")
        self._check_kind()

    def _check_kind(self) -> None:
        if self.model == "decoder":
            self.decoder(self.placements[0] if self.placements[0] != "all" else "pre", min(self.depths))
            return
        for name in ("n_heads", "init"):
            if getattr(self, name) != getattr(type(self), name):
                raise ValueError(f"the simplified model has no {name}; add --model decoder, or leave it out")

    def chosen(self) -> list[str]:
        """The placements in full: all of them for ``all``, each as ``placements.get`` writes it.

        >>> TheoryConfig(placements=("siamese( depth_scale = paper )",)).chosen()
        ['siamese(depth_scale=paper)']
        """
        names = [name for given in self.placements for name in (placements.names() if given == "all" else [given])]
        return [str(placements.get(name)) for name in names]

    @property
    def ratio(self) -> float:
        """r = d_ff / d of the simplified model."""
        return self.ffn_dim / self.dim

    @property
    def ffn_dim(self) -> int:
        """Hidden width of the feed-forward of the simplified model."""
        return round((1.0 if self.ffn_ratio is None else self.ffn_ratio) * self.dim)

    def decoder(self, placement: str, n_layers: int) -> DecoderConfig:
        """The configuration of the real decoder."""
        return DecoderConfig(
            placement=placement,
            dim=self.dim,
            n_layers=n_layers,
            n_heads=self.n_heads,
            ffn_dim=None if self.ffn_ratio is None else self.ffn_dim,
            max_seq_len=self.tokens,
            init=self.init,
        )
