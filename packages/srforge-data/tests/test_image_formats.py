"""Limits, data types and orientation, which all formats share."""

import struct

import numpy as np
import pytest

from srforge.data.image_formats import UnreadableContentError, check_dtype, check_size, exif_orientation, turn_upright


def exif(orientation, *, order="<", tag=274, kind=3, count=1):
    """Return an EXIF block with one other tag before the orientation."""
    mark = b"II*\0" if order == "<" else b"MM\0*"
    value = struct.pack(order + ("HH" if kind == 3 else "I"), *((orientation, 0) if kind == 3 else (orientation,)))
    first = struct.pack(order + "HHI", 256, 3, 1) + bytes(4)
    return mark + struct.pack(order + "IH", 8, 2) + first + struct.pack(order + "HHI", tag, kind, count) + value


def test_limits_are_what_the_documentation_says():
    check_size(2**14, 2**14, 8)
    check_size(2**28, 1, 1)
    for size in ((2**14, 2**14 + 1, 1), (2**14, 2**14, 9), (10**9, 10**9, 1)):
        with pytest.raises(UnreadableContentError, match=r"must have at most 268435456 pixels and 2147483648 values"):
            check_size(*size)
    for size in ((0, 4, 1), (4, 0, 1), (4, 4, 0)):
        with pytest.raises(UnreadableContentError, match=r"must have at least one pixel, but its header says"):
            check_size(*size)


@pytest.mark.parametrize("dtype", ["int64", "uint64", "complex64", "bool", "O", "U3", "datetime64[s]"])
def test_other_data_types_are_no_pixels(dtype):
    with pytest.raises(UnreadableContentError, match=r"must hold one of uint8, .*, but holds"):
        check_dtype(np.dtype(dtype))


@pytest.mark.parametrize("order", ["<", ">"])
def test_orientation_is_found_in_either_byte_order(order):
    for kind in (3, 4):  # SHORT as the standard says, and LONG as some programs write
        assert [exif_orientation(exif(value, order=order, kind=kind)) for value in range(1, 9)] == list(range(1, 9))
    assert exif_orientation(b"Exif\0\0" + exif(6, order=order)) == 6


@pytest.mark.parametrize(
    "block",
    [
        exif(0),
        exif(9),
        exif(6, tag=275),
        exif(6, kind=1),
        exif(9, kind=4),
        exif(6, count=2),
        exif(6)[:20],
        exif(6)[1:],
        b"",
        b"II*\0",
    ],
)
def test_what_states_no_orientation_means_as_stored(block):
    assert exif_orientation(block) == 1


def test_orientations_are_the_symmetries_of_the_rectangle():
    """Each is its own inverse but 6 and 8, which undo each other; no two are alike."""
    pixels = np.arange(6).reshape(2, 3, 1)
    turned = [turn_upright(pixels, value) for value in range(1, 9)]
    assert len({(one.shape, one.tobytes()) for one in turned}) == 8
    for value, inverse in ((1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (6, 8), (7, 7), (8, 6)):
        np.testing.assert_array_equal(turn_upright(turned[value - 1], inverse), pixels)
    # EXIF 6: the stored first row is the right-hand side of the upright picture.
    np.testing.assert_array_equal(turned[5][:, -1], pixels[0])
