"""Damage image files in every way and compare ``read_image`` with Pillow, tifffile and NumPy.

    python tests-integration/fuzz_images.py --count 1000 --seed 0

For each file exactly one of two outcomes is right: the pixels that the strict independent reader gives, or an
``ImageReadError`` that names the file. Wrong are other pixels, pixels where the strict reader refuses, another exception,
a native crash, and a file that takes longer than ten seconds or more than four gigabytes. Reading runs in
subprocesses, so that a crash is seen and blamed on its file.
"""

import argparse
import collections
import io
import json
import logging
import os
import resource
import struct
import subprocess
import sys
import tempfile
import time
import warnings
import zlib
from pathlib import Path

import numpy as np

MEMORY_LIMIT = 4 * 2**30
SECONDS_PER_FILE = 10


def seed_files():
    """Return (suffix, content) of healthy files of every kind that is read."""
    import tifffile
    from PIL import Image

    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (33, 41, 4), dtype=np.uint8)
    smooth = np.add.outer(np.arange(33) * 3, np.arange(41) * 2)[..., None] + np.array([0, 20, 40])
    files = []

    def save(image, suffix, **options):
        buffer = io.BytesIO()
        image.save(buffer, {"png": "PNG", "jpg": "JPEG"}[suffix], **options)
        files.append((suffix, buffer.getvalue()))

    exif = Image.Exif()
    exif[274] = 6
    for pixels in (noise[..., :3], smooth.astype(np.uint8)):
        rgb = Image.fromarray(pixels)
        for options in ({}, {"progressive": True}, {"restart_marker_blocks": 2}, {"subsampling": 0}, {"exif": exif}):
            save(rgb, "jpg", **options)
        save(rgb.convert("L"), "jpg")
        save(rgb.convert("CMYK"), "jpg")
        for options in ({}, {"compress_level": 0}, {"exif": exif}):
            save(rgb, "png", **options)
        save(rgb.quantize(16), "png", transparency=2)
        save(rgb.convert("L"), "png")
        save(rgb.convert("1"), "png")
    save(Image.fromarray(noise), "png")
    save(Image.fromarray(noise[..., :2].copy(), "LA"), "png")
    save(Image.fromarray(rng.integers(0, 65536, (33, 41), dtype=np.uint16)), "png")
    bands = rng.integers(0, 65536, (33, 41, 13), dtype=np.uint16)
    for array in (
        bands[..., :4],
        bands[..., :8],
        bands,
        noise[..., 0],
        noise[..., :3],
        bands.astype(np.float32)[..., 0],
    ):
        photometric = "rgb" if array.ndim == 3 and array.shape[2] == 3 else "minisblack"
        for planar in ("contig", "separate") if array.ndim == 3 else (None,):
            for layout in ({}, {"rowsperstrip": 7}, {"tile": (16, 16)}, {"compression": "zlib", "rowsperstrip": 11}):
                buffer = io.BytesIO()
                written = array.transpose(2, 0, 1) if planar == "separate" else array
                tifffile.imwrite(buffer, written, photometric=photometric, planarconfig=planar, metadata=None, **layout)
                files.append(("tif", buffer.getvalue()))
    for array in (noise, bands, bands[..., 0].astype(np.float32), np.asfortranarray(bands), bands.astype(">u2")):
        buffer = io.BytesIO()
        np.save(buffer, array)
        files.append(("npy", buffer.getvalue()))
    return files


