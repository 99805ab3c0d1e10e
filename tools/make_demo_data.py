"""Draw a small data set for instance and semantic segmentation; nothing is downloaded.

Every image is a drawn scene (a meadow, a beach, a street or a room) with objects of six COCO
classes that overlap, differ in size, colour and rotation, and are now and then missing altogether.
It is written twice::

    OUT_DIR/coco/     annotations/{train,val}.json   train/*.jpg   val/*.jpg
    OUT_DIR/ade20k/   images/{training,validation}/*.jpg   annotations/{training,validation}/*.png

COCO: category ids and names are COCO's own. ``area`` and ``bbox`` are those of the visible pixels.
Polygons decode (pycocotools) to exactly the visible pixels, in several parts where another object
splits one, and with holes (see `mask_to_polygons`). A dense group is one RLE with ``iscrowd=1``.
ADE20K: single-channel PNG, 0 = other, 1..150 = ADE20K's label values.

The same seed and sizes give byte-identical files (with the same versions of NumPy and OpenCV).
"""

import argparse
import hashlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
from numpy.random import Generator

MARKER = 'demo_data.json'
SUPERSAMPLING = 2
# Colours are BGR, as OpenCV has them.
WHITE, GREY, BLACK, RED, YELLOW, BLUE, GREEN, PURPLE, ORANGE = (
    (235, 235, 235), (90, 90, 90), (30, 30, 30), (60, 60, 225), (60, 205, 245), (215, 110, 40),
    (90, 185, 60), (190, 70, 170), (60, 140, 245),
)  # fmt: skip


def choose(rng: Generator, *options):
    return options[rng.integers(len(options))]


def vary(rng: Generator, colour, amount: int = 20) -> tuple[int, ...]:
    shift = rng.integers(-amount, amount + 1, 3)
    return tuple(int(value) for value in np.clip(colour + shift, 0, 255))


# --------------------------------------------------------------------------- objects
# A draw function returns the object upright, inside the circle that fits into the sprite.


class Sprite:
    """A square canvas; points are given in fractions of its side, from the upper left."""

    def __init__(self, side: int):
        self.side = side
        self.image = np.zeros((side, side, 3), np.uint8)
        self.mask = np.zeros((side, side), np.uint8)  # 255 where the object is

    def _pixels(self, points) -> np.ndarray:
        return np.rint(np.asarray(points) * (self.side - 1)).astype(np.int32)

    def outline(self, points, inside: bool = True) -> None:
        """Add an area to the object, or take it out."""
        cv2.fillPoly(self.mask, [self._pixels(points)], 255 if inside else 0)

    def fill(self, points, colour) -> None:
        cv2.fillPoly(self.image, [self._pixels(points)], colour)

    def line(self, points, colour, width: float) -> None:
        cv2.polylines(self.image, [self._pixels(points)], False, colour, self._width(width))

    def _width(self, width: float) -> int:
        return max(1, round(width * self.side))

    def shade(self) -> None:
        """Light from the upper left, as on a sphere."""
        y, x = np.mgrid[0 : self.side, 0 : self.side] / self.side
        light = 1.15 - 0.9 * ((x - 0.35) ** 2 + (y - 0.35) ** 2)
        self.image = np.clip(self.image * light[..., None], 0, 255).astype(np.uint8)


def direction(degrees) -> np.ndarray:
    """Unit vectors [..., 2], clockwise from the right."""
    return np.stack([np.cos(np.radians(degrees)), np.sin(np.radians(degrees))], -1)


def arc(radius, start: float = 0, stop: float = 360, middle=(0.5, 0.5), count: int = 90):
    """Points [count, 2]; `radius` may be one per point."""
    angles = np.linspace(start, stop, count, endpoint=stop - start < 360)
    return np.add(middle, direction(angles) * np.reshape(radius, (-1, 1)))


def regular(corners: int, radius: float, start: float, middle=(0.5, 0.5)) -> np.ndarray:
    return arc(radius, start, start + 360, middle, corners)


