"""Generated images: one coloured shape on a plain, dark grey background, its class the kind of shape.

Shape suffixes: N images, C channels, S height and width, U places in a row of the finer grid that is drawn on.
"""

from collections.abc import Callable

import numpy as np

Inside = Callable[[np.ndarray, np.ndarray], np.ndarray]

SHAPES: dict[str, Inside] = {
    "circle": lambda u, v: u**2 + v**2 <= 1,
    "square": lambda u, v: np.maximum(np.abs(u), np.abs(v)) <= 0.85,
    "triangle": lambda u, v: (v <= 0.8) & (np.abs(u) <= (v + 1) / 1.8),
    "cross": lambda u, v: (np.minimum(np.abs(u), np.abs(v)) <= 0.33) & (np.maximum(np.abs(u), np.abs(v)) <= 1),
    "ring": lambda u, v: (u**2 + v**2 <= 1) & (u**2 + v**2 >= 0.3),
    "diamond": lambda u, v: np.abs(u) + np.abs(v) <= 1.1,
}
"""For each kind, what is inside it, with u to the right and v down in units of its radius from its centre."""
FINE = 4
"""Places on a side of a pixel; the colour of a pixel is the mean over them."""


def draw_shapes(first: int, count: int, *, size: int = 16, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Images number ``first`` to ``first + count - 1``, uint8 (N, 3, S, S), and their classes, int64 (N,).

    Image i is of class ``i mod 6``. Radius (28 to 42 % of S), centre, hue and shade of the background are uniform and
    depend on the seed and on i alone.

    >>> images, labels = draw_shapes(0, 7)
    >>> images.shape, labels.tolist()
    ((7, 3, 16, 16), [0, 1, 2, 3, 4, 5, 0])
    >>> bool((draw_shapes(5, 2)[0] == images[5:]).all())
    True
    """
    if size < 8:
        raise ValueError(f"shapes need images of at least 8 x 8 pixels to be told apart, got {size}")
    generator = np.random.Generator(np.random.PCG64(seed))
    generator.bit_generator.advance(5 * first)  # 5 draws an image  # pyright: ignore[reportAttributeAccessIssue]
    radius, across, down, hue, shade = generator.random((count, 5)).T[:, :, None, None]
    radius = (0.28 + 0.14 * radius) * size
    across, down = (radius + part * (size - 2 * radius) for part in (across, down))
    places = (np.arange(size * FINE) + 0.5) / FINE
    u_N1U, v_NU1 = (places[None, None, :] - across) / radius, (places[None, :, None] - down) / radius
    labels = (first + np.arange(count)) % len(SHAPES)
    inside = np.empty((count, size * FINE, size * FINE), bool)
    for label, kind in enumerate(SHAPES.values()):
        of_kind = labels == label
        inside[of_kind] = kind(u_N1U[of_kind], v_NU1[of_kind])
    cover_NSS = inside.reshape(count, size, FINE, size, FINE).mean((2, 4))
    channels = [cover_NSS * _channel(hue, shift) + (1 - cover_NSS) * 0.3 * shade for shift in (0, 4, 2)]
    return np.rint(255 * np.stack(channels, axis=1)).astype(np.uint8), labels


def _channel(hue: np.ndarray, shift: int) -> np.ndarray:
    """Red (0), green (4) or blue (2) of a hue in [0, 1) at full saturation."""
    return np.clip(np.abs((hue * 6 + shift) % 6 - 3) - 1, 0, 1)