def damage(content, suffix, rng):
    """Return the content damaged in one way, and that way's name."""
    kinds = ["cut", "header", "anywhere", "zeros", "hole", "repeat", "noise", "end", "checksum"]
    kind = str(rng.choice(kinds))
    data = bytearray(content)
    head = min(len(data), 400)
    if kind == "cut":
        return bytes(data[: rng.integers(0, len(data))]), kind
    if kind in ("header", "checksum"):
        for _ in range(rng.integers(1, 5)):
            reach = head if kind == "header" else len(data)
            data[rng.integers(0, reach)] = rng.integers(0, 256)
        if kind == "checksum" and suffix == "png":
            data = repaired_png(data)
    elif kind == "anywhere":
        for _ in range(rng.integers(1, 9)):
            data[rng.integers(0, len(data))] ^= 1 << int(rng.integers(0, 8))
    elif kind == "noise":
        start = int(rng.integers(0, 40))
        data[start:] = rng.integers(0, 256, len(data) - start, dtype=np.uint8).tobytes()
    else:
        start = int(rng.integers(0, len(data)))
        length = int(rng.integers(1, 1 + max(1, len(data) // 3)))
        if kind == "zeros":
            data[start : start + length] = bytes(len(data[start : start + length]))
        elif kind == "hole":
            del data[start : start + length]
        elif kind == "repeat":
            data[start:start] = data[start : start + length]
        elif kind == "end":  # cut, with the format's end mark glued on
            end = {"png": b"\0\0\0\0IEND\xae\x42\x60\x82", "jpg": b"\xff\xd9", "tif": b"", "npy": b""}[suffix]
            data = data[:start] + end
    return bytes(data), kind


def repaired_png(data):
    """Give every chunk the right checksum, so that the damage reaches the decoder."""
    position = 8
    while position + 12 <= len(data):
        length = int.from_bytes(data[position : position + 4], "big")
        end = position + 12 + length
        if end > len(data):
            break
        data[end - 4 : end] = struct.pack(">I", zlib.crc32(data[position + 4 : end - 4]))
        position = end
    return data


def strict_pixels(path):
    """Return what the independent reader makes of a file: (H, W, C) with alpha, or raise.

    Pillow refuses cut files by itself, and warns about large or odd ones, which is an error here; tifffile is strict
    when what it logs is an error.
    """
    if path.suffix == ".tif":
        return strict_tiff(path)
    if path.suffix == ".npy":
        pixels = np.load(path)
        return pixels if pixels.ndim == 3 else pixels[..., None]
    from PIL import Image, ImageOps

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings(
            "ignore", "Corrupt EXIF data|Tag data larger than file"
        )  # the pixels are whole; they stay as stored
        with Image.open(path) as image:
            image.load()
            mode = image.mode
            if mode in ("1", "P"):
                mode = "L" if mode == "1" else "RGB"
            if "transparency" in image.info:
                mode = {"L": "LA", "RGB": "RGBA"}.get(mode, mode)
            converted = image if mode == image.mode else image.convert(mode)
            try:
                pixels = np.asarray(ImageOps.exif_transpose(converted))
            except SyntaxError:  # damaged EXIF: Pillow leaves the picture as stored until it is asked to turn it
                pixels = np.asarray(converted)
    return pixels if pixels.ndim == 3 else pixels[..., None]


def strict_tiff(path):
    import tifffile

    class Raise(logging.Handler):
        def emit(self, record):
            raise ValueError(record.getMessage())

    logger = logging.getLogger("tifffile")
    handler = Raise()
    logger.addHandler(handler)
    try:
        with tifffile.TiffFile(path) as tiff:
            page = tiff.pages[0]
            pixels = page.asarray(squeeze=False)
            pixels = np.where(pixels, np.uint8(255), np.uint8(0)) if pixels.dtype == bool else pixels
    finally:
        logger.removeHandler(handler)
    return np.moveaxis(pixels[:, 0], 0, 2).reshape(*pixels.shape[2:4], -1)


def judge(path):
    """Return (verdict, detail) for one file."""
    from srforge.data.images import ImageReadError, read_image

    try:
        pixels = read_image(path, alpha="keep")
    except ImageReadError as error:
        return ("refused", str(error)) if str(error).startswith(str(path)) else ("WRONG: unnamed", str(error))
    except BaseException as error:  # noqa: BLE001  (whatever else is raised is what this program looks for)
        return "WRONG: exception", repr(error)
    try:
        expected = strict_pixels(path)
    except Exception as error:  # noqa: BLE001  (the strict reader refuses)
        return "WRONG: strict reader refuses", repr(error)
    if pixels.shape != expected.shape or not np.array_equal(pixels, expected, equal_nan=pixels.dtype.kind == "f"):
        return "WRONG: other pixels", f"{pixels.shape} {pixels.dtype} against {expected.shape} {expected.dtype}"
    return "same pixels", ""


def judge_all(folder, first):
    """Judge files from `first` on, one JSON line each; the parent restarts this after a crash."""
    from srforge.data import import_cv2

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    judge(folder / "missing.png")  # imports what reading needs: no file is to blame for that time
    import_cv2()
    for path in sorted(folder.iterdir())[first:]:
        print(json.dumps({"file": path.name}), flush=True)
        start = time.perf_counter()
        verdict, detail = judge(path)
        if time.perf_counter() - start > SECONDS_PER_FILE:
            verdict = "WRONG: too slow"
        print(json.dumps({"verdict": verdict, "detail": detail[:300]}), flush=True)


def judgements(folder):
    """Yield (file name, verdict, detail) of every file, crashes included."""
    names = sorted(path.name for path in folder.iterdir())
    first = 0
    while first < len(names):
        command = [sys.executable, __file__, "--judge", str(folder), "--first", str(first)]
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # threads reserve memory
        limit = 60 + SECONDS_PER_FILE * 6 + (len(names) - first) // 5
        try:
            done = subprocess.run(command, capture_output=True, timeout=limit, check=False, env=environment)
            output, ending = done.stdout, f"exit status {done.returncode}: {done.stderr[-300:]!r}"
        except subprocess.TimeoutExpired as error:
            output, ending = error.stdout or b"", f"nothing after {limit} s"
        answers = [json.loads(line) for line in output.splitlines() if line.endswith(b"}")]
        verdicts = [answer for answer in answers if "verdict" in answer]
        for answer in verdicts:
            yield names[first], answer["verdict"], answer["detail"]
            first += 1
        if first < len(names):
            yield names[first], "WRONG: crash", ending
            first += 1


def fuzz(count, seed, folder):
    """Write `count` damaged files into a folder and return [(name, verdict, detail)]."""
    rng = np.random.default_rng(seed)
    seeds = seed_files()
    by_suffix = {suffix: [content for found, content in seeds if found == suffix] for suffix, _ in seeds}
    for index in range(count):
        suffix = ("png", "jpg", "tif", "npy")[index % 4]
        contents = by_suffix[suffix]
        content, kind = damage(contents[rng.integers(0, len(contents))], suffix, rng)
        (folder / f"{index:06d}-{kind}.{suffix}").write_bytes(content)
    return list(judgements(folder))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="write the files into this folder and leave them there")
    parser.add_argument("--judge", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.judge:
        judge_all(options.judge, options.first)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        results = fuzz(options.count, options.seed, folder)
    table = collections.Counter((Path(name).suffix, verdict) for name, verdict, _ in results)
    for (suffix, verdict), number in sorted(table.items()):
        print(f"{suffix}  {verdict:32} {number}")
    wrong = [result for result in results if result[1].startswith("WRONG")]
    for name, verdict, detail in wrong[:40]:
        print(f"{name}: {verdict}: {detail}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