def draw_sports_ball(rng: Generator, sprite: Sprite) -> None:
    sprite.outline(arc(0.48))
    kind = choose(rng, 'basketball', 'football', 'beach ball')
    if kind == 'basketball':
        sprite.fill(arc(0.5), vary(rng, (40, 110, 220)))
        left, right = arc(0.3, -75, 75, (0.03, 0.5)), arc(0.3, 105, 255, (0.97, 0.5))
        for seam in ([(0.5, 0), (0.5, 1)], [(0, 0.5), (1, 0.5)], left, right):
            sprite.line(seam, BLACK, 0.03)
    elif kind == 'football':
        sprite.fill(arc(0.5), vary(rng, WHITE, 12))
        sprite.fill(regular(5, 0.17, 18), BLACK)
        for angle in range(18, 378, 72):
            sprite.fill(regular(5, 0.15, angle, 0.5 + 0.45 * direction(angle)), BLACK)
            sprite.line(0.5 + np.outer([0.17, 0.31], direction(angle)), GREY, 0.02)
    else:
        for i, colour in enumerate((RED, WHITE, YELLOW, WHITE, BLUE, WHITE)):
            wedge = np.vstack([(0.5, 0.5), arc(0.5, 60 * i, 60 * i + 60)])
            sprite.fill(wedge, vary(rng, colour, 12))
        sprite.fill(arc(0.09), WHITE)
    sprite.shade()


LETTERS = (  # S, T, O and P as strokes in the unit square
    [(1, 0.1), (0.8, 0), (0.2, 0), (0, 0.25), (0.2, 0.5), (0.8, 0.5), (1, 0.75), (0.8, 1), (0.2, 1),
     (0, 0.9)],
    [(0, 0), (1, 0), (0.5, 0), (0.5, 1)],
    [(0.2, 0), (0.8, 0), (1, 0.25), (1, 0.75), (0.8, 1), (0.2, 1), (0, 0.75), (0, 0.25), (0.2, 0)],
    [(0, 1), (0, 0), (0.8, 0), (1, 0.15), (1, 0.4), (0.8, 0.55), (0, 0.55)],
)  # fmt: skip


def draw_stop_sign(rng: Generator, sprite: Sprite) -> None:
    sprite.outline(regular(8, 0.49, 22.5))
    sprite.fill(regular(8, 0.5, 22.5), vary(rng, WHITE, 12))
    sprite.fill(regular(8, 0.45, 22.5), vary(rng, (35, 30, 190)))
    for i, strokes in enumerate(LETTERS):
        corner = (0.175 + 0.175 * i, 0.37)
        sprite.line(np.add(corner, np.multiply(strokes, (0.125, 0.26))), WHITE, 0.035)


def draw_clock(rng: Generator, sprite: Sprite) -> None:
    sprite.outline(arc(0.48))
    sprite.fill(
        arc(0.5), vary(rng, choose(rng, BLACK, (45, 75, 120), (120, 70, 30), (50, 50, 150)))
    )
    sprite.fill(arc(0.40), vary(rng, (225, 235, 240), 12))
    for hour in range(12):
        inner = 0.28 if hour % 3 == 0 else 0.32
        sprite.line(0.5 + np.outer([inner, 0.37], direction(30 * hour)), BLACK, 0.022)
    for length, width in ((0.2, 0.045), (0.31, 0.03)):
        sprite.line(0.5 + np.outer([0, length], direction(rng.uniform(0, 360))), BLACK, width)
    sprite.fill(arc(0.035), RED)


def draw_donut(rng: Generator, sprite: Sprite) -> None:
    sprite.outline(arc(0.48))
    sprite.outline(arc(rng.uniform(0.14, 0.18)), inside=False)
    dough = vary(rng, (85, 145, 205))
    icing = choose(rng, (185, 130, 245), (35, 50, 85), (235, 240, 245), (190, 215, 120))
    waves = 0.41 + 0.02 * np.sin(np.radians(np.arange(0, 360, 4)) * rng.integers(6, 10))
    sprite.fill(arc(0.5), dough)
    sprite.fill(arc(waves), vary(rng, icing, 12))
    sprite.fill(arc(0.21), dough)
    for _ in range(24):
        middle = 0.5 + rng.uniform(0.24, 0.37) * direction(rng.uniform(0, 360))
        ends = middle + np.outer([-0.022, 0.022], direction(rng.uniform(0, 360)))
        sprite.line(ends, choose(rng, RED, YELLOW, BLUE, GREEN, WHITE), 0.022)
    sprite.shade()


