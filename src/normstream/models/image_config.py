"""What models of images share besides ``ModelConfig``: square images, cut into square patches."""

from dataclasses import dataclass, field

from torch import Tensor

from normstream.layers import Activation
from normstream.models.model_config import BiasKind, ModelConfig
from normstream.norms import NormConfig


@dataclass(frozen=True)
class ImageConfig(ModelConfig):
    """Size of the images and of their patches; norms, activation and biases as in vision Transformers.

    Raises ValueError for images that do not divide into patches.

    >>> ImageConfig(image_size=224, patch_size=16).n_patches
    196
    """

    image_size: int = 8
    """Height and width of the images, in pixels; training sets it from the data."""
    channels: int = 1
    """Channels of the images (3: colour); training sets it from the data."""
    patch_size: int = 2
    """Height and width of a patch, in pixels; it divides image_size."""
    activation: Activation = "gelu"
    """Feed-forward kind: with a gate swiglu, geglu or geglu_tanh, without gelu, gelu_tanh, relu or relu2."""
    norm: NormConfig = field(default_factory=lambda: NormConfig(kind="layer", eps=1e-6, bias=True))
    """Conventions of every norm."""
    bias: BiasKind = "all"
    """Matrices of the sublayers that have biases: none, all, qkv, or feed_forward."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_counts("image_size", "channels", "patch_size")
        if self.image_size % self.patch_size:
            raise ValueError(
                f"image_size {self.image_size} is not divisible by patch_size {self.patch_size}; change one of them"
            )

    @property
    def grid(self) -> int:
        """Patches in a row, and in a column."""
        return self.image_size // self.patch_size

    @property
    def n_patches(self) -> int:
        """Patches of an image."""
        return self.grid**2

    def check_images(self, images: Tensor) -> None:
        """Raises ValueError unless these are images ``(B, channels, image_size, image_size)`` of floating point.

        >>> import torch
        >>> ImageConfig(image_size=8).check_images(torch.zeros(1, 1, 8, 7))
        Traceback (most recent call last):
        ValueError: images must have shape (B, 1, 8, 8), got (1, 1, 8, 7); resize them, or build a model of their size
        """
        expected = (self.channels, self.image_size, self.image_size)
        if images.ndim != 4 or tuple(images.shape[1:]) != expected:
            raise ValueError(
                f"images must have shape (B, {', '.join(map(str, expected))}), got {tuple(images.shape)}; "
                "resize them, or build a model of their size"
            )
        if not images.is_floating_point():
            raise ValueError(f"images must be of floating point, got {images.dtype}; scale and normalize them first")
