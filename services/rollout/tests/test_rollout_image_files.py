"""Image files that are read and that are refused: transparency in each of its forms, lines in base64, packed files."""

from __future__ import annotations

import base64
import gzip
import io

import numpy as np
import pytest
from headrace_modelkit.pictures import decode_image
from headrace_servicekit.image_files import BadImage, check_image, file_of
from PIL import Image

RED, BLACK = (255, 0, 0), (0, 0, 0)


def saved(image, kind="PNG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def half(mode: str, transparent, solid) -> Image.Image:
    """8 x 8: the left half of one value, the right half of the other."""
    image = Image.new(mode, (8, 8), solid)
    image.paste(transparent, (0, 0, 4, 8))
    return image


def palette(*transparent: int) -> bytes:
    """A red half on a black one; a byte of transparency for each colour of the palette."""
    image = half("P", 0, 1)
    image.putpalette([*BLACK, *RED])
    return saved(image, transparency=bytes(transparent))


TRANSPARENT = {
    "a palette's colour": palette(0, 255),
    "a part of it": palette(128, 255),
    "one colour of RGB": saved(half("RGB", BLACK, RED), transparency=BLACK),
    "one grey": saved(half("L", 0, 200), transparency=0),
    "one of two": saved(half("1", 0, 1), transparency=0),
    "LA": saved(half("LA", (0, 0), (200, 255))),
    "RGBA": saved(half("RGBA", (0, 0, 0, 0), (255, 0, 0, 255))),
    "GIF": saved(half("P", 0, 1), "GIF", transparency=0),
    "WebP": saved(half("RGBA", (0, 0, 0, 0), (255, 0, 0, 255)), "WEBP", lossless=True),
}
OTHER = {
    "16 bits": saved(Image.fromarray(np.full((8, 8), 40_000, np.uint16))),
    "CMYK": saved(half("CMYK", (0, 0, 0, 0), (0, 255, 255, 0)), "TIFF"),
    "floats": saved(Image.fromarray(np.ones((8, 8), np.float32)), "TIFF"),
}
OPAQUE = {
    "a palette": palette(255, 255),
    "RGBA": saved(half("RGBA", (*BLACK, 255), (*RED, 255))),
    "RGB with a colour that it does not have": saved(half("RGB", BLACK, RED), transparency=(1, 2, 3)),
    "RGB": saved(half("RGB", BLACK, RED)),
}


@pytest.mark.parametrize("name", TRANSPARENT)
def test_transparency_is_refused_whatever_says_it(name):
    with pytest.raises(BadImage, match="with transparent parts") as refused:
        check_image(TRANSPARENT[name])
    assert "alpha_composite" in refused.value.fix
    with pytest.raises(ValueError, match="with transparent parts"):
        decode_image(TRANSPARENT[name])


@pytest.mark.parametrize("name", OTHER)
def test_what_has_no_plain_colours_is_refused(name):
    with pytest.raises(BadImage, match="does not say what it looks like in RGB"):
        check_image(OTHER[name])
    with pytest.raises(ValueError, match="does not say what it looks like in RGB"):
        decode_image(OTHER[name])


@pytest.mark.parametrize("name", OPAQUE)
def test_what_is_not_transparent_is_read_in_its_colours(name):
    check_image(OPAQUE[name])
    shown = decode_image(OPAQUE[name])
    assert (shown.mode, shown.getpixel((0, 0)), shown.getpixel((7, 7))) == ("RGB", BLACK, RED)


def test_a_grey_picture_and_one_of_two_colours_are_read():
    for image, value in ((half("L", 0, 200), 200), (half("1", 0, 1), 255)):
        check_image(saved(image))
        assert decode_image(saved(image)).getpixel((7, 7)) == (value,) * 3


def test_a_camera_turns_its_picture():
    exif = Image.Exif()
    exif[0x0112] = 6  # turned to the right by 90 degrees
    file = saved(half("RGB", BLACK, RED).resize((16, 8)), "JPEG", exif=exif)
    check_image(file)
    assert decode_image(file).size == (8, 16)


def test_the_preview_behind_a_cameras_picture_is_no_second_one():
    first, preview = half("RGB", BLACK, RED), Image.new("RGB", (4, 4))
    file = saved(first, "MPO", save_all=True, append_images=[preview])
    check_image(file)
    shown = decode_image(file)
    assert shown.size == (8, 8) and shown.getpixel((7, 4))[0] > 200
    with pytest.raises(BadImage, match="of 2 frames"):
        check_image(saved(first, "GIF", save_all=True, append_images=[Image.new("RGB", (8, 8))]))


def test_base64_may_have_lines():
    file = saved(half("RGB", BLACK, RED))
    for lines in (
        base64.encodebytes(file).decode(),
        base64.encodebytes(file).decode().replace("\n", "\r\n "),
    ):
        assert file_of(f"data:image/png;base64,{lines}") == file
    with pytest.raises(BadImage, match="base64 is broken"):
        file_of("data:image/png;base64,a%b")


def test_a_packed_file_is_called_so():
    with pytest.raises(BadImage, match="is a gzip file; unpack it"):
        check_image(gzip.compress(saved(half("RGB", BLACK, RED))))


def test_a_file_that_another_program_would_read_is_not_opened(tmp_path, monkeypatch):
    """Pillow hands EPS to Ghostscript, which runs what the file says."""
    from PIL import EpsImagePlugin

    ran = tmp_path / "ran"
    (tmp_path / "gs").write_text(f"#!/bin/sh\ntouch {ran}\nexit 1\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    eps = saved(Image.new("RGB", (8, 8), RED), "EPS")
    for read in (check_image, decode_image):
        with pytest.raises(ValueError, match="image"):
            read(eps)
    assert not ran.exists()