def draw_banana(rng: Generator, sprite: Sprite) -> None:
    along = np.linspace(0, 1, 60)
    outwards = direction(15 + 150 * along)
    spine = (0.5, 0.22) + outwards * (0.42, 0.40)
    half_width = 0.025 + rng.uniform(0.08, 0.1) * np.sin(np.pi * along) ** 0.6

    def between(inner: float, outer: float, part: slice = slice(None)) -> np.ndarray:
        edges = [(spine + outwards * half_width[:, None] * side)[part] for side in (inner, outer)]
        return np.vstack([edges[0], edges[1][::-1]])

    sprite.outline(between(-1, 1))
    sprite.fill(between(-1.2, 1.2), vary(rng, (60, 215, 245), 12))
    sprite.fill(between(0.35, 1.2), vary(rng, (45, 180, 220), 12))
    sprite.fill(between(-0.4, -0.3), (40, 165, 205))
    for _ in range(rng.integers(0, 7)):
        sprite.fill(arc(0.012, middle=choose(rng, *spine) + rng.normal(0, 0.03, 2)), (40, 90, 130))
    sprite.fill(between(-1.2, 1.2, slice(0, 5)), (35, 65, 85))
    sprite.fill(between(-1.2, 1.2, slice(-3, None)), BLACK)


def draw_kite(rng: Generator, sprite: Sprite) -> None:
    middle = (0.5, 0.34)
    corners = [(0.5, 0.01), (0.84, 0.34), (0.5, 0.78), (0.16, 0.34)]
    palette = (RED, YELLOW, BLUE, GREEN, PURPLE, ORANGE)
    colours = [palette[i] for i in rng.permutation(len(palette))[:2]]
    y = np.linspace(0.74, 0.97, 20)
    x = 0.5 + 0.03 * np.sin(40 * y)
    tail = np.vstack([np.stack([x - 0.01, y], 1), np.stack([x + 0.01, y], 1)[::-1]])
    sprite.outline(tail)
    sprite.fill(tail, GREY)
    for y in (0.85, 0.95):
        bow = [(0.43, y - 0.03), (0.57, y + 0.03), (0.57, y - 0.03), (0.43, y + 0.03)]
        sprite.outline(bow)
        sprite.fill(bow, colours[0])
    sprite.outline(corners)
    for i in range(4):
        quarter = [middle, corners[i], corners[(i + 1) % 4]]
        sprite.fill(quarter, vary(rng, colours[i % 2], 12))
    sprite.line(corners[0::2], GREY, 0.014)
    sprite.line(corners[1::2], GREY, 0.014)


class Kind(NamedTuple):
    """A class of objects: COCO's category, ADE20K's label value (0 = other) and how to draw it."""

    id: int
    name: str
    supercategory: str
    ade_label: int
    draw: Callable[[Generator, Sprite], None]
    max_rotation: float  # degrees either way


KINDS = (
    Kind(13, 'stop sign', 'outdoor', 44, draw_stop_sign, 15),
    Kind(37, 'sports ball', 'sports', 120, draw_sports_ball, 180),
    Kind(38, 'kite', 'sports', 0, draw_kite, 50),
    Kind(52, 'banana', 'food', 121, draw_banana, 180),
    Kind(60, 'donut', 'food', 121, draw_donut, 180),
    Kind(85, 'clock', 'indoor', 149, draw_clock, 12),
)
CROWDS = tuple(kind for kind in KINDS if kind.name in ('banana', 'donut', 'sports ball'))


# --------------------------------------------------------------------------- backgrounds

WALL, BUILDING, SKY, FLOOR, TREE, ROAD, WINDOW, GRASS, SIDEWALK, MOUNTAIN, SEA, SAND = (
    1, 2, 3, 4, 5, 7, 9, 10, 12, 17, 27, 47,
)  # fmt: skip


