"""Copies hang reports to stderr with a tag; a program of its own, run by file name, standard library only.

It ends when its input does, which is when the process that started it is gone.
"""

import sys
import threading
from pathlib import Path

_POLL_SECONDS = 0.2


def copy_new_lines(folder: Path, rank: int, positions: dict[Path, int]) -> None:
    """Write what was added to the rank's files since the last call to stderr, each line with its file's tag.

    Args:
        folder: Folder of the files.
        rank: Rank whose files are meant.
        positions: How many bytes of each file were copied; updated.
    """
    for path in sorted([*folder.glob(f"r{rank}.txt"), *folder.glob(f"r{rank}-*.txt")]):
        with path.open("rb") as file:
            file.seek(positions.get(path, 0))
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]  # half a line waits for its rest
        positions[path] = positions.get(path, 0) + len(whole)
        for line in whole.decode(errors="replace").splitlines():
            sys.stderr.write(f"[{path.stem}] {line}\n")
    sys.stderr.flush()


def main(folder: str, rank: str) -> None:
    """Copy until the input ends.

    Args:
        folder: Folder of the files.
        rank: Rank whose files are meant.
    """
    ended = threading.Event()
    threading.Thread(target=_set_at_end_of_input, args=(ended,), daemon=True).start()
    positions: dict[Path, int] = {}
    while not ended.wait(_POLL_SECONDS):
        copy_new_lines(Path(folder), int(rank), positions)
    copy_new_lines(Path(folder), int(rank), positions)


def _set_at_end_of_input(ended: threading.Event) -> None:
    sys.stdin.buffer.read()
    ended.set()


if __name__ == "__main__":
    main(*sys.argv[1:])