class Canvas:
    """A background in the making: `image` [H, W, 3] float32, `labels` [H, W] uint8 (ADE20K)."""

    def __init__(self, rng: Generator, width: int, height: int):
        self.rng, self.width, self.height = rng, width, height
        self.image = np.zeros((height, width, 3), np.float32)
        self.labels = np.zeros((height, width), np.uint8)

    def smooth_noise(self, rows: int, columns: int) -> np.ndarray:
        """[H, W] float32, interpolated between `rows` x `columns` normal random numbers."""
        coarse = self.rng.normal(size=(rows, columns)).astype(np.float32)
        return cv2.resize(coarse, (self.width, self.height), interpolation=cv2.INTER_CUBIC)

    def texture(self, rows, stretch: float = 1) -> np.ndarray:
        """[H, W, 1] float32, noise of several scales; `stretch` > 1 makes it longer along x."""
        aspect = self.width / self.height / stretch
        return sum(self.smooth_noise(n + 1, 1 + round(n * aspect)) for n in rows)[..., None]

    def below(self, level: float, roughness: float = 0) -> np.ndarray:
        """[H, W] bool, what lies below a line at `level` of the height that may be wavy."""
        line = level + roughness * self.smooth_noise(1, 7)
        return np.arange(self.height)[:, None] + 0.5 >= line * self.height

    def cover(self, where, label: int, colour, contrast=6.0, rows=(4, 40), stretch=1.0) -> None:
        """Cover an area with a textured material."""
        material = np.float32(colour) + contrast * self.texture(rows, stretch)
        self.image[where] = material[where]
        self.labels[where] = label


def add_sky(rng: Generator, canvas: Canvas) -> None:
    low = np.linspace(0, 1, canvas.height, dtype=np.float32)[:, None, None]
    clear = (1 - low) * np.float32(choose(rng, (235, 170, 110), (235, 200, 160))) + low * 230
    clouds = np.clip(0.25 * canvas.texture((2, 4, 9), 2), 0, 0.8)
    canvas.image[:] = clear * (1 - clouds) + 245 * clouds
    canvas.labels[:] = SKY


def add_meadow(rng: Generator, canvas: Canvas) -> None:
    add_sky(rng, canvas)
    horizon = rng.uniform(0.35, 0.65)
    if rng.random() < 0.6:
        canvas.cover(canvas.below(horizon - 0.12, 0.08), MOUNTAIN, vary(rng, (125, 105, 95)))
    grass = vary(rng, choose(rng, (60, 130, 90), (70, 150, 130)), 15)
    canvas.cover(canvas.below(horizon, 0.015), GRASS, grass, 8, (3, 12, 48))
    for _ in range(rng.integers(0, 4)):
        add_tree(rng, canvas, horizon + rng.uniform(0, 0.08))


def add_tree(rng: Generator, canvas: Canvas, ground: float) -> None:
    x, y = rng.uniform(0, canvas.width), ground * canvas.height
    size = canvas.height * rng.uniform(0.15, 0.35)
    trunk, crown = np.zeros_like(canvas.labels), np.zeros_like(canvas.labels)
    corners = np.rint([(x - size * 0.06, y - size * 0.5), (x + size * 0.06, y)]).astype(int)
    cv2.rectangle(trunk, *corners.tolist(), 1, cv2.FILLED)
    for middle in np.rint(rng.normal((x, y - size * 0.7), size * 0.16, (9, 2))).astype(int):
        cv2.circle(crown, middle.tolist(), round(size * 0.22), 1, cv2.FILLED)
    canvas.cover(trunk > 0, TREE, (50, 75, 100))
    canvas.cover(crown > 0, TREE, vary(rng, (45, 95, 55), 15), 10, (12, 40))


def add_beach(rng: Generator, canvas: Canvas) -> None:
    add_sky(rng, canvas)
    horizon = rng.uniform(0.25, 0.45)
    shore = canvas.below(horizon + rng.uniform(0.12, 0.3), 0.02)
    foam = cv2.dilate(shore.astype(np.uint8), np.ones((5, 3), np.uint8)) > 0
    canvas.cover(canvas.below(horizon), SEA, vary(rng, (165, 125, 60), 15), 8, (12, 40), 6)
    canvas.cover(foam, SEA, WHITE)
    canvas.cover(shore, SAND, vary(rng, (150, 195, 220), 15), 5, (3, 20, 60))


def add_street(rng: Generator, canvas: Canvas) -> None:
    add_sky(rng, canvas)
    h, w = canvas.labels.shape
    ground = round(h * rng.uniform(0.5, 0.7))
    left = 0
    while left < w:
        right = left + round(w * rng.uniform(0.25, 0.45))
        add_house(rng, canvas, left, min(w, right), round(h * rng.uniform(0.05, 0.3)), ground)
        left = right
    canvas.cover(canvas.below(ground / h), SIDEWALK, (165, 170, 175), 5, (10, 40))
    canvas.cover(canvas.below(ground / h + 0.08), ROAD, vary(rng, (95, 95, 95)), 6, (4, 60))
    for x in range(0, w, w // 4):
        y = round(h * 0.88)
        cv2.line(canvas.image, (x, y), (x + w // 8, y), WHITE, max(1, h // 60))


def add_house(rng: Generator, canvas: Canvas, left: int, right: int, top: int, low: int) -> None:
    front = np.zeros(canvas.labels.shape, bool)
    front[top:low, left:right] = True
    paint = choose(rng, (95, 110, 165), (165, 175, 180), (120, 165, 195), (140, 120, 110))
    canvas.cover(front, BUILDING, vary(rng, paint), 4)
    step = canvas.height // 9
    glass = vary(rng, (130, 105, 80))
    for y in range(top + step // 2, low - step, step):
        for x in range(left + step // 2, right - step // 2, step):
            pane = np.s_[y : y + step // 2, x : x + step // 2]
            canvas.image[pane], canvas.labels[pane] = glass, WINDOW


def add_room(rng: Generator, canvas: Canvas) -> None:
    h, w = canvas.labels.shape
    paint = choose(rng, (190, 205, 215), (175, 190, 150), (205, 185, 165), (165, 180, 215))
    canvas.cover(canvas.below(0), WALL, vary(rng, paint), 3, (2, 5))
    period = h // rng.integers(6, 14)
    pattern = choose(rng, 'plain', 'stripes', 'bricks')
    if pattern == 'stripes':
        canvas.image[:, np.arange(w) // period % 2 == 0] -= 16
    elif pattern == 'bricks':
        for row, y in enumerate(range(0, h, period)):
            canvas.image[y] -= 30
            canvas.image[y : y + period, row % 2 * period :: 2 * period] -= 30
    ground = rng.uniform(0.6, 0.8)
    canvas.cover(canvas.below(ground - 0.03), WALL, WHITE, 3)
    planks = canvas.below(ground)
    canvas.cover(planks, FLOOR, vary(rng, (80, 125, 165)), 7, (20, 60), 6)
    canvas.image[planks & (np.arange(h) % max(5, h // 14) == 0)[:, None]] -= 35


# --------------------------------------------------------------------------- scenes


class Instance(NamedTuple):
    """An object, or a dense group (`crowd`), with all its pixels: hidden ones too, [H, W] bool."""

    kind: Kind
    mask: np.ndarray
    crowd: bool


class Scene(NamedTuple):
    """`image` BGR [H, W, 3] uint8, `labels` [H, W] uint8 (ADE20K), `ids` [H, W] uint8: which of
    `instances` is seen (0 = background, i = the i-th one, from 1)."""

    image: np.ndarray
    labels: np.ndarray
    ids: np.ndarray
    instances: list[Instance]


def render(rng: Generator, kind: Kind, diameter: int, centre, shape):
    """Draw one object. Returns colours [H, W, 3] and opacity [H, W] in 0..1, both float32."""
    sprite = Sprite(diameter * SUPERSAMPLING)
    kind.draw(rng, sprite)
    middle = (sprite.side - 1) / 2
    angle = rng.uniform(-1, 1) * kind.max_rotation
    pixels = np.dstack([sprite.image, sprite.mask]).astype(np.float32)
    pixels[..., :3] *= pixels[..., 3:] / 255
    turn = cv2.getRotationMatrix2D((middle, middle), angle, 1)
    pixels = cv2.warpAffine(pixels, turn, (sprite.side, sprite.side))
    pixels = cv2.resize(pixels, (diameter, diameter), interpolation=cv2.INTER_AREA)
    corner = np.rint(centre) - diameter // 2
    shift = np.float32([[1, 0, corner[0]], [0, 1, corner[1]]])
    pixels = cv2.warpAffine(pixels, shift, shape[::-1], flags=cv2.INTER_NEAREST)
    opacity = pixels[..., 3] / 255
    return pixels[..., :3] / np.maximum(opacity, 1e-6)[..., None], opacity


class Composer:
    """Puts objects on a background, each new one in front."""

    def __init__(self, rng: Generator, canvas: Canvas):
        self.rng, self.canvas = rng, canvas
        self.shape = canvas.labels.shape
        self.side, self.middle = min(self.shape), np.array(self.shape[::-1]) / 2
        self.ids = np.zeros(self.shape, np.uint8)
        self.instances: list[Instance] = []

    def _paint(self, kind: Kind, colours: np.ndarray, opacity: np.ndarray) -> None:
        image = self.canvas.image
        image += opacity[..., None] * (colours - image)
        self.canvas.labels[opacity > 0.5] = kind.ade_label

    def _append(self, instance: Instance) -> None:
        self.instances.append(instance)
        self.ids[instance.mask] = len(self.instances)

    def add_crowd(self) -> None:
        """Heap up small objects of one class."""
        rng, (h, w) = self.rng, self.shape
        kind = choose(rng, *CROWDS)
        middle = np.array([rng.uniform(0.25, 0.75) * w, rng.uniform(0.6, 0.85) * h])
        heap = np.zeros(self.shape, bool)
        for _ in range(rng.integers(16, 25)):
            spread = self.side * rng.uniform(0, 1) * np.array([0.3, 0.14])
            diameter = round(self.side * rng.uniform(0.11, 0.14))
            spot = middle + spread * direction(rng.uniform(0, 360))
            colours, opacity = render(rng, kind, diameter, spot, self.shape)
            self._paint(kind, colours, opacity)
            heap |= opacity > 0.5
        self._append(Instance(kind, heap, True))

    def add_object(self) -> None:
        """Add one object where it leaves more than 40 % of every other one in sight."""
        kind = choose(self.rng, *KINDS)
        for _ in range(20):
            diameter = round(self.side * self.rng.uniform(0.2, 0.48))
            reach = self.middle - 0.3 * diameter
            centre = self.middle + self.rng.uniform(-reach, reach)
            colours, opacity = render(self.rng, kind, diameter, centre, self.shape)
            mask = opacity > 0.5
            seen = np.where(mask, 0, self.ids)
            if all(np.mean(seen[x.mask] == i) > 0.4 for i, x in enumerate(self.instances, 1)):
                self._paint(kind, colours, opacity)
                self._append(Instance(kind, mask, False))
                return


def draw_scene(rng: Generator, width: int, height: int) -> Scene:
    """Draw one scene; all of its randomness comes from `rng`."""
    canvas = Canvas(rng, width, height)
    choose(rng, add_meadow, add_beach, add_street, add_room)(rng, canvas)
    composer = Composer(rng, canvas)
    if rng.random() < 0.92:
        if rng.random() < 0.08:
            composer.add_crowd()
        for _ in range(rng.integers(2, 7)):
            composer.add_object()
    image = np.clip(canvas.image + rng.normal(0, 3, canvas.image.shape), 0, 255).astype(np.uint8)
    return Scene(image, canvas.labels, composer.ids, composer.instances)


def scene_rng(seed: int, split: str, index: int) -> Generator:
    """The random numbers of one image: the same whatever number of images is drawn."""
    return np.random.default_rng([seed, ('train', 'val').index(split), index])


# --------------------------------------------------------------------------- files


def mask_to_polygons(mask: np.ndarray) -> list[list[float]]:
    """Trace a mask [H, W] bool as COCO polygons that decode to exactly the same pixels.

    One polygon per connected part. A list of polygons is a union, so a hole cannot be a polygon of
    its own: each hole is joined to the outline by a seam that runs there and back on one line. The
    even-odd rule, by which pycocotools fills, cancels the seam and leaves the hole empty.
    """
    # Doubling puts the outline a quarter of a pixel inside the edge of the outermost pixels (and
    # outside a hole's), so that every pixel centre lies on the right side of it.
    doubled = mask.astype(np.uint8).repeat(2, axis=0).repeat(2, axis=1)
    contours, hierarchy = cv2.findContours(doubled, cv2.RETR_CCOMP, cv2.CHAIN_APPROX_SIMPLE)
    outlines = [contour.reshape(-1, 2) / 2 + 0.25 for contour in contours]
    parents = hierarchy.reshape(-1, 4)[:, 3] if len(outlines) else ()
    polygons = []
    for part, parent in enumerate(parents):
        if parent >= 0:
            continue
        outline = outlines[part]
        for hole in (outlines[i] for i in np.flatnonzero(np.equal(parents, part))):
            distance = np.square(outline[:, None] - hole[None]).sum(-1)
            start, stop = np.unravel_index(distance.argmin(), distance.shape)
            there_and_back = np.vstack([np.roll(hole, -stop, axis=0), hole[stop], outline[start]])
            outline = np.insert(outline, start + 1, there_and_back, axis=0)
        polygons.append(outline.ravel().tolist())
    return polygons


def mask_to_rle(mask: np.ndarray) -> dict:
    """COCO's uncompressed RLE of a mask [H, W] bool: column-major run lengths, zeros first."""
    flat = mask.ravel(order='F')
    edges = np.flatnonzero(np.diff(flat, prepend=False)).tolist()
    counts = np.diff([0, *edges, flat.size]).tolist()
    return {'counts': counts, 'size': list(mask.shape)}


def annotate(scene: Scene, image_id: int, first_id: int) -> list[dict]:
    """COCO annotations of a scene's visible objects, with ids from `first_id` on."""
    annotations = []
    for i, item in enumerate(scene.instances, 1):
        visible = scene.ids == i
        annotations.append(
            {
                'id': first_id + i - 1,
                'image_id': image_id,
                'category_id': item.kind.id,
                'segmentation': mask_to_rle(visible) if item.crowd else mask_to_polygons(visible),
                'area': int(visible.sum()),
                'bbox': list(cv2.boundingRect(visible.astype(np.uint8))),
                'iscrowd': int(item.crowd),
            }
        )
    return annotations


def write_split(
    folder: Path, seed: int, split: str, count: int, size: tuple[int, int], first_id: int
) -> None:
    ade_split = {'train': 'training', 'val': 'validation'}[split]
    coco_images = folder / 'coco' / split
    ade_images = folder / 'ade20k' / 'images' / ade_split
    ade_labels = folder / 'ade20k' / 'annotations' / ade_split
    coco_json = folder / 'coco' / 'annotations' / f'{split}.json'
    for path in (coco_images, ade_images, ade_labels, coco_json.parent):
        path.mkdir(parents=True, exist_ok=True)

    images, annotations, overlapping = [], [], 0
    for index in range(count):
        scene = draw_scene(scene_rng(seed, split, index), *size)
        image_id = first_id + index
        name = f'{image_id:012d}.jpg'
        save(coco_images / name, scene.image, cv2.IMWRITE_JPEG_QUALITY, 95)
        shutil.copyfile(coco_images / name, ade_images / name)
        save((ade_labels / name).with_suffix('.png'), scene.labels)
        images.append({'id': image_id, 'file_name': name, 'width': size[0], 'height': size[1]})
        annotations += annotate(scene, image_id, image_id * 100)
        covered = np.sum([item.mask for item in scene.instances], axis=0)
        overlapping += sum(bool((covered[item.mask] > 1).any()) for item in scene.instances)
        if (index + 1) % 50 == 0 or index + 1 == count:
            print(f'{split}: {index + 1}/{count} images drawn', flush=True)

    categories = [{'id': k.id, 'name': k.name, 'supercategory': k.supercategory} for k in KINDS]
    content = {
        'info': {'description': 'drawn demo scenes'},
        'licenses': [],
        'images': images,
        'annotations': annotations,
        'categories': categories,
    }
    coco_json.write_text(json.dumps(content))
    objects, share = len(annotations), overlapping / max(1, len(annotations))
    print(f'{split}: {objects / count:.1f} objects per image, {share:.0%} of them overlapping')


def save(path: Path, image: np.ndarray, *options: int) -> None:
    if not cv2.imwrite(str(path), image, options):
        raise OSError(f'{path}: cannot be written')


def remove_data(folder: Path) -> None:
    """Remove a folder of ours, the marker last: a folder that is left half-removed stays ours."""
    if folder.is_dir():
        for path in sorted(folder.iterdir(), key=lambda path: path.name == MARKER):
            path.unlink() if path.is_file() else shutil.rmtree(path)
        folder.rmdir()


def make_demo_data(
    out_dir: str | Path,
    seed: int = 0,
    train: int = 240,
    val: int = 40,
    size: tuple[int, int] = (384, 288),
) -> None:
    """Write the data set that the top of this file describes.

    The files are drawn in a folder beside `out_dir` that takes its place only when complete. Data
    already there is kept where it was drawn by this code with these arguments, and replaced where
    it was drawn with others.

    Args:
        out_dir: where `coco/` and `ade20k/` go.
        seed: non-negative; the same seed gives the same files.
        train: number of training images, at least 1.
        val: number of validation images, at least 1; never the same as a training image.
        size: width and height in pixels.

    Raises:
        FileExistsError: `out_dir`, or the folder beside it, holds what this tool did not write.
    """
    out_dir = Path(out_dir).resolve()
    partial = out_dir.with_name(f'.{out_dir.name}.partial')
    recipe = {
        'seed': seed,
        'train': train,
        'val': val,
        'size': list(size),
        'drawn_by': hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),
    }
    for folder in (out_dir, partial):
        empty = folder.is_dir() and not any(folder.iterdir())
        if folder.exists() and not empty and not (folder / MARKER).is_file():
            raise FileExistsError(
                f'{folder} holds something else than demo data (there is no {MARKER} in it): '
                'name another OUT_DIR, or remove it'
            )
    if (out_dir / MARKER).is_file() and json.loads((out_dir / MARKER).read_text()) == recipe:
        print(f'{out_dir}: already drawn')
        return
    remove_data(partial)
    partial.mkdir(parents=True)
    (partial / MARKER).write_text(json.dumps(recipe))
    write_split(partial, seed, 'train', train, size, first_id=1)
    write_split(partial, seed, 'val', val, size, first_id=train + 1)
    remove_data(out_dir)
    partial.rename(out_dir)
    print(f'{out_dir}: complete')


def image_size(text: str) -> tuple[int, int]:
    width, _, height = text.partition('x')
    if not (width.isdecimal() and height.isdecimal() and min(int(width), int(height)) >= 64):
        raise argparse.ArgumentTypeError(
            f'{text!r} is not WIDTHxHEIGHT, each at least 64, as in 384x288'
        )
    return int(width), int(height)


def at_least(minimum: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not (text.isdecimal() and int(text) >= minimum):
            raise argparse.ArgumentTypeError(
                f'{text!r} is not a whole number of at least {minimum}'
            )
        return int(text)

    return number


def main() -> None:
    parser = argparse.ArgumentParser(
        description='Draw a small data set in COCO and in ADE20K layout'
    )
    parser.add_argument('out_dir', metavar='OUT_DIR', help='folder for coco/ and ade20k/')
    parser.add_argument('--seed', type=at_least(0), default=0, help='default: 0')
    parser.add_argument(
        '--train', type=at_least(1), default=240, help='training images, default: 240'
    )
    parser.add_argument(
        '--val', type=at_least(1), default=40, help='validation images, default: 40'
    )
    parser.add_argument(
        '--size',
        type=image_size,
        default=(384, 288),
        help='WIDTHxHEIGHT in pixels, default: 384x288',
    )
    args = parser.parse_args()
    try:
        make_demo_data(**vars(args))
    except OSError as error:
        sys.exit(str(error))


if __name__ == '__main__':
    main()
